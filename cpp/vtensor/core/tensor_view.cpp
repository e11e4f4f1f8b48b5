#include "vtensor/core/tensor_view.h"

namespace vtensor {

TensorView slot_view(const VSet& vset, const KVSpec& spec, size_t layer, KV which, SlotId slot,
                     size_t num_tokens) {
  const LayerPlace place = locate(spec, layer, which);
  const KVGroup& group = *place.group;
  TensorView view;
  view.address = vset.base(place.plane, slot) + place.offset_bytes;
  view.shape = {num_tokens, group.num_kv_heads, group.dim(which)};
  view.strides = {static_cast<int64_t>(place.token_bytes / group.element_bytes),
                  static_cast<int64_t>(group.dim(which)), 1};
  return view;
}

TensorView arena_view(const VSet& vset, const KVSpec& spec, size_t layer, KV which) {
  const LayerPlace place = locate(spec, layer, which);
  TensorView view = slot_view(vset, spec, layer, which, 0, spec.max_seq_len);
  view.shape.insert(view.shape.begin(), vset.num_slots());
  view.strides.insert(
      view.strides.begin(),
      static_cast<int64_t>(vset.slot_stride_bytes(place.plane) / place.group->element_bytes));
  return view;
}

}  // namespace vtensor
