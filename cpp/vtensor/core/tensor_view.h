// TensorView: strided tensors of KV data over the arenas.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "vtensor/pool/kv_spec.h"
#include "vtensor/pool/vset.h"

namespace vtensor {

// `lease` keeps the memory alive; strides count elements.
struct TensorView {
  uintptr_t address = 0;
  std::vector<size_t> shape;
  std::vector<int64_t> strides;
  std::shared_ptr<void> lease;
};

// [tokens, heads, dim] of one slot. Throws std::out_of_range for a layer that the model lacks.
TensorView slot_view(const VSet& vset, const KVSpec& spec, size_t layer, KV which, SlotId slot,
                     size_t num_tokens);
// [slots, tokens, heads, dim] of all slots.
TensorView arena_view(const VSet& vset, const KVSpec& spec, size_t layer, KV which);

}  // namespace vtensor
