// Manager: start_trace(), stop_trace() and label(). What is in the file: docs/tracing.md.
#include <string>

#include "vtensor/manager.h"
#include "vtensor/util/json_line.h"

namespace vtensor {
namespace {

JsonLine spec_json(const KVSpec& spec) {
  JsonLine line;
  line.put("num_layers", spec.num_layers).put("num_kv_heads", spec.num_kv_heads);
  line.put("head_dim", spec.head_dim).put("element_bytes", spec.element_bytes);
  line.put("max_tokens", spec.max_tokens).put("layers_per_plane", spec.layers_per_plane);
  return line;
}

const char* scrub_name(ScrubPolicy policy) {
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

JsonLine options_json(const ManagerOptions& options) {
  JsonLine line;
  line.put("pre_extend", options.pre_extend).put("dedup", options.dedup);
  line.put("swap_space_bytes", options.swap_space_bytes);
  line.put("scrub", scrub_name(options.scheduler.scrub));
  line.put("park", options.scheduler.park).put("alias", options.scheduler.alias);
  line.put("eager_chunks", options.scheduler.eager_chunks);
  if (options.scheduler.max_free_chunks != SIZE_MAX) {
    line.put("max_free_chunks", options.scheduler.max_free_chunks);
  }
  if (options.scheduler.max_idle_chunks != SIZE_MAX) {
    line.put("max_idle_chunks", options.scheduler.max_idle_chunks);
  }
  if (options.scheduler.max_idle_fraction < 1) {
    line.put("max_idle_fraction", options.scheduler.max_idle_fraction);
  }
  return line;
}

// [[id, num_tokens, is_swapped], ...]: who is alive when the trace starts.
std::string live_json(const Scheduler& scheduler) {
  std::string text = "[";
  for (const VTensorId id : scheduler.live_ids()) {
    const VTensor& vtensor = scheduler.live(id);
    if (text.size() > 1) text += ',';
    text += '[' + std::to_string(id) + ',' + std::to_string(vtensor.num_tokens) + ',' +
            (vtensor.is_swapped ? "true" : "false") + ']';
  }
  return text + "]";
}

}  // namespace

void Manager::start_trace(const std::string& path) {
  const Lock held = lock_awake_or_not();
  JsonLine header;
  header.put("driver", pool_.driver->name()).raw("spec", spec_json(spec_).text());
  header.put("chunk_bytes", pool_.geometry.chunk_bytes);
  header.put("num_planes", pool_.geometry.num_planes);
  header.put("max_requests", pool_.geometry.max_slots);
  header.put("memory_budget_bytes", pool_.pset.budget_chunks() * pool_.geometry.chunk_bytes);
  header.raw("options", options_json(options_).text());
  header.put("created", pool_.pset.num_created());
  header.put("recorded_tokens", pool_.rtree.num_tokens());
  header.raw("live", live_json(scheduler_));
  trace_->open(path, header);
}

void Manager::stop_trace() { trace_->close(); }

bool Manager::is_tracing() const { return trace_->is_open(); }

void Manager::label(VTensorId id, const std::string& text) {
  if (!trace_->is_open()) return;
  trace_->write(JsonLine().put("k", "label").put("id", id).put("label", text));
}

}  // namespace vtensor
