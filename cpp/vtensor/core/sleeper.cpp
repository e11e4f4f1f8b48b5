#include "vtensor/core/sleeper.h"

#include <algorithm>
#include <exception>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "vtensor/core/saved_chunk.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/util/error.h"

namespace vtensor {

// By chunk: its leading bytes that a vTensor or the tree may read.
std::vector<size_t> Sleeper::used_bytes() const {
  std::vector<size_t> used(pool_.pset.num_ids());
  for (ChunkId id = 0; id < used.size(); ++id) {
    const Chunk& chunk = pool_.pset[id];
    if (chunk.appender == kNoVTensor) used[id] = chunk.written_bytes;
  }
  for (const VTensorId id : vtensors_.live_ids()) {
    const VTensor& vtensor = vtensors_.live(id);
    const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
    for (size_t i = vtensor.first_owned_row * pool_.geometry.row_chunks; i < table.size(); ++i) {
      if (table[i] == kNoChunk || pool_.pset[table[i]].appender != id) continue;
      used[table[i]] = pool_.geometry.bytes_used(i, vtensor.peak_tokens);
    }
  }
  return used;
}

std::vector<ChunkId> Sleeper::resident_chunks() const {
  const std::unordered_set<ChunkId> broken = broken_chunks();
  std::vector<ChunkId> chunks;
  for (ChunkId id = 0; id < pool_.pset.num_ids(); ++id) {
    if (pool_.pset[id].refs() > 0 && !broken.contains(id)) chunks.push_back(id);
  }
  return chunks;
}

// What broken slots may still map stays where it is.
std::unordered_set<ChunkId> Sleeper::broken_chunks() const {
  std::unordered_set<ChunkId> broken;
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    const Slot& entry = pool_.vset[slot];
    if (entry.state == SlotState::kBroken) broken.insert(entry.table.begin(), entry.table.end());
  }
  return broken;
}

size_t Sleeper::sleep(SwapStore& store) {
  size_t num_views = 0;
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    num_views += pool_.vset[slot].num_views;
  }
  if (num_views > 0) {
    throw std::invalid_argument("cannot sleep while " + std::to_string(num_views) +
                                " tensor views of vTensors are alive");
  }
  state_.epochs.wait();  // what is saved must have been written
  retirement_.reap();
  const size_t trimmed_bytes = reclaimer_.trim();
  const std::vector<ChunkId> chunks = resident_chunks();
  const std::vector<size_t> used = used_bytes();
  size_t num_bytes = 0;
  for (const ChunkId id : chunks) num_bytes += used[id];
  if (!store.has_room(num_bytes)) {
    throw OutOfMemoryError(num_bytes, store.capacity_bytes() - store.used_bytes(),
                           store.capacity_bytes(), "the store for sleeping KV is too small");
  }
  unmap_all_slots();
  is_asleep_ = true;
  num_awake_slots_ = 0;
  try {
    save_and_release(chunks, used, store);
  } catch (...) {
    const std::exception_ptr first = std::current_exception();
    try {
      wake(store);
    } catch (const std::exception&) {  // asleep, with what was not saved still resident
    }
    std::rethrow_exception(first);
  }
  const size_t away_bytes =
      (pool_.pset.num_created() - num_resident_chunks()) * pool_.geometry.chunk_bytes;
  const bool same_memory = store.is_in_memory() && pool_.driver->has_memory() &&
                           pool_.driver->device().type == Device::Type::kCpu;
  const size_t stored_bytes = same_memory ? store.used_bytes() : 0;
  return trimmed_bytes + away_bytes - std::min(stored_bytes, away_bytes);
}

// One by one, so that no more than a chunk is held twice.
void Sleeper::save_and_release(std::span<const ChunkId> chunks, std::span<const size_t> used,
                               SwapStore& store) {
  for (const ChunkId id : chunks) {
    saved_[id] = save(*pool_.driver, store, pool_.pset[id].handle, used[id]);
    release_chunk(id);
  }
}

// What the driver refuses to release stays resident, until wake() uses it again.
void Sleeper::release_chunk(ChunkId id) {
  Chunk& chunk = pool_.pset[id];
  try {
    pool_.driver->release(chunk.handle, pool_.geometry.chunk_bytes);
    chunk.created = chunk.apart = chunk.sealed = false;  // wake() creates the pool's
  } catch (const std::exception&) {
    return;
  }
}

void Sleeper::release_memory() {
  const std::unordered_set<ChunkId> broken = broken_chunks();
  for (const auto& [id, ticket] : saved_) {
    if (pool_.pset[id].created && !broken.contains(id)) release_chunk(id);
  }
}

// All or none: what was unmapped is mapped again when a later slot fails. A slot for which that
// fails as well is broken.
void Sleeper::unmap_all_slots() {
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
        vtensors_.break_slot(slot, {});
      }
    }
    throw;
  }
}

void Sleeper::unmap_slot(SlotId slot) {
  if (pool_.vset[slot].state == SlotState::kBroken) return;
  try {
    unmap(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
          vtensors_.handles(slot, 0, pool_.vset.mapped_rows(slot)));
  } catch (const BrokenMapping&) {
    vtensors_.break_slot(slot, {});
    throw;
  }
  vtensors_.forget_guard(slot, 0);
}

void Sleeper::map_slot(SlotId slot) {
  if (pool_.vset[slot].state == SlotState::kBroken) return;
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
        vtensors_.handles(slot, 0, pool_.vset.mapped_rows(slot)));
  } catch (const BrokenMapping&) {
    vtensors_.break_slot(slot, {});
    throw;
  }
}

void Sleeper::release_later(VTensorId id) {
  if (std::ranges::find(released_, vtensors_.live(id).id) != released_.end()) {
    throw ReleasedError("vTensor " + std::to_string(id) + " has been released");
  }
  released_.push_back(id);
}

std::vector<VTensorId> Sleeper::wake(SwapStore& store) {
  if (!is_asleep_) return {};
  try {
    for (const auto& [id, ticket] : saved_) {
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
  end(store);
  std::erase_if(released_, [&](VTensorId id) { return !vtensors_.is_live(id); });  // slot broken
  return std::exchange(released_, {});
}

// Undoes a wake() that failed. Where this fails too, what is mapped and created stays so, and the
// next wake() goes on from there.
void Sleeper::fall_asleep_again() {
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
  release_memory();
}

void Sleeper::end(SwapStore& store) {
  for (const auto& [id, ticket] : saved_) store.drop(ticket);
  saved_.clear();
  num_awake_slots_ = 0;
  is_asleep_ = false;
}

size_t Sleeper::num_resident_chunks() const {
  size_t num_away = 0;
  for (const auto& [id, ticket] : saved_) {
    num_away += static_cast<size_t>(!pool_.pset[id].created);
  }
  return pool_.pset.num_created() - num_away;
}

// Those that the driver refused to release stay.
void Sleeper::forget_free_chunks() {
  std::vector<ChunkId> resident;
  while (pool_.pset.num_free() > 0) {
    const ChunkId id = pool_.pset.take_free();
    if (pool_.pset[id].created) {
      resident.push_back(id);
    } else {
      pool_.pset.forget(id);
    }
  }
  for (const ChunkId id : resident) pool_.pset.put_back(id);
}

void Sleeper::discard(SwapStore& store) {
  for (; num_awake_slots_ > 0; --num_awake_slots_) unmap_slot(num_awake_slots_ - 1);
  for (const VTensorId id : vtensors_.live_ids()) {
    vtensors_.record_watermark(vtensors_.live(id));
    vtensors_.park(vtensors_.live(id).slot);
  }
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    if (pool_.vset[slot].state == SlotState::kBroken) continue;
    vtensors_.unpark(slot);
    p_free(pool_, pool_.vset[slot].table);
    pool_.vset[slot].table.clear();
    if (pool_.vset[slot].state == SlotState::kParked) v_free(pool_, slot);
  }
  pool_.rtree.clear();
  forget_free_chunks();
  end(store);
}

}  // namespace vtensor
