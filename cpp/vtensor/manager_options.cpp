#include "vtensor/manager_options.h"

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

JsonLine spec_json(const KVSpec& spec) {
  JsonLine line;
  line.put("num_layers", spec.num_layers).put("num_kv_heads", spec.num_kv_heads);
  line.put("head_dim", spec.head_dim).put("element_bytes", spec.element_bytes);
  line.put("max_seq_len", spec.max_seq_len).put("layers_per_plane", spec.layers_per_plane);
  return line;
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
  if (chunks < geometry.num_planes) {
    throw std::invalid_argument("memory_budget " + std::to_string(memory_budget) +
                                " bytes is less than one chunk in each " +
                                "plane: " + std::to_string(geometry.num_planes) + " x " +
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
  header.put("num_planes", pool.geometry.num_planes);
  header.put("max_requests", pool.geometry.max_slots);
  header.put("memory_budget", pool.pset.budget_chunks() * pool.geometry.chunk_bytes);
  header.raw("options", options_json(options).text());
  header.put("created", pool.pset.num_created());
  header.put("recorded_tokens", pool.rtree.num_tokens());
  header.raw("live", live_json(core.vtensors));
  return header;
}

}  // namespace vtensor
