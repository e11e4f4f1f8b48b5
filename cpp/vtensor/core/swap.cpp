// Scheduler: swapping one vTensor out and in, and putting the whole pool to sleep.
//
// Both keep addresses: a swapped vTensor keeps its slot, and a sleeping pool keeps its page tables
// and its rTree; only the memory behind them goes away and comes back.
#include <algorithm>
#include <utility>

#include "vtensor/core/scheduler.h"
#include "vtensor/util/error.h"

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
  if (pool_.vset[vtensor.slot].num_views > 0) {
    throw std::invalid_argument("cannot swap vTensor " + std::to_string(id) +
                                " out while tensor views of it are alive; drop them first");
  }
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
    shrink_slot(vtensor.slot, 0);
  } catch (...) {
    drop_all();
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
  try {
    return bring_back(vtensor, tokens, store, /*created=*/false);
  } catch (const OutOfMemoryError&) {
    // The budget promised more than the system has: go on with what exists already.
  }
  try {
    return bring_back(vtensor, tokens, store, /*created=*/true);
  } catch (const OutOfMemoryError&) {
    return false;
  }
}

// One attempt of swap_in(); `created`: even without creating any chunk.
bool Scheduler::bring_back(VTensor& vtensor, std::span<const Token> tokens, SwapStore& store,
                           bool created) {
  const size_t planes = pool_.geometry.num_planes;
  const size_t known = options_.alias ? std::min(tokens.size(), vtensor.num_tokens) : 0;
  RTree::Match match = r_prefix_match(pool_, vtensor.salt, tokens.first(known));
  // Whole rows only: the tail must be this vTensor's own, to go on writing.
  const size_t aliased = pool_.geometry.full_rows(match.num_tokens);
  p_free(pool_, std::span(match.table).subspan(aliased * planes));
  match.table.resize(aliased * planes);

  const size_t num_claims = (pool_.geometry.rows_for(vtensor.num_tokens) - aliased) * planes;
  std::optional<std::vector<Claim>> claims;
  try {
    if (make_claimable(num_claims, created)) {
      claims = p_claim(pool_, num_claims, options_.scrub, vtensor.tenant);
    }
    if (claims) fill_swapped(vtensor, match.table, *claims, store);
  } catch (...) {
    if (claims) unclaim(*claims, vtensor.tenant);
    p_free(pool_, match.table);
    if (!is_live(vtensor.id)) forget_swapped(vtensor, store);  // its slot is broken
    throw;
  }
  if (!claims) {
    p_free(pool_, match.table);
    return false;
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
    claims[i].dirty_bytes = pool_.geometry.chunk_bytes;
    restore(*pool_.driver, store, claims[i].handle, vtensor.swapped[aliased.size() + i]);
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

// What broken slots may still map stays where it is.
std::unordered_set<ChunkId> Scheduler::broken_chunks() const {
  std::unordered_set<ChunkId> broken;
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    const Slot& entry = pool_.vset[slot];
    if (entry.state == SlotState::kBroken) broken.insert(entry.table.begin(), entry.table.end());
  }
  return broken;
}

size_t Scheduler::sleep(SwapStore& store) {
  epochs_.wait();  // what is saved must have been written
  reap();
  const size_t trimmed_bytes = trim();
  const std::unordered_set<ChunkId> broken = broken_chunks();
  std::vector<ChunkId> chunks;
  size_t num_bytes = 0;
  for (ChunkId id = 0; id < pool_.pset.num_ids(); ++id) {
    if (pool_.pset[id].refs() == 0 || broken.contains(id)) continue;
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
  asleep_ = std::move(saved);
  is_asleep_ = true;
  return trimmed_bytes + release_asleep() * pool_.geometry.chunk_bytes;
}

// Gives the memory of sleeping chunks back. What the driver refuses to release stays resident,
// until wake() uses it again. Returns chunks.
size_t Scheduler::release_asleep() {
  const std::unordered_set<ChunkId> broken = broken_chunks();
  size_t num_released = 0;
  for (const auto& [id, ticket] : asleep_) {
    Chunk& chunk = pool_.pset[id];
    if (!chunk.created || broken.contains(id)) continue;
    try {
      pool_.driver->release(chunk.handle, pool_.geometry.chunk_bytes);
    } catch (const std::exception&) {
      continue;
    }
    chunk.created = false;
    ++num_released;
  }
  return num_released;
}

// All or none: what was unmapped is mapped again when a later slot fails. A slot for which that
// fails as well is broken.
void Scheduler::unmap_all_slots() {
  SlotId slot = 0;
  try {
    for (; slot < pool_.vset.num_slots(); ++slot) unmap_slot(slot);
  } catch (...) {
    while (slot > 0) {
      try {
        map_slot(--slot);
      } catch (const BrokenMapping&) {
        continue;
      } catch (const std::exception&) {
        break_slot(slot, {});
      }
    }
    throw;
  }
}

void Scheduler::unmap_slot(SlotId slot) {
  if (pool_.vset[slot].state == SlotState::kBroken) return;
  try {
    unmap(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
          handles(slot, 0, pool_.vset.mapped_rows(slot)));
  } catch (const BrokenMapping&) {
    break_slot(slot, {});
    throw;
  }
}

void Scheduler::map_slot(SlotId slot) {
  if (pool_.vset[slot].state == SlotState::kBroken) return;
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
        handles(slot, 0, pool_.vset.mapped_rows(slot)));
  } catch (const BrokenMapping&) {
    break_slot(slot, {});
    throw;
  }
}

void Scheduler::wake(SwapStore& store) {
  if (!is_asleep_) return;
  try {
    for (const auto& [id, ticket] : asleep_) {
      Chunk& chunk = pool_.pset[id];
      if (!chunk.created) chunk.handle = pool_.driver->create(pool_.geometry.chunk_bytes);
      chunk.created = true;
      restore(*pool_.driver, store, chunk.handle, ticket);
    }
    for (; num_awake_slots_ < pool_.vset.num_slots(); ++num_awake_slots_) {
      map_slot(num_awake_slots_);
    }
  } catch (...) {
    fall_asleep_again();
    throw;
  }
  end_sleep(store);
}

// Undoes a wake() that failed. Where this fails too, what is mapped and created stays so, and the
// next wake() goes on from there.
void Scheduler::fall_asleep_again() {
  while (num_awake_slots_ > 0) {
    try {
      unmap_slot(num_awake_slots_ - 1);
      --num_awake_slots_;
    } catch (const BrokenMapping&) {
      continue;  // it is broken now, and passed over
    } catch (const std::exception&) {
      return;
    }
  }
  release_asleep();
}

void Scheduler::end_sleep(SwapStore& store) {
  for (const auto& [id, ticket] : asleep_) store.drop(ticket);
  asleep_.clear();
  num_awake_slots_ = 0;
  is_asleep_ = false;
}

size_t Scheduler::num_resident_chunks() const {
  size_t num_away = 0;
  for (const auto& [id, ticket] : asleep_) {
    num_away += static_cast<size_t>(!pool_.pset[id].created);
  }
  return pool_.pset.num_created() - num_away;
}

void Scheduler::discard_sleep(SwapStore& store) {
  for (; num_awake_slots_ > 0; --num_awake_slots_) unmap_slot(num_awake_slots_ - 1);
  for (const VTensorId id : live_ids()) {
    stamp(live(id));
    pool_.vset.park(live(id).slot);
  }
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    if (pool_.vset[slot].state == SlotState::kBroken) continue;
    p_free(pool_, pool_.vset[slot].table);
    pool_.vset[slot].table.clear();
    if (pool_.vset[slot].state == SlotState::kParked) v_free(pool_, slot);
  }
  pool_.rtree.clear();
  std::vector<ChunkId> resident;  // what the driver refused to release
  while (pool_.pset.num_free() > 0) {
    const ChunkId id = pool_.pset.take_free();
    if (pool_.pset[id].created) {
      resident.push_back(id);
    } else {
      pool_.pset.forget(id);
    }
  }
  for (const ChunkId id : resident) pool_.pset.put_back(id);
  end_sleep(store);
}

}  // namespace vtensor
