// Scheduler: swapping one vTensor out and in, and putting the whole pool to sleep.
//
// Both keep addresses: a swapped vTensor keeps its slot, and a sleeping pool keeps its page tables
// and its rTree; only the memory behind them goes away and comes back.
#include <algorithm>
#include <utility>

#include "vtensor/error.h"
#include "vtensor/sched/scheduler.h"

namespace vtensor {
namespace {

SwapStore::Ticket save(Driver& driver, SwapStore& store, Handle handle, size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  driver.read(handle, 0, bytes);
  return store.put(bytes);
}

void restore(Driver& driver, const SwapStore& store, Handle handle, SwapStore::Ticket ticket) {
  const std::vector<std::byte> bytes = store.get(ticket);
  if (!bytes.empty()) driver.write(handle, 0, bytes);
}

}  // namespace

bool Scheduler::swap_out(VTensorId id, SwapStore& store) {
  VTensor& vtensor = resident(id);
  const Geometry& geometry = pool_.geometry;
  const size_t rows = geometry.rows_for(vtensor.num_tokens);
  if (!store.has_room(vtensor.num_tokens * geometry.token_bytes * geometry.num_planes))
    return false;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  std::vector<SwapStore::Ticket> tickets;
  const auto drop_all = [&] {
    for (const SwapStore::Ticket ticket : tickets) store.drop(ticket);
  };
  epochs_.wait();  // what is saved must have been written
  try {
    for (size_t i = 0; i < rows * geometry.num_planes; ++i) {
      const size_t used = geometry.bytes_used(i / geometry.num_planes, vtensor.num_tokens);
      tickets.push_back(save(*pool_.driver, store, pool_.pset[table[i]].handle, used));
    }
    stamp(vtensor);
    shrink_slot(vtensor.slot, 0);
  } catch (...) {
    drop_all();
    if (is_live(id))
      own_rows(vtensor, vtensor.own_row + (vtensor.tail_shared ? 1 : 0),
               pool_.vset.mapped_rows(vtensor.slot));
    throw;
  }
  counters_.chunks_swapped_out += tickets.size();
  vtensor.swapped = std::move(tickets);
  vtensor.is_swapped = true;
  vtensor.own_row = 0;
  vtensor.tail_shared = false;
  vtensor.frozen_tokens = 0;
  update_write_limit(vtensor);
  return true;
}

bool Scheduler::swap_in(VTensorId id, std::span<const Token> tokens, SwapStore& store) {
  VTensor& vtensor = live(id);
  if (!vtensor.is_swapped) throw std::invalid_argument("this vTensor is not swapped out");
  const size_t planes = pool_.geometry.num_planes;
  const size_t known = std::min(tokens.size(), vtensor.num_tokens);
  RTree::Match match = r_prefix_match(pool_, vtensor.salt, tokens.first(known));
  // Whole rows only: the tail must be this vTensor's own, to go on writing.
  const size_t aliased = pool_.geometry.full_rows(match.num_tokens);
  p_free(pool_, std::span(match.table).subspan(aliased * planes));
  match.table.resize(aliased * planes);

  const size_t num_claims = (pool_.geometry.rows_for(vtensor.num_tokens) - aliased) * planes;
  std::optional<std::vector<Claim>> claims;
  if (make_claimable(num_claims)) {
    claims = p_claim(pool_, num_claims, options_.scrub, vtensor.tenant);
  }
  if (!claims) {
    p_free(pool_, match.table);
    return false;
  }
  try {
    fill_swapped(vtensor, match.table, *claims, store);
  } catch (...) {
    p_unclaim(pool_, *claims);
    p_free(pool_, match.table);
    throw;
  }
  p_settle(pool_, *claims, vtensor.tenant);
  std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  table.assign(match.table.begin(), match.table.end());
  for (const Claim& claim : *claims) table.push_back(claim.id);
  vtensor.own_row = aliased;
  vtensor.frozen_tokens = pool_.geometry.tokens_in(aliased);
  own_rows(vtensor, aliased, pool_.vset.mapped_rows(vtensor.slot));
  forget_swapped(vtensor, store);
  counters_.chunks_swapped_in += num_claims;
  counters_.chunks_aliased += match.table.size();
  update_write_limit(vtensor);
  return true;
}

// Driver work of swap_in(): contents into the claims, then everything behind the slot.
void Scheduler::fill_swapped(VTensor& vtensor, std::span<const ChunkId> aliased,
                             std::vector<Claim>& claims, const SwapStore& store) {
  p_create(*pool_.driver, pool_.geometry.chunk_bytes, claims);
  std::vector<Handle> rows;
  for (const ChunkId id : aliased) rows.push_back(pool_.pset[id].handle);
  for (size_t i = 0; i < claims.size(); ++i) {
    restore(*pool_.driver, store, claims[i].handle, vtensor.swapped[aliased.size() + i]);
    claims[i].dirty_bytes = pool_.geometry.chunk_bytes;
    rows.push_back(claims[i].handle);
  }
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, vtensor.slot, 0}, rows);
  } catch (const BrokenMapping&) {
    std::vector<ChunkId> maybe_mapped(aliased.begin(), aliased.end());
    for (const Claim& claim : claims) maybe_mapped.push_back(claim.id);
    break_slot(vtensor.slot, maybe_mapped);
    throw;
  }
}

void Scheduler::forget_swapped(VTensor& vtensor, SwapStore& store) {
  for (const SwapStore::Ticket ticket : vtensor.swapped) store.drop(ticket);
  vtensor.swapped.clear();
  vtensor.is_swapped = false;
}

size_t Scheduler::bytes_to_save(ChunkId id) const {
  const Chunk& chunk = pool_.pset[id];
  return chunk.appender != kNoVTensor ? pool_.geometry.chunk_bytes : chunk.dirty_bytes;
}

size_t Scheduler::sleep(SwapStore& store) {
  trim();
  std::vector<ChunkId> chunks;
  size_t num_bytes = 0;
  for (ChunkId id = 0; id < pool_.pset.num_ids(); ++id) {
    if (pool_.pset[id].refs() == 0) continue;
    chunks.push_back(id);
    num_bytes += bytes_to_save(id);
  }
  if (!store.has_room(num_bytes)) {
    throw OutOfMemoryError(num_bytes, store.capacity_bytes() - store.used_bytes(),
                           store.capacity_bytes(), "the store for sleeping KV is too small");
  }
  std::unordered_map<ChunkId, SwapStore::Ticket> saved;
  try {
    for (const ChunkId id : chunks) {
      saved[id] = save(*pool_.driver, store, pool_.pset[id].handle, bytes_to_save(id));
    }
    unmap_all_slots();
  } catch (...) {
    for (const auto& [id, ticket] : saved) store.drop(ticket);
    throw;
  }
  for (const ChunkId id : chunks) {
    try {
      pool_.driver->release(pool_.pset[id].handle, pool_.geometry.chunk_bytes);
    } catch (const DriverError&) {
      // Saved and unmapped already: the driver keeps this chunk until it is closed.
    }
    pool_.pset[id].created = false;
  }
  asleep_ = std::move(saved);
  is_asleep_ = true;
  return chunks.size() * pool_.geometry.chunk_bytes;
}

// All or none: what was unmapped is mapped again when a later slot fails.
void Scheduler::unmap_all_slots() {
  SlotId slot = 0;
  epochs_.wait();
  try {
    for (; slot < pool_.vset.num_slots(); ++slot) {
      unmap(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
            handles(slot, 0, pool_.vset.mapped_rows(slot)));
    }
  } catch (const std::exception&) {
    while (slot > 0) map_slot(--slot);
    throw;
  }
}

void Scheduler::map_slot(SlotId slot) {
  map(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
      handles(slot, 0, pool_.vset.mapped_rows(slot)));
}

void Scheduler::wake(SwapStore& store) {
  if (!is_asleep_) return;
  std::vector<ChunkId> created;
  SlotId slot = 0;
  try {
    for (const auto& [id, ticket] : asleep_) {
      pool_.pset[id].handle = pool_.driver->create(pool_.geometry.chunk_bytes);
      created.push_back(id);
      restore(*pool_.driver, store, pool_.pset[id].handle, ticket);
    }
    for (; slot < pool_.vset.num_slots(); ++slot) map_slot(slot);
  } catch (...) {
    while (slot > 0) {
      --slot;
      unmap(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
            handles(slot, 0, pool_.vset.mapped_rows(slot)));
    }
    for (const ChunkId id : created) {
      pool_.driver->release(pool_.pset[id].handle, pool_.geometry.chunk_bytes);
    }
    throw;
  }
  for (const auto& [id, ticket] : asleep_) {
    pool_.pset[id].created = true;
    store.drop(ticket);
  }
  asleep_.clear();
  is_asleep_ = false;
}

void Scheduler::discard_sleep(SwapStore& store) {
  for (const VTensorId id : live_ids()) {
    stamp(live(id));
    pool_.vset.park(live(id).slot);
  }
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    p_free(pool_, pool_.vset[slot].table);
    pool_.vset[slot].table.clear();
    if (pool_.vset[slot].state == SlotState::kParked) v_free(pool_, slot);
  }
  pool_.rtree.clear();
  while (pool_.pset.num_free() > 0) pool_.pset.forget(pool_.pset.take_free());
  for (const auto& [id, ticket] : asleep_) store.drop(ticket);
  asleep_.clear();
  is_asleep_ = false;
}

}  // namespace vtensor
