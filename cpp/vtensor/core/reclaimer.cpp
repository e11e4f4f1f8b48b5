#include "vtensor/core/reclaimer.h"

#include <algorithm>
#include <unordered_map>
#include <vector>

namespace vtensor {

size_t Reclaimer::num_obtained(bool created) const {
  return created ? pool_.pset.num_free() : pool_.pset.num_claimable();
}

// Trailing rows of a slot that hold nobody else's chunks.
size_t Reclaimer::private_end_rows(SlotId slot) const {
  const size_t planes = pool_.geometry.num_planes;
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  size_t rows = 0;
  while (rows * planes < table.size() &&
         std::ranges::all_of(
             std::span(table).last((rows + 1) * planes).first(planes),
             [&](ChunkId id) { return pool_.pset[id].is_private(); })) {
    ++rows;
  }
  return rows;
}

// Takes private rows from parked slots, the longest parked first, as many as are needed.
void Reclaimer::reclaim_parked_private(size_t num_chunks, bool created) {
  const std::vector<SlotId> parked(pool_.vset.parked().begin(), pool_.vset.parked().end());
  for (const SlotId slot : parked) {
    const size_t obtained = num_obtained(created);
    if (obtained >= num_chunks) return;
    const size_t missing_rows = ceil_div(num_chunks - obtained, pool_.geometry.num_planes);
    const size_t rows = std::min(private_end_rows(slot), missing_rows);
    vtensors_.shrink(slot, pool_.vset.mapped_rows(slot) - rows);
    if (pool_.vset.mapped_rows(slot) == 0) v_free(pool_, slot);
  }
}

// Rows mapped ahead of need, of a vTensor that is not part of the plan under way. None where views
// are alive: one made before a truncation may reach into these rows. None while a step is open: its
// kernels may read them, and cannot be waited for.
size_t Reclaimer::surplus_rows(const VTensor& vtensor) const {
  if (vtensor.busy || vtensor.plan == state_.plan || state_.epochs.is_open()) return 0;
  if (pool_.vset[vtensor.slot].num_views > 0) return 0;
  const size_t needed =
      std::max(pool_.geometry.rows_for(vtensor.num_tokens), vtensor.first_owned_row);
  const size_t rows = pool_.vset.mapped_rows(vtensor.slot);
  return rows > needed ? rows - needed : 0;
}

void Reclaimer::reclaim_surplus(size_t num_chunks, bool created) {
  for (const VTensorId id : vtensors_.live_ids()) {
    if (num_obtained(created) >= num_chunks) return;
    VTensor& vtensor = vtensors_.live(id);
    const size_t surplus = surplus_rows(vtensor);
    if (surplus == 0) continue;
    vtensors_.shrink(vtensor.slot, pool_.vset.mapped_rows(vtensor.slot) - surplus);
    vtensors_.update_write_limit(vtensor);
  }
}

size_t Reclaimer::num_idle() const {
  std::unordered_map<ChunkId, uint32_t> parked_refs;
  for (const SlotId slot : pool_.vset.parked()) {
    for (const ChunkId id : pool_.vset[slot].table) ++parked_refs[id];
  }
  size_t parked_only = 0;
  for (const auto& [id, refs] : parked_refs) {
    const Chunk& chunk = pool_.pset[id];
    parked_only += static_cast<size_t>(chunk.table_refs == refs && chunk.pins == 0);
  }
  return pool_.pset.num_evictable() + parked_only;
}

size_t Reclaimer::num_available() const {
  size_t surplus = 0;
  for (const VTensorId id : vtensors_.live_ids()) {
    surplus += surplus_rows(vtensors_.live(id)) * pool_.geometry.num_planes;
  }
  return pool_.pset.num_claimable() + num_idle() + surplus;
}

size_t Reclaimer::max_idle() const {
  if (state_.options.prefix_cache_fraction >= 1) return state_.options.prefix_cache_chunks;
  const auto budget = static_cast<double>(pool_.pset.budget_chunks());
  return std::min(state_.options.prefix_cache_chunks,
                  static_cast<size_t>(budget * state_.options.prefix_cache_fraction));
}

void Reclaimer::recycle(size_t num_chunks, size_t max_idle) {
  const PSet& pset = pool_.pset;
  while (pset.num_free() < num_chunks && num_idle() > max_idle) {
    const size_t wanted = std::min(num_chunks - pset.num_free(), num_idle() - max_idle);
    if (evict(wanted) > 0) continue;
    if (pool_.vset.parked().empty()) return;
    free_parked(pool_.vset.parked().front());
  }
}

void Reclaimer::free_parked(SlotId slot) {
  vtensors_.shrink(slot, 0);
  v_free(pool_, slot);
}

bool Reclaimer::make_claimable(size_t num_chunks, bool created) {
  if (num_obtained(created) >= num_chunks) {
    if (!created) recycle(num_chunks, max_idle());
    return true;
  }
  retirement_.reap_all();
  // With nothing created, the part of the budget that is not used yet does not count.
  const size_t uncreated = pool_.pset.budget_chunks() - pool_.pset.num_created();
  if (num_available() - (created ? uncreated : 0) < num_chunks) return false;

  reclaim_parked_private(num_chunks, created);
  reclaim_surplus(num_chunks, created);
  const auto missing = [&] {
    const size_t obtained = num_obtained(created);
    return num_chunks > obtained ? num_chunks - obtained : 0;
  };
  if (missing() > 0) evict(missing());
  while (missing() > 0 && !pool_.vset.parked().empty()) {
    free_parked(pool_.vset.parked().front());
    if (missing() > 0) evict(missing());
  }
  if (missing() > 0) state_.counters.chunks_evicted += pool_.rtree.evict(missing(), /*any=*/true);
  return missing() == 0;
}

size_t Reclaimer::evict(size_t num_chunks) {
  const size_t freed = pool_.rtree.evict(num_chunks);
  state_.counters.chunks_evicted += freed;
  return freed;
}

void Reclaimer::release_free_chunk() {
  const ChunkId id = pool_.pset.take_free();
  try {
    pool_.driver->release(pool_.pset[id].handle, pool_.geometry.chunk_bytes);
  } catch (...) {
    pool_.pset.put_back(id);
    throw;
  }
  pool_.pset.forget(id);
}

size_t Reclaimer::trim() {
  retirement_.reap();
  const std::vector<SlotId> parked(pool_.vset.parked().begin(), pool_.vset.parked().end());
  for (const SlotId slot : parked) free_parked(slot);
  size_t released_bytes = 0;
  while (pool_.pset.num_free() > 0) {
    release_free_chunk();
    released_bytes += pool_.geometry.chunk_bytes;
  }
  return released_bytes;
}

bool Reclaimer::set_budget_chunks(size_t budget_chunks) {
  PSet& pset = pool_.pset;
  ++state_.plan;  // no vTensor is spared
  if (pset.num_created() > budget_chunks) {
    const size_t to_free = pset.num_created() - budget_chunks;
    if (!make_claimable(to_free, /*created=*/true)) return false;
    for (size_t i = 0; i < to_free; ++i) release_free_chunk();
  }
  pset.set_budget_chunks(budget_chunks);
  return true;
}

}  // namespace vtensor
