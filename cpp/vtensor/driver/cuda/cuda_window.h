// CudaWindow: the driver's own permanent addresses, one place per chunk.
//
// Copies, fills, reads and writes name a chunk, not an address, and work whether or not it is
// mapped for a request. CUDA can only reach memory through a mapping, so each chunk gets one here
// when it is created and keeps it until release. Copy-on-write and scrubbing then need no map,
// set_access and unmap around every operation (about 65 us on an A100, see docs/design.md), and
// never touch addresses that a kernel may be reading. The price is address space only.
//
//   offset    0 ................ 64 GiB ..............
//             | slab 0           | slab 1                reserved when an offset in it is first
//             used
//
// Thread-safety: none; the driver's mutex guards it. Slabs are returned in the destructor only.
// REQUIRES: nothing is mapped in them by then.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "vtensor/driver/cuda/cuda_context.h"

namespace vtensor {

class CudaWindow {
 public:
  CudaWindow(std::shared_ptr<const CudaContext> context, size_t slab_bytes);
  ~CudaWindow();
  CudaWindow(const CudaWindow&) = delete;
  CudaWindow& operator=(const CudaWindow&) = delete;

  // Makes address(offset) valid. Chunks do not cross slabs, which are whole chunks. Throws
  // DriverError, changing nothing. REQUIRES: the context is current; one chunk size, always.
  void cover(uint64_t offset, size_t chunk_bytes);
  cuda::CUdeviceptr address(uint64_t offset) const {
    return slabs_[offset / slab_bytes_] + offset % slab_bytes_;
  }

 private:
  std::shared_ptr<const CudaContext> context_;
  size_t slab_bytes_;
  std::vector<cuda::CUdeviceptr> slabs_;
};

}  // namespace vtensor
