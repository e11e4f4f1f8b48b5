#include "vtensor/core/reclaimer.h"

#include <algorithm>
#include <exception>
#include <span>
#include <vector>

namespace vtensor {

size_t Reclaimer::num_obtained(bool created) const {
  return created ? pool_.pset.num_free() : pool_.pset.num_claimable();
}

// Trailing rows of a slot that hold nobody else's chunks.
size_t Reclaimer::private_end_rows(SlotId slot) const {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  size_t rows = 0;
  while (rows * row_chunks < table.size() &&
         std::ranges::all_of(
             std::span(table).last((rows + 1) * row_chunks).first(row_chunks),
             [&](ChunkId id) { return id == kNoChunk || pool_.pset[id].is_private(); })) {
    ++rows;
  }
  return rows;
}

// Takes private rows from parked slots, the longest parked first, as many as are needed.
void Reclaimer::reclaim_parked_private(size_t num_chunks, bool created) {
  if (pool_.pset.num_idle_unrecorded() == 0) return;
  const std::vector<SlotId> parked(pool_.vset.parked().begin(), pool_.vset.parked().end());
  for (const SlotId slot : parked) {
    const size_t obtained = num_obtained(created);
    if (obtained >= num_chunks) return;
    const size_t missing_rows = ceil_div(num_chunks - obtained, pool_.geometry.row_chunks);
    const size_t rows = std::min(private_end_rows(slot), missing_rows);
    shrink_parked(slot, pool_.vset.mapped_rows(slot) - rows);
  }
}

void Reclaimer::shrink_parked(SlotId slot, size_t keep_rows) {
  vtensors_.shrink(slot, keep_rows);
  if (pool_.vset.mapped_rows(slot) == 0) v_free(pool_, slot);
}

// A chunk of a recorded prefix lies in the same row wherever it is mapped.
void Reclaimer::unmap_parked(size_t first_row, size_t last_row, std::span<const ChunkId> chunks) {
  const auto known = std::ranges::find_if(chunks, [](ChunkId id) { return id != kNoChunk; });
  const size_t entry =
      last_row * pool_.geometry.row_chunks + static_cast<size_t>(known - chunks.begin());
  const std::vector<SlotId> parked(pool_.vset.parked().begin(), pool_.vset.parked().end());
  for (const SlotId slot : parked) {
    const std::vector<ChunkId>& table = pool_.vset[slot].table;
    if (entry < table.size() && table[entry] == *known) shrink_parked(slot, first_row);
  }
}

// Rows mapped ahead of need, which the plan under way does not spare. None where views are alive:
// one made before a truncation may reach into these rows. None while a step is open: its kernels
// may read them, and cannot be waited for.
size_t Reclaimer::surplus_rows(const VTensor& vtensor) const {
  if (vtensor.busy || state_.epochs.is_open()) return 0;
  if (pool_.vset[vtensor.slot].num_views > 0) return 0;
  const size_t planned = vtensor.plan == state_.plan ? vtensor.planned_tokens : 0;
  const size_t num_tokens = std::max(vtensor.num_tokens, planned);
  const size_t needed = std::max(pool_.geometry.rows_for(num_tokens), vtensor.first_owned_row);
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

size_t Reclaimer::num_idle() const { return pool_.pset.num_idle(); }

size_t Reclaimer::num_available() const {
  size_t surplus = 0;
  for (const VTensorId id : vtensors_.live_ids()) {
    surplus += surplus_rows(vtensors_.live(id)) * pool_.geometry.row_chunks;
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
    if (evict(std::min(num_chunks - pset.num_free(), num_idle() - max_idle)) > 0) continue;
    if (pool_.vset.parked().empty()) return;
    shrink_parked(pool_.vset.parked().front(), 0);
  }
}

bool Reclaimer::make_claimable(size_t num_chunks, bool created) {
  if (num_obtained(created) >= num_chunks) {
    if (!created) recycle(num_chunks, max_idle());
    return true;
  }
  retirement_.reap_all();
  vtensors_.repair_broken();
  forgetter_.give_back_all();
  // With nothing created, the part of the budget that is not used yet does not count.
  const size_t uncreated = pool_.pset.budget_chunks() - pool_.pset.num_created();
  if (num_available() - (created ? uncreated : 0) < num_chunks) return false;

  reclaim_parked_private(num_chunks, created);
  reclaim_surplus(num_chunks, created);
  const auto missing = [&] {
    const size_t obtained = num_obtained(created);
    return num_chunks > obtained ? num_chunks - obtained : 0;
  };
  if (missing() > 0) evict_recorded(missing());
  while (missing() > 0 && !pool_.vset.parked().empty()) {
    shrink_parked(pool_.vset.parked().front(), 0);
    if (missing() > 0) evict_recorded(missing());
  }
  if (missing() > 0) evict_recorded(missing(), /*any=*/true);
  return missing() == 0;
}

void Reclaimer::evict_recorded(size_t num_chunks, bool any) {
  const auto unmap = [this](size_t first_row, size_t last_row, std::span<const ChunkId> chunks) {
    unmap_parked(first_row, last_row, chunks);
  };
  state_.counters.chunks_evicted += pool_.rtree.evict(num_chunks, unmap, any);
}

size_t Reclaimer::evict(size_t num_chunks) {
  const size_t before = pool_.pset.num_free();
  const size_t target = before + std::min(num_chunks, num_idle());
  reclaim_parked_private(target, /*created=*/true);
  if (pool_.pset.num_free() < target) evict_recorded(target - pool_.pset.num_free());
  return pool_.pset.num_free() - before;
}

// What the driver refuses to release stays free.
void Reclaimer::release_created_beyond(size_t num_chunks) {
  try {
    while (pool_.pset.num_created() > num_chunks && pool_.pset.num_free() > 0) {
      release_free_chunk();
    }
  } catch (const std::exception&) {
    return;
  }
}

void Reclaimer::release_apart() {
  try {
    while (pool_.pset.num_apart_free() > 0) release_chunk(pool_.pset.take_apart());
  } catch (const std::exception&) {
    return;  // for the next time
  }
}

void Reclaimer::release_free_chunk() { release_chunk(pool_.pset.take_free()); }

void Reclaimer::release_chunk(ChunkId id) {
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
  vtensors_.repair_broken();
  const std::vector<SlotId> parked(pool_.vset.parked().begin(), pool_.vset.parked().end());
  for (const SlotId slot : parked) shrink_parked(slot, 0);
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
