// CudaWindow: the driver's own permanent addresses, one slot per chunk.
//
// Copies, fills, reads and writes name a chunk, not an address, and work whether or not it is
// mapped for a request. CUDA can only reach memory through a mapping, so each chunk gets one here
// when it is created and keeps it until release. Copy-on-write and scrubbing then need no map,
// set_access and unmap around every operation (about 65 us on an A100, see docs/design.md), and
// never touch addresses that a kernel may be reading. The price is address space only: one slot a
// chunk.
//
//   slab 0 (64 GiB)   | chunk | chunk | free  | chunk | not yet used ...
//   slab 1            | ...                     reserved when slab 0 is full; one size of slot a
//   slab
//
// Thread-safety: all members may be called from any thread.
//
// Invariants:
//  1. A slot is a reserved address of its size, and has one owner from acquire() to give_back().
//  2. give_back() never allocates: room for every slot handed out is set aside by acquire().
//  3. Slabs are returned in the destructor only. REQUIRES: nothing is mapped in them by then.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "vtensor/driver/cuda/cuda_context.h"

namespace vtensor {

class CudaWindow {
 public:
  CudaWindow(std::shared_ptr<const CudaContext> context, size_t slab_bytes);
  ~CudaWindow();
  CudaWindow(const CudaWindow&) = delete;
  CudaWindow& operator=(const CudaWindow&) = delete;

  // A free slot of `slot_bytes`, reserving a new slab where needed. Throws DriverError, changing
  // nothing. REQUIRES: the context is current.
  cuda::CUdeviceptr acquire(size_t slot_bytes);
  void give_back(cuda::CUdeviceptr addr, size_t slot_bytes) noexcept;

 private:
  struct Slab {
    cuda::CUdeviceptr addr;
    size_t size_bytes;
  };
  // All slots of one size.
  struct SlotClass {
    std::vector<cuda::CUdeviceptr> free;
    cuda::CUdeviceptr next = 0;  // the first slot never used in the newest slab
    cuda::CUdeviceptr end = 0;
    size_t num_slots = 0;  // handed out at least once
  };

  void add_slab(SlotClass& slots, size_t slot_bytes);

  std::shared_ptr<const CudaContext> context_;
  size_t slab_bytes_;
  std::mutex mutex_;
  std::vector<Slab> slabs_;
  std::map<size_t, SlotClass> slot_classes_;
};

}  // namespace vtensor
