#include "vtensor/driver/cuda/cuda_window.h"

#include <algorithm>
#include <utility>

namespace vtensor {

CudaWindow::CudaWindow(std::shared_ptr<const CudaContext> context, size_t slab_bytes)
    : context_(std::move(context)), slab_bytes_(slab_bytes) {}

CudaWindow::~CudaWindow() {
  try {
    const CudaContext::Scope scope(*context_);
    for (const cuda::CUdeviceptr slab : slabs_) {
      (void)context_->api().cuMemAddressFree(slab, slab_bytes_);
    }
  } catch (...) {
    // The driver is going down; it frees the addresses itself.
  }
}

void CudaWindow::cover(uint64_t offset, size_t chunk_bytes) {
  if (slabs_.empty()) slab_bytes_ = std::max(slab_bytes_ / chunk_bytes, size_t{1}) * chunk_bytes;
  const auto& api = context_->api();
  while (offset / slab_bytes_ >= slabs_.size()) {
    slabs_.reserve(slabs_.size() + 1);
    cuda::CUdeviceptr addr = 0;
    api.check(api.cuMemAddressReserve(&addr, slab_bytes_, 0, 0, 0), "cuMemAddressReserve",
              [&] { return cuda_args("size", slab_bytes_, "alignment", 0, "purpose", "window"); });
    slabs_.push_back(addr);
  }
}

}  // namespace vtensor
