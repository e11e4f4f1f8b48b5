#include "vtensor/pool/kv_spec.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>

namespace vtensor {
namespace {

void check_positive(size_t value, const std::string& name) {
  if (value == 0) throw std::invalid_argument(name + " must be at least 1, got 0");
}

void check_group(const KVGroup& group, size_t max_seq_len) {
  check_positive(group.layers.size(), "num_layers");
  check_positive(group.num_kv_heads, "num_kv_heads");
  check_positive(group.key_dim, "head_dim");
  check_positive(group.element_bytes, "element_bytes");
  check_positive(max_seq_len, "max_seq_len");
  check_positive(group.layers_per_plane, "layers_per_plane");
  if (group.window == 0 && group.layers.size() % group.layers_per_plane != 0) {
    throw std::invalid_argument("layers_per_plane " + std::to_string(group.layers_per_plane) +
                                " does not divide num_layers " +
                                std::to_string(group.layers.size()));
  }
  checked_mul(group.bytes_per_token(), max_seq_len, "max_seq_len x bytes of a token");
}

// As their planes stand: those that keep all first, then by window.
std::vector<const KVGroup*> in_order(const KVSpec& spec) {
  std::vector<const KVGroup*> groups;
  for (const KVGroup& group : spec.groups) groups.push_back(&group);
  std::ranges::stable_sort(groups, {}, [](const KVGroup* group) { return group->window; });
  return groups;
}

}  // namespace

size_t KVGroup::bytes_of(KV which) const {
  return checked_mul(checked_mul(num_kv_heads, dim(which), "num_kv_heads x head_dim"),
                     element_bytes, "a token's bytes");
}

size_t KVGroup::num_places() const {
  const size_t num_planes =
      layers.size() / layers_per_plane + static_cast<size_t>(layers.size() % layers_per_plane > 0);
  return checked_mul(num_planes, layers_per_plane, "layers_per_plane");
}

size_t KVGroup::bytes_per_token() const {
  const size_t keys = checked_mul(bytes_of(KV::kKey), num_places(), "a token's bytes");
  const size_t values = checked_mul(bytes_of(KV::kValue), num_places(), "a token's bytes");
  return checked_add(keys, values, "a token's bytes");
}

std::vector<size_t> KVGroup::plane_token_bytes() const {
  const size_t keys = bytes_of(KV::kKey);
  const size_t values = bytes_of(KV::kValue);
  std::vector<size_t> planes;
  if (layers_per_plane > 1) {
    planes.assign(num_places() / layers_per_plane, (keys + values) * layers_per_plane);
    return planes;
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    planes.push_back(keys);
    if (values > 0) planes.push_back(values);
  }
  return planes;
}

KVSpec::KVSpec(const UniformKV& shape) : max_seq_len(shape.max_seq_len) {
  KVGroup group{{},
                shape.num_kv_heads,
                shape.head_dim,
                shape.head_dim,
                shape.element_bytes,
                shape.layers_per_plane};
  group.layers.resize(shape.num_layers);
  std::iota(group.layers.begin(), group.layers.end(), size_t{0});
  groups.push_back(std::move(group));
}

size_t KVSpec::num_planes() const {
  size_t total = 0;
  for (const KVGroup& group : groups) total += group.plane_token_bytes().size();
  return total;
}

size_t KVSpec::token_bytes() const {
  size_t unit = 0;
  for (const KVGroup& group : groups) {
    for (const size_t bytes : group.plane_token_bytes()) unit = std::gcd(unit, bytes);
  }
  return unit;
}

size_t KVSpec::row_chunks() const { return bytes_per_token() / token_bytes(); }

size_t KVSpec::bytes_per_token() const {
  size_t total = 0;
  for (const KVGroup& group : groups) {
    total = checked_add(total, group.bytes_per_token(), "a token's bytes");
  }
  return total;
}

void KVSpec::check() const {
  check_positive(groups.size(), "the number of groups");
  std::set<size_t> seen;
  for (const KVGroup& group : groups) {
    check_group(group, max_seq_len);
    for (const size_t layer : group.layers) {
      if (seen.insert(layer).second) continue;
      throw std::invalid_argument("layer " + std::to_string(layer) +
                                  " stands in the groups of KV twice");
    }
  }
  checked_mul(bytes_per_token(), max_seq_len, "max_seq_len x bytes of a token");
}

LayerPlace locate(const KVSpec& spec, size_t layer, KV which) {
  size_t first_plane = 0;
  for (const KVGroup* const each : in_order(spec)) {
    const KVGroup& group = *each;
    const auto found = std::ranges::find(group.layers, layer);
    const std::vector<size_t> planes = group.plane_token_bytes();
    if (found == group.layers.end()) {
      first_plane += planes.size();
      continue;
    }
    if (group.dim(which) == 0) {
      throw std::out_of_range("layer " + std::to_string(layer) + " keeps keys alone, no values");
    }
    const auto kv = static_cast<size_t>(which);
    const auto idx = static_cast<size_t>(found - group.layers.begin());
    if (group.layers_per_plane == 1) {
      const size_t plane = group.value_dim > 0 ? 2 * idx + kv : idx;
      return {&group, first_plane + plane, 0, planes[plane]};
    }
    const size_t keys = group.bytes_of(KV::kKey);
    const size_t inside = (idx % group.layers_per_plane) * (keys + group.bytes_of(KV::kValue));
    const size_t plane = idx / group.layers_per_plane;
    return {&group, first_plane + plane, inside + kv * keys, planes[plane]};
  }
  throw std::out_of_range("layer " + std::to_string(layer) +
                          " is not one of the layers that keep KV");
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
  geometry.token_bytes = spec.token_bytes();
  geometry.chunk_bytes = chunk_bytes;
  geometry.max_tokens = spec.max_seq_len;
  geometry.max_slots = max_slots;
  for (const KVGroup* const group : in_order(spec)) {
    for (const size_t bytes : group->plane_token_bytes()) {
      geometry.add_plane(bytes / geometry.token_bytes, group->window);
    }
  }
  // Rounded up to whole rows, too.
  checked_mul(checked_mul(ceil_div(spec.max_seq_len * geometry.token_bytes, chunk_bytes),
                          chunk_bytes, "max_seq_len x bytes of a token"),
              geometry.row_chunks, "max_seq_len x bytes of a token");
  return geometry;
}

}  // namespace vtensor
