// Manager: tensor views of its memory, and what keeps that memory while they live.
#include <utility>

#include "vtensor/manager.h"

namespace vtensor {

// Keeps a slot's address range and chunks while a tensor view of it lives.
struct Manager::SlotLease {
  std::shared_ptr<Manager> manager;
  SlotId slot;

  SlotLease(std::shared_ptr<Manager> owner, SlotId held) : manager(std::move(owner)), slot(held) {}
  ~SlotLease() { manager->end_view(slot); }
  SlotLease(const SlotLease&) = delete;
  SlotLease& operator=(const SlotLease&) = delete;
};

TensorView Manager::make_view(size_t layer, KV which) const {
  const LayerPlace place = locate(spec_, layer, which);
  const auto elements = [&](size_t bytes) {
    return static_cast<int64_t>(bytes / spec_.element_bytes);
  };
  TensorView view;
  view.address = pool_.vset.address(place.plane, 0, 0) + place.offset_bytes;
  view.shape = {spec_.max_tokens, spec_.num_kv_heads, spec_.head_dim};
  view.strides = {elements(pool_.geometry.token_bytes), static_cast<int64_t>(spec_.head_dim), 1};
  return view;
}

TensorView Manager::view(VTensorId id, size_t layer, KV which) {
  const Lock held = lock();
  const VTensor& vtensor = scheduler_.resident(id);
  TensorView view = make_view(layer, which);
  view.address += vtensor.slot * pool_.geometry.slot_stride_bytes();
  view.shape[0] = vtensor.num_tokens;
  view.lease = std::make_shared<SlotLease>(shared_from_this(), vtensor.slot);
  ++pool_.vset[vtensor.slot].num_views;
  return view;
}

TensorView Manager::arena(size_t layer, KV which) {
  const Lock held = lock();
  TensorView view = make_view(layer, which);
  const size_t stride_bytes = pool_.geometry.slot_stride_bytes();
  view.shape.insert(view.shape.begin(), pool_.geometry.max_slots);
  view.strides.insert(view.strides.begin(),
                      static_cast<int64_t>(stride_bytes / spec_.element_bytes));
  view.lease = shared_from_this();
  return view;
}

void Manager::end_view(SlotId slot) noexcept {
  const Lock held(mutex_);
  if (--pool_.vset[slot].num_views > 0) return;
  scheduler_.unhold(slot);
  if (!closed_) return;
  try {
    scheduler_.trim();
  } catch (const std::exception&) {
    return;  // the destructor tries once more
  }
}

}  // namespace vtensor
