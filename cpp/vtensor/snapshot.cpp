// Manager: info(), snapshot() and stats(), read from the pool under the mutex.
#include "vtensor/snapshot.h"

#include <iterator>
#include <unordered_map>

#include "vtensor/manager.h"

namespace vtensor {
namespace {

VTensorInfo describe_slot(const Pool& pool, SlotId slot) {
  const Slot& entry = pool.vset[slot];
  VTensorInfo info;
  info.slot = slot;
  info.state = entry.state;
  info.mapped_bytes = entry.table.size() * pool.geometry.chunk_bytes;
  info.mapped_tokens = pool.geometry.tokens_in(pool.vset.mapped_rows(slot));
  return info;
}

VTensorInfo describe(const Pool& pool, const VTensor& vtensor) {
  VTensorInfo info = describe_slot(pool, vtensor.slot);
  info.id = vtensor.id;
  info.num_tokens = vtensor.num_tokens;
  info.num_cached_tokens = vtensor.num_cached_tokens;
  info.chunks_aliased = vtensor.chunks_aliased;
  info.chunks_copied = vtensor.chunks_copied;
  return info;
}

PrefixInfo describe_node(const RTree& rtree, const RNode& node, const std::string& salt,
                         ptrdiff_t parent) {
  PrefixInfo info{salt, parent, node.start, node.tokens.size(), node.last_used, node.rows, {}};
  for (const auto& [owner, pin] : rtree.pins()) {
    if (pin.node == &node) info.pinned_by.push_back(owner);
  }
  return info;
}

// Bytes mapped by slots in each state, and how often live slots map each chunk.
struct MappedTotals {
  size_t live_chunks = 0;
  size_t parked_chunks = 0;
  size_t held_chunks = 0;
  size_t num_live = 0;
  std::unordered_map<ChunkId, uint32_t> live_refs;

  explicit MappedTotals(const VSet& vset) {
    for (SlotId slot = 0; slot < vset.num_slots(); ++slot) {
      const Slot& entry = vset[slot];
      if (entry.state == SlotState::kParked) parked_chunks += entry.table.size();
      if (entry.state == SlotState::kHeld) held_chunks += entry.table.size();
      if (entry.state != SlotState::kLive) continue;
      ++num_live;
      live_chunks += entry.table.size();
      for (const ChunkId id : entry.table) ++live_refs[id];
    }
  }
  size_t shared_chunks() const {
    size_t shared = 0;
    for (const auto& [id, refs] : live_refs) shared += static_cast<size_t>(refs > 1);
    return shared;
  }
};

}  // namespace

MappingTimes Manager::mapping_times() const {
  const Lock held(mutex_);
  return {static_cast<double>(exposed_ns_) / 1e3, static_cast<double>(hidden_ns_) / 1e3,
          pre_extended_rows_};
}

size_t Manager::obtainable_bytes() const {
  const Lock held = lock();
  return scheduler_.num_obtainable() * pool_.geometry.chunk_bytes;
}

VTensorInfo Manager::info(VTensorId id) const {
  const Lock held = lock();
  return describe(pool_, scheduler_.live(id));
}

Snapshot Manager::snapshot() const {
  const Lock held = lock_awake_or_not();
  Snapshot snapshot;
  snapshot.chunk_bytes = pool_.geometry.chunk_bytes;
  snapshot.num_planes = pool_.geometry.num_planes;
  std::vector<ChunkInfo> chunks(pool_.pset.num_ids());
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    const Slot& entry = pool_.vset[slot];
    if (entry.state == SlotState::kFree) continue;
    const bool live = entry.state == SlotState::kLive;
    VTensorInfo info =
        live ? describe(pool_, scheduler_.live_in(slot)) : describe_slot(pool_, slot);
    info.table = entry.table;
    for (const ChunkId id : entry.table) {
      if (live) chunks[id].sharers.push_back(info.id);
    }
    snapshot.vtensors.push_back(std::move(info));
  }
  for (ChunkId id = 0; id < pool_.pset.num_ids(); ++id) {
    const Chunk& chunk = pool_.pset[id];
    if (chunk.refs() == 0) continue;
    chunks[id].id = id;
    chunks[id].refs = chunk.refs();
    chunks[id].recorded = chunk.tree_refs > 0;
    chunks[id].pinned = chunk.pins > 0;
    chunks[id].appender = chunk.appender;
    snapshot.chunks.push_back(std::move(chunks[id]));
  }
  std::unordered_map<const RNode*, ptrdiff_t> index;
  pool_.rtree.for_each([&](const RNode& node, const std::string& salt) {
    const auto parent = index.find(node.parent);
    index.emplace(&node, std::ssize(snapshot.prefixes));
    snapshot.prefixes.push_back(
        describe_node(pool_.rtree, node, salt, parent == index.end() ? -1 : parent->second));
  });
  return snapshot;
}

size_t Manager::resident_bytes() const {
  const Lock held(mutex_);
  return scheduler_.num_resident_chunks() * pool_.geometry.chunk_bytes;
}

Stats Manager::stats() const {
  const Lock held(mutex_);  // a closed manager still tells its numbers
  const size_t chunk_bytes = pool_.geometry.chunk_bytes;
  const MappedTotals mapped(pool_.vset);
  const SchedulerCounters& counters = scheduler_.counters();
  size_t recorded = 0;
  for (ChunkId id = 0; id < pool_.pset.num_ids(); ++id) {
    recorded += static_cast<size_t>(pool_.pset[id].tree_refs > 0);
  }
  Stats stats;
  stats.reserved_bytes = pool_.vset.reserved_bytes();
  stats.mapped_bytes = mapped.live_chunks * chunk_bytes;
  stats.resident_bytes = scheduler_.num_resident_chunks() * chunk_bytes;
  stats.swapped_bytes = swap_store_.used_bytes();
  stats.asleep_bytes = sleep_store_ ? sleep_store_->used_bytes() : 0;
  stats.shared_bytes = mapped.shared_chunks() * chunk_bytes;
  stats.saved_bytes = (mapped.live_chunks - mapped.live_refs.size()) * chunk_bytes;
  stats.free_bytes = pool_.pset.num_free() * chunk_bytes;
  stats.parked_bytes = mapped.parked_chunks * chunk_bytes;
  stats.held_bytes = mapped.held_chunks * chunk_bytes;
  stats.recorded_bytes = recorded * chunk_bytes;
  stats.budget_bytes = pool_.pset.budget_chunks() * chunk_bytes;
  stats.obtainable_bytes = scheduler_.num_obtainable() * chunk_bytes;
  stats.num_vtensors = mapped.num_live;
  stats.num_free_slots = pool_.vset.num_free() + pool_.vset.parked().size();
  stats.recorded_tokens = pool_.rtree.num_tokens();
  stats.prefix_queries = counters.prefix_queries;
  stats.prefix_query_tokens = counters.prefix_query_tokens;
  stats.prefix_hit_tokens = counters.prefix_hit_tokens;
  stats.chunks_aliased = counters.chunks_aliased;
  stats.chunks_copied = counters.chunks_copied;
  stats.chunks_evicted = counters.chunks_evicted;
  stats.chunks_adopted = counters.chunks_adopted;
  stats.chunks_deduplicated = counters.chunks_deduplicated;
  stats.dedup_failures = counters.dedup_failures;
  stats.chunks_swapped_out = counters.chunks_swapped_out;
  stats.chunks_swapped_in = counters.chunks_swapped_in;
  stats.pre_extend_failures = pre_extend_failures_;
  stats.map_us_exposed = static_cast<double>(exposed_ns_) / 1e3;
  stats.map_us_hidden = static_cast<double>(hidden_ns_) / 1e3;
  stats.driver = meter_->stats();
  return stats;
}

}  // namespace vtensor
