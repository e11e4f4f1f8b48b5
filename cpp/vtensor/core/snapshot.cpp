#include "vtensor/core/snapshot.h"

#include <algorithm>
#include <iterator>
#include <span>
#include <unordered_map>

namespace vtensor {
namespace {

size_t num_mapped(const Geometry& geometry, const std::vector<ChunkId>& table) {
  if (geometry.windows.empty()) return table.size();
  return table.size() - static_cast<size_t>(std::ranges::count(table, kNoChunk));
}

VTensorInfo describe_slot(const Pool& pool, SlotId slot) {
  const Slot& entry = pool.vset[slot];
  VTensorInfo info;
  info.slot = slot;
  info.state = entry.state;
  info.mapped_bytes = num_mapped(pool.geometry, entry.table) * pool.geometry.chunk_bytes;
  info.mapped_tokens = pool.geometry.tokens_in(pool.vset.mapped_rows(slot));
  return info;
}

// Chunks mapped by slots in each state.
struct MappedTotals {
  size_t live_chunks = 0;
  size_t parked_chunks = 0;
  size_t held_chunks = 0;
  size_t broken_chunks = 0;
  size_t num_live = 0;

  explicit MappedTotals(const Pool& pool) {
    for (SlotId slot = 0; slot < pool.vset.num_slots(); ++slot) {
      const Slot& entry = pool.vset[slot];
      const size_t num_chunks = num_mapped(pool.geometry, entry.table);
      if (entry.state == SlotState::kParked) parked_chunks += num_chunks;
      if (entry.state == SlotState::kHeld) held_chunks += num_chunks;
      if (entry.state == SlotState::kBroken) broken_chunks += num_chunks;
      if (entry.state != SlotState::kLive) continue;
      ++num_live;
      live_chunks += num_chunks;
    }
  }
};

}  // namespace

VTensorInfo describe(const Core& core, const VTensor& vtensor) {
  VTensorInfo info = describe_slot(core.state.pool, vtensor.slot);
  info.id = vtensor.id;
  info.num_tokens = vtensor.num_tokens;
  info.num_cached_tokens = vtensor.num_cached_tokens;
  info.num_cut_tokens = vtensor.num_cut_tokens;
  info.cut_by_window = vtensor.cut_by_window;
  info.chunks_aliased = vtensor.chunks_aliased;
  info.chunks_copied = vtensor.chunks_copied;
  return info;
}

Snapshot take_snapshot(const Core& core) {
  const Pool& pool = core.state.pool;
  Snapshot snapshot;
  snapshot.chunk_bytes = pool.geometry.chunk_bytes;
  snapshot.num_planes = pool.geometry.row_chunks;
  std::vector<ChunkInfo> chunks(pool.pset.num_ids());
  for (SlotId slot = 0; slot < pool.vset.num_slots(); ++slot) {
    const Slot& entry = pool.vset[slot];
    if (entry.state == SlotState::kFree) continue;
    const bool live = entry.state == SlotState::kLive;
    VTensorInfo info =
        live ? describe(core, core.vtensors.live_in(slot)) : describe_slot(pool, slot);
    info.table = entry.table;
    for (const ChunkId id : entry.table) {
      if (live && id != kNoChunk) chunks[id].sharers.push_back(info.id);
    }
    snapshot.vtensors.push_back(std::move(info));
  }
  for (ChunkId id = 0; id < pool.pset.num_ids(); ++id) {
    const Chunk& chunk = pool.pset[id];
    if (chunk.refs() == 0) continue;
    chunks[id].id = id;
    chunks[id].generation = chunk.generation;
    chunks[id].refs = chunk.refs();
    chunks[id].recorded = chunk.tree_refs > 0;
    chunks[id].pinned = chunk.pins > 0;
    chunks[id].appender = chunk.appender;
    snapshot.chunks.push_back(std::move(chunks[id]));
  }
  std::unordered_map<const RNode*, ptrdiff_t> index;
  pool.rtree.for_each([&](const RNode& node, const std::string& salt) {
    const auto first = std::span(node.tokens).first(std::min(node.tokens.size(), kFirstTokens));
    const auto parent = index.find(node.parent);
    index.emplace(&node, std::ssize(snapshot.prefixes));
    snapshot.prefixes.push_back({salt,
                                 parent == index.end() ? -1 : parent->second,
                                 node.start,
                                 node.tokens.size(),
                                 node.last_used,
                                 {first.begin(), first.end()},
                                 node.rows,
                                 node.blocks,
                                 {}});
  });
  for (const auto& [owner, pin] : pool.rtree.pins()) {
    snapshot.prefixes[static_cast<size_t>(index.at(pin.node))].pinned_by.push_back(owner);
  }
  return snapshot;
}

Stats gather_stats(const Core& core) {
  const Pool& pool = core.state.pool;
  const size_t chunk_bytes = pool.geometry.chunk_bytes;
  const MappedTotals mapped(pool);
  Stats stats;
  static_cast<CoreCounters&>(stats) = core.state.counters;
  stats.reserved_bytes = pool.vset.reserved_bytes();
  stats.mapped_bytes = mapped.live_chunks * chunk_bytes;
  stats.resident_bytes = core.sleeper.num_resident_chunks() * chunk_bytes;
  stats.shared_bytes = pool.pset.num_shared() * chunk_bytes;
  stats.saved_bytes = pool.pset.num_saved() * chunk_bytes;
  stats.free_bytes = pool.pset.num_free() * chunk_bytes;
  stats.parked_bytes = mapped.parked_chunks * chunk_bytes;
  stats.held_bytes = mapped.held_chunks * chunk_bytes;
  stats.recorded_bytes = pool.pset.num_recorded() * chunk_bytes;
  stats.budget_bytes = pool.pset.budget_chunks() * chunk_bytes;
  stats.available_bytes = core.reclaimer.num_available() * chunk_bytes;
  stats.num_vtensors = mapped.num_live;
  stats.num_free_slots = pool.vset.num_free() + pool.vset.parked().size();
  stats.num_broken_slots = core.vtensors.num_broken();
  stats.broken_bytes = mapped.broken_chunks * chunk_bytes;
  stats.recorded_tokens = pool.rtree.num_tokens();
  return stats;
}

}  // namespace vtensor
