#include "vtensor/pool/kv_spec.h"

#include <limits>
#include <stdexcept>
#include <string>

namespace vtensor {
namespace {

void check_positive(size_t value, const char* name) {
  if (value == 0) throw std::invalid_argument(std::string(name) + " must be at least 1, got 0");
}

}  // namespace

size_t KVSpec::num_planes() const {
  return layers_per_plane == 1 ? checked_mul(2, num_layers, "num_layers")
                               : num_layers / layers_per_plane;
}

size_t KVSpec::bytes_per_token() const {
  return checked_mul(token_bytes(), num_planes(), "a token's bytes");
}

size_t KVSpec::token_bytes() const {
  const size_t head_bytes =
      checked_mul(checked_mul(num_kv_heads, head_dim, "num_kv_heads x head_dim"), element_bytes,
                  "a token's bytes");
  return layers_per_plane == 1
             ? head_bytes
             : checked_mul(head_bytes, checked_mul(2, layers_per_plane, "layers_per_plane"),
                           "a token's bytes");
}

void KVSpec::check() const {
  check_positive(num_layers, "num_layers");
  check_positive(num_kv_heads, "num_kv_heads");
  check_positive(head_dim, "head_dim");
  check_positive(element_bytes, "element_bytes");
  check_positive(max_seq_len, "max_seq_len");
  check_positive(layers_per_plane, "layers_per_plane");
  if (num_layers % layers_per_plane != 0) {
    throw std::invalid_argument("layers_per_plane " + std::to_string(layers_per_plane) +
                                " does not divide num_layers " + std::to_string(num_layers));
  }
  checked_mul(bytes_per_token(), max_seq_len, "max_seq_len x bytes of a token");
}

LayerPlace locate(const KVSpec& spec, size_t layer, KV which) {
  if (layer >= spec.num_layers) {
    throw std::out_of_range("layer " + std::to_string(layer) + " of a model with " +
                            std::to_string(spec.num_layers) + " layers");
  }
  const auto kv = static_cast<size_t>(which);
  if (spec.layers_per_plane == 1) return {2 * layer + kv, 0};
  const size_t head_bytes = spec.num_kv_heads * spec.head_dim * spec.element_bytes;
  const size_t inside = 2 * (layer % spec.layers_per_plane) + kv;
  return {layer / spec.layers_per_plane, inside * head_bytes};
}

Geometry make_geometry(const KVSpec& spec, size_t chunk_bytes, size_t granularity,
                       size_t max_slots) {
  spec.check();
  check_positive(max_slots, "max_requests");
  if (chunk_bytes == 0 || chunk_bytes % granularity != 0) {
    throw std::invalid_argument("chunk_bytes " + std::to_string(chunk_bytes) +
                                " is not a positive multiple of the driver's granularity " +
                                std::to_string(granularity));
  }
  if (chunk_bytes > std::numeric_limits<uint32_t>::max()) {
    throw std::invalid_argument("chunk_bytes " + std::to_string(chunk_bytes) +
                                " is more than 4 GiB less one byte");
  }
  Geometry geometry;
  geometry.num_planes = spec.num_planes();
  geometry.token_bytes = spec.token_bytes();
  geometry.chunk_bytes = chunk_bytes;
  geometry.max_tokens = spec.max_seq_len;
  geometry.max_slots = max_slots;
  // Rounded up to whole chunks, too.
  checked_mul(ceil_div(spec.max_seq_len * geometry.token_bytes, chunk_bytes), chunk_bytes,
              "max_seq_len x bytes of a token");
  return geometry;
}

}  // namespace vtensor
