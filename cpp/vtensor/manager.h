// Manager: the vTensor Manager, the only class that Python sees: a lock, the trace and the clocks
// around the core.
//
// Thread-safety: full; one mutex. Driver work of pre_extend() runs on the worker without the mutex;
// calls that need a vTensor that the worker is busy with wait for that vTensor.
//
// Lifetime: held by std::shared_ptr; a tensor view keeps the manager, its address ranges and its
// chunks alive. close() releases everything that no view needs. In a forked child calls throw
// Error, and close() and the destructor do nothing: memory and worker are the parent's.
//
// Errors: ReleasedError after close() or release(), std::out_of_range for foreign ids and layers,
// std::invalid_argument for values that make no sense, DriverError from the driver. A try_ function
// tells shortage by its value and changes nothing then.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "vtensor/core/background.h"
#include "vtensor/core/snapshot.h"
#include "vtensor/core/tensor_view.h"
#include "vtensor/core/trace.h"
#include "vtensor/driver/wrappers/metered_driver.h"
#include "vtensor/manager_options.h"
#include "vtensor/ops/sharing.h"
#include "vtensor/util/fork.h"

namespace vtensor {

class Manager : public std::enable_shared_from_this<Manager> {
 public:
  static std::shared_ptr<Manager> open(std::unique_ptr<Driver> driver, const KVSpec& spec,
                                       const ManagerOptions& options);
  ~Manager();
  Manager(const Manager&) = delete;
  Manager& operator=(const Manager&) = delete;

  // wait: for the slots of released vTensors that a running step may still read, if none is left.
  std::optional<VTensorId> try_create(std::span<const Token> tokens, const std::string& salt,
                                      size_t expected_tokens = 0, bool to_export = false,
                                      bool wait = false);
  // Always waits for these.
  std::optional<VTensorId> try_fork(VTensorId id);
  void release(VTensorId id);
  bool try_extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens);
  // As try_extend(), but throws OutOfMemoryError with bytes asked, available and budget.
  void extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens);
  // Maps ahead of need on the worker, which then does its upkeep: scrubbing, creating, giving back.
  // Never fails, never waits.
  void pre_extend(const std::vector<VTensorId>& ids, const std::vector<size_t>& num_tokens);
  // Says whether steps run: see Upkeep::set_busy(). Also while asleep. Never waits.
  void set_busy(bool busy);
  // Says that all queries to come of ids[i] are at token num_tokens[i] or later: rows that windows
  // have left then are given back, by the worker and behind the steps that may read them. Never
  // fails, never waits.
  void forget(const std::vector<VTensorId>& ids, const std::vector<size_t>& num_tokens);
  // Returns when the worker has nothing left to do.
  void drain();
  void truncate(VTensorId id, size_t num_tokens);

  // Around the kernels of a step, for devices that run them later: until the kernels issued to
  // `stream` between the two are over, nothing that they may read is unmapped, remapped or reused.
  // What would have to change it waits for steps in flight and is refused between the two.
  void begin_step();
  // When it throws, the step is still open; it may be repeated.
  void end_step(uintptr_t stream);

  size_t record_prefix(VTensorId id, std::span<const Token> tokens);
  size_t match_prefix(std::span<const Token> tokens, const std::string& salt);
  // `ttl_seconds` <= 0: until unpin_prefix(). Returns the pinned length.
  size_t pin_prefix(std::span<const Token> tokens, const std::string& owner, double ttl_seconds,
                    const std::string& salt);
  size_t unpin_prefix(const std::string& owner);
  size_t reset_prefix_cache();  // Returns tokens forgotten.

  // Keeps a log from now on of the blocks of tokens that are recorded and forgotten: see
  // pool/block_log.h. The first events tell what is recorded already. Also while asleep.
  void watch_blocks();
  // Ends that and the waiting of take_block_events().
  void unwatch_blocks();
  // Has the next events tell everything anew, beginning with kCleared.
  void retell_blocks();
  // Events since the last call, once there are any or the time is over; nullopt when nobody watches
  // (any more) and all events have been taken.
  std::optional<std::vector<BlockEvent>> take_block_events(double timeout_seconds);

  // To another process and from one, as descriptors of memory: see core/handover.h. A vTensor that
  // was created `to_export` goes without a copy. Both give nothing, with nothing changed, when
  // memory (or slots) are short, and throw std::invalid_argument where the driver cannot do it.
  std::optional<Parcel> try_export(VTensorId id);
  std::optional<VTensorId> try_adopt(const Parcel& parcel, const std::string& salt);

  // Moves a vTensor's contents to the swap store and gives its chunks up; it keeps its addresses.
  // False: the store is too full, nothing changed. Requires: no views of it.
  bool try_swap_out(VTensorId id);
  // Brings them back, aliasing recorded whole rows of `tokens` (may be empty). False: short.
  bool try_swap_in(VTensorId id, std::span<const Token> tokens);
  // Saves all contents to a file in `directory` (empty: host memory) and gives all physical memory
  // back; returns bytes. Until wake(), which restores them behind the same addresses, only
  // release(), info(), stats(), snapshot(), check_integrity() and close() are allowed; what is
  // released keeps its slot until then. Requires: no views of vTensors.
  size_t sleep(const std::string& directory);
  void wake();
  bool is_asleep() const;

  size_t evict(size_t num_bytes);  // Returns bytes that became free.
  size_t trim();                   // Returns bytes given back to the system.
  size_t memory_budget() const;
  // Throws OutOfMemoryError, nothing changed, when more than that is in use.
  void set_memory_budget(size_t num_bytes);
  // What a fresh vTensor holds at most while it grows to that length, options.step_tokens at a
  // time; without what windows keep, if asked for.
  size_t bytes_for(size_t num_tokens, bool with_windows = true) const;

  // What these vTensors hold in the same chunks, of the first num_tokens[i] tokens of each: see
  // ops/sharing.h. Cheap enough for every step; immediate while no chunk has two readers.
  std::vector<SharedRange> shared_ranges(std::span<const VTensorId> ids,
                                         std::span<const size_t> num_tokens);

  TensorView view(VTensorId id, size_t layer, KV which);
  TensorView arena(size_t layer, KV which);

  // Cheap enough for every step, unlike stats().
  MappingTimes mapping_times() const;
  size_t available_bytes() const;
  // Writes every operation and driver call from now on to a file: see core/trace.h.
  void start_trace(const std::string& path);
  // Ends the file. Throws DriverError when it is incomplete. Nothing while no trace is open.
  void stop_trace();
  bool is_tracing() const;
  // What a vTensor is called in the trace. Nothing while no trace is open.
  void label(VTensorId id, const std::string& text);

  VTensorInfo info(VTensorId id) const;
  Snapshot snapshot() const;
  Stats stats() const;
  size_t resident_bytes() const;  // as in stats(), at no cost
  void check_integrity() const;
  // Waits for running steps, releases every vTensor and gives all memory that no view needs back to
  // the system.
  void close();

  const KVSpec& spec() const { return spec_; }
  const Geometry& geometry() const { return pool_.geometry; }
  Device device() const { return pool_.driver->device(); }

 private:
  using Lock = Background::Lock;

  Manager(std::unique_ptr<MeteredDriver> driver, std::shared_ptr<TraceWriter> trace,
          const KVSpec& spec, const Geometry& geometry, const ManagerOptions& options);

  bool is_inherited() const noexcept;  // By a forked child.
  Lock lock() const;                   // Throws when closed or asleep.
  Lock lock_awake_or_not() const;      // Throws when closed.
  Lock lock_in_any_state() const;      // As both, throws in a forked child.
  void check_process() const;
  void check_usable() const;  // Throws when closed or asleep.
  // Both let others at the mutex meanwhile, and throw when the manager was closed or put to sleep.
  void wait_until_idle(Lock& lock, std::span<const VTensorId> ids);
  void wait_until_quiet(Lock& lock);
  size_t bytes_of(size_t num_chunks) const { return num_chunks * pool_.geometry.chunk_bytes; }
  bool extend_by_chunks(Lock& held, std::span<const VTensorId> ids,
                        std::span<const size_t> num_tokens);
  void release_now(VTensorId id);
  // Writes what swapped-out vTensors but `spared` still hold to the store. False: that freed
  // nothing.
  bool spill(size_t num_chunks, VTensorId spared = kNoVTensor);
  size_t num_available() const {
    return core_.reclaimer.num_available() + core_.swapper.num_spillable(swap_store_);
  }
  void end_view(SlotId slot) noexcept;
  void expire_pins();
  void check_hands_over() const;
  void stop_watching();  // Requires: the mutex is held.

  KVSpec spec_;
  ManagerOptions options_;
  std::shared_ptr<TraceWriter> trace_;  // the driver's wrapper writes to it as well
  MeteredDriver* meter_;                // pool_.driver, by its own type
  BlockLog block_log_;                  // before the pool, whose rTree may write to it to its end
  Pool pool_;
  Core core_;
  SwapStore swap_store_;
  std::unique_ptr<SwapStore> sleep_store_;
  bool closed_ = false;
  uint64_t exposed_ns_ = 0;
  mutable std::mutex mutex_;
  const uint32_t generation_ = process_generation();
  Background background_;  // last: its worker stops before anything above goes away
};

}  // namespace vtensor
