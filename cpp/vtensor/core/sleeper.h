// Sleeper: puts the whole pool to sleep, contents saved, and wakes it behind the same addresses.
// Page tables and the rTree stay as they are; only the memory behind them goes away.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "vtensor/core/reclaimer.h"
#include "vtensor/store/swap_store.h"

namespace vtensor {

class Sleeper {
 public:
  Sleeper(CoreState& state, VTensorTable& vtensors, Retirement& retirement, Reclaimer& reclaimer)
      : state_(state),
        pool_(state.pool),
        vtensors_(vtensors),
        retirement_(retirement),
        reclaimer_(reclaimer) {}

  // Saves what is used of every chunk and gives all memory back, chunk by chunk, but for that of
  // broken slots and what the driver refuses to release. Returns bytes, less those that the store
  // itself takes from the same memory. Throws, awake, when saving or unmapping fails (asleep when
  // waking up again fails too: wake() may be repeated), and std::invalid_argument while views are
  // alive. Requires: no vTensor is busy. Until wake() no other class of core/ may change anything.
  size_t sleep(SwapStore& store);
  // Notes what is to be released when awake. Throws ReleasedError for the second time.
  void release_later(VTensorId id);
  // Returns what release_later() noted and is still alive. Throws, still asleep, when memory is
  // short or the driver fails; may be repeated.
  std::vector<VTensorId> wake(SwapStore& store);
  bool is_asleep() const { return is_asleep_; }
  // Chunks with memory behind them, asleep or awake.
  size_t num_resident_chunks() const;
  // Forgets everything that sleeps, vTensors and prefixes. The pool is awake then, and empty but
  // for broken slots. May be repeated when the driver fails.
  void discard(SwapStore& store);

 private:
  std::vector<size_t> used_bytes() const;
  std::vector<ChunkId> resident_chunks() const;
  void save_and_release(std::span<const ChunkId> chunks, std::span<const size_t> used,
                        SwapStore& store);
  void release_chunk(ChunkId id);
  std::unordered_set<ChunkId> broken_chunks() const;
  void release_memory();
  void unmap_all_slots();
  void unmap_slot(SlotId slot);
  void map_slot(SlotId slot);
  void fall_asleep_again();
  void forget_free_chunks();
  void end(SwapStore& store);

  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
  Retirement& retirement_;
  Reclaimer& reclaimer_;
  bool is_asleep_ = false;
  std::vector<VTensorId> released_;
  std::unordered_map<ChunkId, SwapStore::Ticket> saved_;  // chunks whose contents are in the store
  SlotId num_awake_slots_ = 0;  // while asleep: slots below it are mapped, left by a failed wake()
};

}  // namespace vtensor
