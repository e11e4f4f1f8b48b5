// Scheduler: where chunks come from when they are short, and how they go back to the system.
#include <algorithm>
#include <unordered_map>
#include <vector>

#include "vtensor/core/scheduler.h"
#include "vtensor/util/error.h"

namespace vtensor {

bool Scheduler::enough(size_t num_chunks, bool created) const {
  return num_chunks <= (created ? pool_.pset.num_free() : pool_.pset.num_claimable());
}

// Trailing rows of a slot that hold nobody else's chunks.
size_t Scheduler::private_tail_rows(SlotId slot) const {
  const size_t planes = pool_.geometry.num_planes;
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  size_t rows = 0;
  while (rows * planes < table.size() &&
         std::ranges::all_of(
             std::span(table).last((rows + 1) * planes).first(planes),
             [&](ChunkId id) { return is_private(id); })) {
    ++rows;
  }
  return rows;
}

// Takes private rows from parked slots, the longest parked first, as many as are needed.
void Scheduler::reclaim_parked_private(size_t num_chunks, bool created) {
  const std::vector<SlotId> parked(pool_.vset.parked().begin(), pool_.vset.parked().end());
  for (const SlotId slot : parked) {
    const size_t obtained = created ? pool_.pset.num_free() : pool_.pset.num_claimable();
    if (obtained >= num_chunks) return;
    const size_t missing_rows = ceil_div(num_chunks - obtained, pool_.geometry.num_planes);
    const size_t rows = std::min(private_tail_rows(slot), missing_rows);
    shrink_slot(slot, pool_.vset.mapped_rows(slot) - rows);
    if (pool_.vset.mapped_rows(slot) == 0) v_free(pool_, slot);
  }
}

// Rows mapped ahead of need, of a vTensor that is not part of the plan under way. None where views
// are alive: one made before a truncation may reach into these rows. None while a step is open: its
// kernels may read them, and cannot be waited for.
size_t Scheduler::surplus_rows(const VTensor& vtensor) const {
  if (vtensor.busy || vtensor.plan == plan_ || epochs_.is_open()) return 0;
  if (pool_.vset[vtensor.slot].num_views > 0) return 0;
  const size_t needed = std::max(pool_.geometry.rows_for(vtensor.num_tokens), vtensor.own_row);
  const size_t rows = pool_.vset.mapped_rows(vtensor.slot);
  return rows > needed ? rows - needed : 0;
}

void Scheduler::reclaim_surplus(size_t num_chunks, bool created) {
  for (const VTensorId id : live_ids()) {
    if (enough(num_chunks, created)) return;
    VTensor& vtensor = live(id);
    const size_t surplus = surplus_rows(vtensor);
    if (surplus == 0) continue;
    shrink_slot(vtensor.slot, pool_.vset.mapped_rows(vtensor.slot) - surplus);
    update_write_limit(vtensor);
  }
}

size_t Scheduler::num_idle() const {
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

size_t Scheduler::num_obtainable() const {
  size_t surplus = 0;
  for (const VTensorId id : live_ids()) {
    surplus += surplus_rows(live(id)) * pool_.geometry.num_planes;
  }
  return pool_.pset.num_claimable() + num_idle() + surplus;
}

size_t Scheduler::max_idle() const {
  if (options_.max_idle_fraction >= 1) return options_.max_idle_chunks;
  const auto budget = static_cast<double>(pool_.pset.budget_chunks());
  return std::min(options_.max_idle_chunks,
                  static_cast<size_t>(budget * options_.max_idle_fraction));
}

void Scheduler::recycle(size_t num_chunks, size_t max_idle) {
  const PSet& pset = pool_.pset;
  while (pset.num_free() < num_chunks && num_idle() > max_idle) {
    const size_t wanted = std::min(num_chunks - pset.num_free(), num_idle() - max_idle);
    if (evict(wanted) > 0) continue;
    if (pool_.vset.parked().empty()) return;
    free_parked(pool_.vset.parked().front());
  }
}

void Scheduler::free_parked(SlotId slot) {
  shrink_slot(slot, 0);
  v_free(pool_, slot);
}

bool Scheduler::make_claimable(size_t num_chunks, bool created) {
  if (enough(num_chunks, created)) {
    if (!created) recycle(num_chunks, max_idle());
    return true;
  }
  if (!retiring_.empty() && !epochs_.is_open()) {
    epochs_.wait();
    reap();
  }
  // With nothing created, the part of the budget that is not used yet does not count.
  const size_t uncreated = pool_.pset.budget_chunks() - pool_.pset.num_created();
  if (num_obtainable() - (created ? uncreated : 0) < num_chunks) return false;

  reclaim_parked_private(num_chunks, created);
  reclaim_surplus(num_chunks, created);
  const auto missing = [&] {
    const size_t obtained = created ? pool_.pset.num_free() : pool_.pset.num_claimable();
    return num_chunks > obtained ? num_chunks - obtained : 0;
  };
  if (missing() > 0) evict(missing());
  while (missing() > 0 && !pool_.vset.parked().empty()) {
    free_parked(pool_.vset.parked().front());
    if (missing() > 0) evict(missing());
  }
  if (missing() > 0) counters_.chunks_evicted += pool_.rtree.evict(missing(), /*any=*/true);
  return missing() == 0;
}

size_t Scheduler::evict(size_t num_chunks) {
  const size_t freed = pool_.rtree.evict(num_chunks);
  counters_.chunks_evicted += freed;
  return freed;
}

void Scheduler::release_free_chunk() {
  const ChunkId id = pool_.pset.take_free();
  try {
    pool_.driver->release(pool_.pset[id].handle, pool_.geometry.chunk_bytes);
  } catch (...) {
    pool_.pset.put_back(id);
    throw;
  }
  pool_.pset.forget(id);
}

size_t Scheduler::trim() {
  reap();
  const std::vector<SlotId> parked(pool_.vset.parked().begin(), pool_.vset.parked().end());
  for (const SlotId slot : parked) free_parked(slot);
  size_t released_bytes = 0;
  while (pool_.pset.num_free() > 0) {
    release_free_chunk();
    released_bytes += pool_.geometry.chunk_bytes;
  }
  return released_bytes;
}

bool Scheduler::set_budget_chunks(size_t budget_chunks) {
  PSet& pset = pool_.pset;
  ++plan_;  // no vTensor is spared
  if (pset.num_created() > budget_chunks) {
    const size_t to_free = pset.num_created() - budget_chunks;
    if (!make_claimable(to_free, /*created=*/true)) return false;
    for (size_t i = 0; i < to_free; ++i) release_free_chunk();
  }
  pset.set_budget_chunks(budget_chunks);
  return true;
}

}  // namespace vtensor
