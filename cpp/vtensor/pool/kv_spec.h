// KVSpec: the shape of a model's KV cache, and where each layer's K and V lie in the planes.
//
//   layers_per_plane == 1   dense: K and V of a layer have a plane each, [tokens, heads, dim]
//   layers_per_plane == n   interleaved: one plane holds n layers, K and V side by side,
//                           [tokens, n, 2, heads, dim]
//
// Immutable values; safe from every thread.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vtensor/pool/geometry.h"

namespace vtensor {

struct KVSpec {
  size_t num_layers = 0;
  size_t num_kv_heads = 0;
  size_t head_dim = 0;
  size_t element_bytes = 0;
  size_t max_seq_len = 0;
  size_t layers_per_plane = 1;

  // These throw std::invalid_argument on overflow.
  size_t num_planes() const;
  size_t token_bytes() const;      // of one token in one plane
  size_t bytes_per_token() const;  // of one token in all planes
  // Throws std::invalid_argument naming the first field that makes no sense.
  void check() const;
};

// Which of the two tensors of a layer.
enum class KV { kKey = 0, kValue = 1 };

struct LayerPlace {
  size_t plane = 0;
  size_t offset_bytes = 0;  // inside a token
};

LayerPlace locate(const KVSpec& spec, size_t layer, KV which);

// Throws std::invalid_argument when the sizes do not fit each other or overflow.
Geometry make_geometry(const KVSpec& spec, size_t chunk_bytes, size_t granularity,
                       size_t max_slots);

}  // namespace vtensor
