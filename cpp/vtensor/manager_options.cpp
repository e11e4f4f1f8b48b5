#include "vtensor/manager_options.h"

#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

namespace vtensor {
namespace {

std::string_view scrub_name(ScrubPolicy policy) {
  switch (policy) {
    case ScrubPolicy::kOwner:
      return "owner";
    case ScrubPolicy::kTenant:
      return "tenant";
    case ScrubPolicy::kOff:
      break;
  }
  return "off";
}

JsonLine group_json(const KVGroup& group) {
  JsonLine line;
  line.put("layers", std::span<const size_t>(group.layers));
  line.put("num_kv_heads", group.num_kv_heads).put("key_dim", group.key_dim);
  line.put("value_dim", group.value_dim).put("element_bytes", group.element_bytes);
  line.put("layers_per_plane", group.layers_per_plane).put("window", group.window);
  return line;
}

JsonLine spec_json(const KVSpec& spec) {
  JsonLine line;
  line.put("max_seq_len", spec.max_seq_len);
  const KVGroup& first = spec.groups.front();
  if (spec.groups.size() == 1 && first.key_dim == first.value_dim && first.window == 0 &&
      first.layers.back() + 1 == first.layers.size()) {
    line.put("num_layers", first.layers.size()).put("num_kv_heads", first.num_kv_heads);
    line.put("head_dim", first.key_dim).put("element_bytes", first.element_bytes);
    return line.put("layers_per_plane", first.layers_per_plane);
  }
  std::string groups = "[";
  for (const KVGroup& group : spec.groups) {
    if (groups.size() > 1) groups += ',';
    groups += group_json(group).text();
  }
  return line.raw("groups", groups + "]");
}

JsonLine options_json(const ManagerOptions& options) {
  JsonLine line;
  line.put("pre_extend", options.pre_extend).put("dedup", options.dedup);
  line.put("swap_space_bytes", options.swap_space_bytes);
  line.put("scrub", scrub_name(options.scrub));
  line.put("park", options.park).put("alias", options.alias);
  line.put("min_free_bytes", options.min_free_bytes);
  const auto put_bound = [&](std::string_view key, size_t bytes) {
    if (bytes != ManagerOptions::kNoLimit) line.put(key, bytes);
  };
  put_bound("max_free_bytes", options.max_free_bytes);
  put_bound("prefix_cache_bytes", options.prefix_cache_bytes);
  if (options.prefix_cache_fraction < 1) {
    line.put("prefix_cache_fraction", options.prefix_cache_fraction);
  }
  return line;
}

// [[id, num_tokens, is_swapped], ...]: the vTensors alive when the trace starts.
std::string live_json(const VTensorTable& vtensors) {
  std::string text = "[";
  for (const VTensorId id : vtensors.live_ids()) {
    const VTensor& vtensor = vtensors.live(id);
    if (text.size() > 1) text += ',';
    text += '[' + std::to_string(id) + ',' + std::to_string(vtensor.num_tokens) + ',' +
            (vtensor.is_swapped ? "true" : "false") + ']';
  }
  return text + "]";
}

}  // namespace

size_t budget_chunks(size_t memory_budget, const Geometry& geometry) {
  const size_t chunks = memory_budget / geometry.chunk_bytes;
  if (chunks < geometry.row_chunks) {
    throw std::invalid_argument("memory_budget " + std::to_string(memory_budget) +
                                " bytes is less than one chunk in each " +
                                "plane: " + std::to_string(geometry.row_chunks) + " x " +
                                std::to_string(geometry.chunk_bytes) + " bytes");
  }
  return chunks;
}

CoreOptions core_options(const ManagerOptions& options, size_t chunk_bytes) {
  if (options.min_free_bytes > options.max_free_bytes) {
    throw std::invalid_argument("min_free_bytes " + std::to_string(options.min_free_bytes) +
                                " is more than max_free_bytes " +
                                std::to_string(options.max_free_bytes));
  }
  if (!(options.prefix_cache_fraction >= 0 && options.prefix_cache_fraction <= 1)) {
    throw std::invalid_argument("prefix_cache_fraction must be from 0 to 1, got " +
                                std::to_string(options.prefix_cache_fraction));
  }
  const auto whole_chunks = [&](size_t bytes) {
    return bytes == ManagerOptions::kNoLimit ? bytes : bytes / chunk_bytes;
  };
  CoreOptions core;
  core.scrub = options.scrub;
  core.park = options.park;
  core.alias = options.alias;
  core.min_free_chunks = ceil_div(options.min_free_bytes, chunk_bytes);
  // Both watermarks are rounded up: the upper one stays the upper one, or the worker would create
  // what it has just given back.
  core.max_free_chunks = options.max_free_bytes == ManagerOptions::kNoLimit
                             ? options.max_free_bytes
                             : ceil_div(options.max_free_bytes, chunk_bytes);
  core.prefix_cache_chunks = whole_chunks(options.prefix_cache_bytes);
  core.prefix_cache_fraction = options.prefix_cache_fraction;
  return core;
}

JsonLine trace_header(const Core& core, const KVSpec& spec, const ManagerOptions& options) {
  const Pool& pool = core.state.pool;
  JsonLine header;
  header.put("driver", pool.driver->name()).raw("spec", spec_json(spec).text());
  header.put("chunk_bytes", pool.geometry.chunk_bytes);
  header.put("num_planes", pool.geometry.row_chunks);
  header.put("max_requests", pool.geometry.max_slots);
  header.put("memory_budget", pool.pset.budget_chunks() * pool.geometry.chunk_bytes);
  header.raw("options", options_json(options).text());
  header.put("created", pool.pset.num_created());
  header.put("recorded_tokens", pool.rtree.num_tokens());
  header.raw("live", live_json(core.vtensors));
  return header;
}

}  // namespace vtensor
