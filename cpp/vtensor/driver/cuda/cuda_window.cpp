#include "vtensor/driver/cuda/cuda_window.h"

#include <algorithm>
#include <utility>

namespace vtensor {

CudaWindow::CudaWindow(std::shared_ptr<const CudaContext> context, size_t slab_bytes)
    : context_(std::move(context)), slab_bytes_(slab_bytes) {}

CudaWindow::~CudaWindow() {
  try {
    const CudaContext::Scope scope(*context_);
    for (const Slab& slab : slabs_) {
      (void)context_->api().cuMemAddressFree(slab.addr, slab.size_bytes);
    }
  } catch (...) {
    // The driver is going down; it frees the addresses itself.
  }
}

cuda::CUdeviceptr CudaWindow::acquire(size_t slot_bytes) {
  const std::lock_guard lock(mutex_);
  SlotClass& slots = slot_classes_[slot_bytes];
  if (!slots.free.empty()) {
    const auto addr = slots.free.back();
    slots.free.pop_back();
    return addr;
  }
  if (slots.free.capacity() <= slots.num_slots) {
    slots.free.reserve(std::max<size_t>(64, 2 * slots.num_slots));
  }
  if (slots.next == slots.end) add_slab(slots, slot_bytes);
  ++slots.num_slots;
  return std::exchange(slots.next, slots.next + slot_bytes);
}

void CudaWindow::add_slab(SlotClass& slots, size_t slot_bytes) {
  const size_t size_bytes = std::max(slab_bytes_ / slot_bytes, size_t{1}) * slot_bytes;
  slabs_.reserve(slabs_.size() + 1);
  const auto& api = context_->api();
  cuda::CUdeviceptr addr = 0;
  api.check(api.cuMemAddressReserve(&addr, size_bytes, 0, 0, 0), "cuMemAddressReserve",
            [&] { return cuda_args("size", size_bytes, "alignment", 0, "purpose", "window"); });
  slabs_.push_back({addr, size_bytes});
  slots.next = addr;
  slots.end = addr + size_bytes;
}

void CudaWindow::give_back(cuda::CUdeviceptr addr, size_t slot_bytes) noexcept {
  const std::lock_guard lock(mutex_);
  slot_classes_.find(slot_bytes)->second.free.push_back(addr);
}

}  // namespace vtensor
