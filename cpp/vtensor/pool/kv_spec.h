// KVSpec: the shape of a model's KV cache, and where each layer's K and V lie in the planes.
//
// Layers of one shape are a group. A group's planes hold
//
//   layers_per_plane == 1   dense: K and V of a layer have a plane each, [tokens, heads, dim]
//   layers_per_plane == n   interleaved: one plane holds n layers, K and V side by side,
//                           [tokens, n, heads x key_dim + heads x value_dim]
//
// Where the layers are no multiple of n, the last plane has places that stay empty. Only groups
// with a window may: others would lose that memory with every token.
//
// Immutable values; safe from every thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "vtensor/pool/geometry.h"

namespace vtensor {

// Which of the two tensors of a layer.
enum class KV { kKey = 0, kValue = 1 };

struct KVGroup {
  std::vector<size_t> layers;  // the model's, in the order in which they lie in the planes
  size_t num_kv_heads = 0;
  size_t key_dim = 0;
  size_t value_dim = 0;  // 0: keys alone are kept
  size_t element_bytes = 0;
  size_t layers_per_plane = 1;
  size_t window = 0;  // tokens that a query reads, its own among them; 0: all

  size_t dim(KV which) const { return which == KV::kKey ? key_dim : value_dim; }
  // Of one layer and one token. These throw std::invalid_argument on overflow.
  size_t bytes_of(KV which) const;
  size_t num_places() const;       // for layers in all planes, empty ones among them
  size_t bytes_per_token() const;  // of all places
  std::vector<size_t> plane_token_bytes() const;
};

// A model whose layers all have one shape.
struct UniformKV {
  size_t num_layers = 0;
  size_t num_kv_heads = 0;
  size_t head_dim = 0;
  size_t element_bytes = 0;
  size_t max_seq_len = 0;
  size_t layers_per_plane = 1;
};

struct KVSpec {
  std::vector<KVGroup> groups;
  size_t max_seq_len = 0;

  KVSpec() = default;
  KVSpec(const UniformKV& shape);  // one group: NOLINT(google-explicit-constructor)

  size_t num_planes() const;
  // Bytes of one token in one column: the greatest that divides a token's bytes in every plane.
  size_t token_bytes() const;
  size_t row_chunks() const;       // columns of all planes
  size_t bytes_per_token() const;  // in all planes; throws std::invalid_argument on overflow
  // Throws std::invalid_argument naming the first field that makes no sense.
  void check() const;
};

struct LayerPlace {
  const KVGroup* group = nullptr;
  size_t plane = 0;
  size_t offset_bytes = 0;  // inside a token
  size_t token_bytes = 0;   // of the plane
};

// Throws std::out_of_range for a layer that keeps no such tensor.
LayerPlace locate(const KVSpec& spec, size_t layer, KV which);

// Throws std::invalid_argument when the sizes do not fit each other or overflow.
Geometry make_geometry(const KVSpec& spec, size_t chunk_bytes, size_t granularity,
                       size_t max_slots);

}  // namespace vtensor
