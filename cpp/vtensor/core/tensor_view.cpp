#include "vtensor/core/tensor_view.h"

namespace vtensor {

TensorView slot_view(const VSet& vset, const KVSpec& spec, size_t layer, KV which, SlotId slot,
                     size_t num_tokens) {
  const LayerPlace place = locate(spec, layer, which);
  TensorView view;
  view.address = vset.address(place.plane, slot, 0) + place.offset_bytes;
  view.shape = {num_tokens, spec.num_kv_heads, spec.head_dim};
  view.strides = {static_cast<int64_t>(spec.token_bytes() / spec.element_bytes),
                  static_cast<int64_t>(spec.head_dim), 1};
  return view;
}

TensorView arena_view(const VSet& vset, const KVSpec& spec, size_t layer, KV which) {
  TensorView view = slot_view(vset, spec, layer, which, 0, spec.max_seq_len);
  const size_t stride_bytes = vset.address(0, 1, 0) - vset.address(0, 0, 0);
  view.shape.insert(view.shape.begin(), vset.num_slots());
  view.strides.insert(view.strides.begin(),
                      static_cast<int64_t>(stride_bytes / spec.element_bytes));
  return view;
}

}  // namespace vtensor
