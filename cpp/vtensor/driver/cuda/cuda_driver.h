// CudaDriver: Driver over the virtual memory management of one NVIDIA GPU. One driver, and so one
// manager, a device; the compute capability does not matter.
//
// Thread-safety: as Driver: every call from any thread, calls on the same addresses or chunk
// ordered by the caller. A call checks and changes the books, is made without a lock, so that the
// worker's slow creates do not hold up a map on the step's path, and is taken back in the books
// when the driver refuses it. (Only reserving a slab of the window holds the lock.)
//
// Invariants (beside Driver's rules):
//  1. One cuMemCreate handle a chunk, because cuMemMap's offset must be 0. All chunks have one
//     size; a Handle is the chunk's offset in the window.
//  2. Each chunk is mapped read-write in the window (cuda_window.h) from create() to release().
//  3. create() zero-fills: CUDA does not document that new memory is zero. It issues the fill and
//     does not wait: map(), release() and whatever touches contents wait for all fills issued
//     before them, once for a run of new chunks.
//  4. Copies and fills run on a non-blocking stream of the driver's own and have finished when the
//     call returns. They are not ordered after other streams' kernels.
//  5. No call here waits for running kernels. unmap(), map() and set_access() on addresses that a
//     kernel may read are the caller's mistake: gate them by a CudaEvent.
//  6. A chunk that may be handed over is one descriptor, of memory that was created for that; the
//     GPU's driver counts who has it, in all processes (cuda_handover.cpp).
//  7. A failed rollback is said in the error's text, and the books then show what really is mapped.
//
// Weaker than on the host:
//  - kGuard: a kernel that reads an unmapped address ends the whole context (illegal address).
//  - kZero is refused. CUDA has no lazy zero page, and a real zero chunk behind all that is
//    unmapped would have to go before each map(), next to addresses that kernels read. Padded
//    kernels need mapped, scrubbed rows instead.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "vtensor/driver/cuda/cuda_context.h"
#include "vtensor/driver/cuda/cuda_event.h"
#include "vtensor/driver/cuda/cuda_window.h"
#include "vtensor/driver/driver.h"
#include "vtensor/driver/ledger.h"
#include "vtensor/util/units.h"

namespace vtensor {

struct CudaOptions {
  int device_index = 0;
  std::string libcuda_path;  // empty: $FLEXINFER_LIBCUDA, then "libcuda.so.1"
  UnmappedPolicy unmapped = UnmappedPolicy::kGuard;
  size_t window_slab_bytes = 64 * kGiB;  // address space only, reserved piece by piece
};

class CudaDriver final : public Driver {
 public:
  // Throws DriverError without libcuda, device or virtual memory management; std::invalid_argument
  // for a device index out of range or UnmappedPolicy::kZero.
  explicit CudaDriver(const CudaOptions& options = {});
  // Gives back everything, also what the caller forgot. REQUIRES: no kernel uses it any more.
  ~CudaDriver() override;
  CudaDriver(const CudaDriver&) = delete;
  CudaDriver& operator=(const CudaDriver&) = delete;

  std::string_view name() const noexcept override { return "cuda"; }
  Device device() const noexcept override {
    return {Device::Type::kCuda, context_->device_index()};
  }
  bool has_memory() const noexcept override { return true; }
  size_t granularity() const noexcept override { return granularity_; }

  uintptr_t reserve(size_t size_bytes, size_t alignment_bytes) override;
  void free(uintptr_t addr, size_t size_bytes) override;

  // OutOfMemoryError carries the device's free bytes, and its total bytes as the budget.
  Handle create(size_t chunk_bytes) override;
  void release(Handle handle, size_t chunk_bytes) override;

  void map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) override;
  void set_access(uintptr_t addr, size_t size_bytes, Access access) override;
  void unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) override;

  std::optional<Handle> mapped_at(uintptr_t addr) const override;

  // Source and destination may lie in one chunk, but may not overlap.
  void copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
            size_t size_bytes) override;
  void fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte value) override;
  void read(Handle src, size_t src_offset, std::span<std::byte> out) override;
  void write(Handle dst, size_t dst_offset, std::span<const std::byte> in) override;

  bool hands_over() const noexcept override { return hands_over_; }
  Handle create_apart(size_t chunk_bytes, Apart apart) override;
  std::vector<bool> sendable(std::span<const Handle> handles) const override;
  SentChunks send(std::span<const Handle> handles) override;
  std::vector<Handle> receive(const SentChunks& sent, size_t chunk_bytes) override;

  // `stream` is a CUstream of this device, not being captured into a graph.
  std::unique_ptr<Fence> fence(uintptr_t stream) override;
  void synchronize() override;

  // To make CudaEvents with; may outlive the driver.
  std::shared_ptr<const CudaContext> context() const noexcept { return context_; }

 private:
  const CudaApi& api() const noexcept { return context_->api(); }
  void check_create(cuda::CUresult code, const char* call, size_t chunk_bytes) const;
  cuda::CUresult grant(uintptr_t addr, size_t size_bytes, Access access) const noexcept;
  // What is behind a chunk. Not in the books, since only this driver needs it.
  struct Allocation {
    cuda::CUmemGenericAllocationHandle handle = 0;
    bool exists = false;
    bool in_window = false;  // false: lost when an undo failed too; contents cannot be reached
    bool can_be_sent = false;
  };
  // Memory for one chunk, from cuMemCreate or another process.
  using Obtain = std::function<cuda::CUmemGenericAllocationHandle()>;
  struct Mapping {  // of one chunk
    uintptr_t addr;
    cuda::CUmemGenericAllocationHandle handle;
    size_t size_bytes;
    Access access;
  };

  static uint64_t offset_of(Handle handle) { return static_cast<uint64_t>(handle); }
  // These three require mutex_.
  Allocation& allocation(Handle handle);
  const Allocation& allocation(Handle handle) const;
  std::vector<Mapping> chunks_of(std::span<const Ledger::Run> runs);
  void give_place_back(Handle handle);
  std::pair<Handle, cuda::CUdeviceptr> claim_place(size_t chunk_bytes);
  cuda::CUmemGenericAllocationHandle allocate(size_t chunk_bytes,
                                              cuda::CUmemAllocationHandleType type) const;
  cuda::CUmemGenericAllocationHandle import(int fd) const;
  void fill_with_zeros(cuda::CUdeviceptr addr, size_t chunk_bytes);
  Handle add_chunk(size_t chunk_bytes, const Obtain& obtain, bool is_new, bool can_be_sent);
  cuda::CUdeviceptr content_addr(Handle handle, size_t offset, size_t size_bytes);
  cuda::CUresult map_again(const Mapping& mapping) const noexcept;
  void unmap_from_driver(std::span<const Mapping> mappings, std::vector<uintptr_t>& lost);
  void unmap_one_by_one(std::span<const Mapping> mappings, std::vector<uintptr_t>& lost);
  cuda::CUstream create_stream() const;
  void finish(cuda::CUstream stream) const;
  // Waits for the zero-fills that were issued so far. REQUIRES: the context is current.
  void finish_zero_fills();

  std::shared_ptr<const CudaContext> context_;
  size_t granularity_;
  bool hands_over_;
  mutable std::mutex mutex_;  // guards the next three
  Ledger ledger_;
  CudaWindow window_;
  std::vector<Allocation> allocations_;  // by offset / chunk size
  cuda::CUstream stream_ = nullptr;
  // create()'s zero-fills: the worker's, which a copy of the step must not stand behind.
  cuda::CUstream zero_stream_ = nullptr;
  std::atomic<uint64_t> num_zero_fills_{0};
  std::atomic<uint64_t> num_zero_fills_over_{0};  // at most the truth
  // Cleared when this driver refuses to unmap several mappings by one call; see
  // unmap_from_driver().
  std::atomic<bool> can_unmap_runs_{true};
};

}  // namespace vtensor
