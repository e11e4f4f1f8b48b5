// Manager: what it shows of its memory: views, numbers, the memory map, the trace, and which blocks
// are recorded.
#include <algorithm>
#include <chrono>

#include "vtensor/core/integrity.h"
#include "vtensor/manager.h"
#include "vtensor/util/error.h"

namespace vtensor {

void Manager::check_integrity() const {
  const Lock held = lock_awake_or_not();
  vtensor::check_integrity(core_);
}

TensorView Manager::view(VTensorId id, size_t layer, KV which) {
  Lock held = lock();
  wait_until_idle(held, {&id, 1});  // what views may show can change its page table
  VTensor& vtensor = core_.vtensors.resident(id);
  core_.shield.before_view(vtensor);
  TensorView view = slot_view(pool_.vset, spec_, layer, which, vtensor.slot, vtensor.num_tokens);
  // Keeps the slot's address range and chunks while the view lives.
  view.lease = {this, [self = shared_from_this(), slot = vtensor.slot](void*) noexcept {
                  self->end_view(slot);
                }};
  ++pool_.vset[vtensor.slot].num_views;
  return view;
}

TensorView Manager::arena(size_t layer, KV which) {
  const Lock held = lock();
  TensorView view = arena_view(pool_.vset, spec_, layer, which);
  view.lease = shared_from_this();
  return view;
}

void Manager::end_view(SlotId slot) noexcept {
  if (is_inherited()) return;
  const Lock held(mutex_);
  if (--pool_.vset[slot].num_views > 0) return;
  try {  // the driver may fail, and so may a fence after a fault on the device
    core_.retirement.unhold(slot);
    if (closed_) core_.reclaimer.trim();
  } catch (const std::exception&) {
    return;  // the next release, or the destructor, tries once more
  }
}

MappingTimes Manager::mapping_times() const {
  const Lock held = lock_in_any_state();
  return {static_cast<double>(exposed_ns_) / 1e3,
          static_cast<double>(background_.hidden_ns()) / 1e3, background_.num_rows_mapped()};
}

size_t Manager::available_bytes() const {
  const Lock held = lock();
  return bytes_of(num_available());
}

size_t Manager::resident_bytes() const {
  const Lock held = lock_in_any_state();
  return bytes_of(core_.sleeper.num_resident_chunks());
}

VTensorInfo Manager::info(VTensorId id) const {
  const Lock held = lock_awake_or_not();
  return describe(core_, core_.vtensors.live(id));
}

Snapshot Manager::snapshot() const {
  const Lock held = lock_awake_or_not();
  return take_snapshot(core_);
}

Stats Manager::stats() const {
  const Lock held = lock_in_any_state();  // a closed manager still tells its numbers
  Stats stats = gather_stats(core_);
  stats.available_bytes = bytes_of(num_available());
  stats.swapped_bytes = swap_store_.used_bytes();
  stats.asleep_bytes = sleep_store_ ? sleep_store_->used_bytes() : 0;
  stats.pre_extend_failures = background_.num_failures();
  stats.map_us_exposed = static_cast<double>(exposed_ns_) / 1e3;
  stats.map_us_hidden = static_cast<double>(background_.hidden_ns()) / 1e3;
  stats.driver = meter_->stats();
  return stats;
}

void Manager::watch_blocks() {
  const Lock held = lock_awake_or_not();
  block_log_.open();
  pool_.rtree.watch(&block_log_);
}

void Manager::unwatch_blocks() {
  const Lock held = lock_in_any_state();
  stop_watching();
}

void Manager::stop_watching() {
  pool_.rtree.watch(nullptr);
  block_log_.close();
}

void Manager::retell_blocks() {
  const Lock held = lock_in_any_state();
  if (block_log_.is_open()) block_log_.lose();
}

std::optional<std::vector<BlockEvent>> Manager::take_block_events(double timeout_seconds) {
  constexpr double kDaySeconds = 24 * 3600;
  const std::chrono::duration<double> timeout(std::clamp(timeout_seconds, 0.0, kDaySeconds));
  Lock held = lock_in_any_state();
  block_log_.wait(held, std::chrono::duration_cast<std::chrono::nanoseconds>(timeout));
  if (block_log_.is_lost()) pool_.rtree.watch(&block_log_);
  std::vector<BlockEvent> events = block_log_.take();
  if (events.empty() && !block_log_.is_open()) return std::nullopt;
  return events;
}

void Manager::start_trace(const std::string& path) {
  const Lock held = lock_awake_or_not();
  trace_->open(path, trace_header(core_, spec_, options_));
}

void Manager::stop_trace() { trace_->close(); }

bool Manager::is_tracing() const { return trace_->is_open(); }

void Manager::label(VTensorId id, const std::string& text) {
  if (!trace_->is_open()) return;
  trace_->write(JsonLine().put("k", "label").put("id", id).put("label", text));
}

}  // namespace vtensor
