#include "vtensor/core/scheduler.h"

#include <algorithm>
#include <stdexcept>

#include "vtensor/util/error.h"

namespace vtensor {

Scheduler::Scheduler(Pool& pool, const SchedulerOptions& options)
    : pool_(pool), options_(options), vtensors_(pool.vset.num_slots()) {}

// An id names its slot and the generation of the slot, so that a lookup is one division and a
// stale id is told from a foreign one.
VTensorId Scheduler::id_of(SlotId slot) const {
  return pool_.vset[slot].generation * pool_.vset.num_slots() + slot;
}

bool Scheduler::is_live(VTensorId id) const {
  const auto slot = static_cast<SlotId>(id % pool_.vset.num_slots());
  return pool_.vset[slot].state == SlotState::kLive && vtensors_[slot].id == id;
}

VTensor& Scheduler::live(VTensorId id) {
  const auto slot = static_cast<SlotId>(id % pool_.vset.num_slots());
  if (is_live(id)) return vtensors_[slot];
  if (id == kNoVTensor || id > id_of(slot)) {
    throw std::out_of_range("no vTensor has id " + std::to_string(id) + " in this manager");
  }
  throw ReleasedError("vTensor " + std::to_string(id) + " has been released");
}

VTensor& Scheduler::resident(VTensorId id) {
  VTensor& vtensor = live(id);
  if (vtensor.is_swapped) {
    throw std::invalid_argument("vTensor " + std::to_string(id) +
                                " is swapped out; swap it in first");
  }
  return vtensor;
}

std::vector<VTensorId> Scheduler::live_ids() const {
  std::vector<VTensorId> ids;
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    if (pool_.vset[slot].state == SlotState::kLive) ids.push_back(vtensors_[slot].id);
  }
  return ids;
}

// The tail row may be written only by its appender. Continuing exactly where the last one stopped
// makes this vTensor the appender, without a copy: the path of a multi-turn chat. Returns false
// when somebody else may write there, or wrote on: then the tail must be copied.
bool Scheduler::take_tail(VTensor& vtensor) {
  const size_t planes = pool_.geometry.num_planes;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  const auto tail = std::span(table).subspan(vtensor.own_row * planes, planes);
  const size_t written = pool_.geometry.bytes_used(vtensor.own_row, vtensor.num_tokens);
  const bool vacant = std::ranges::all_of(tail, [&](ChunkId id) {
    const Chunk& chunk = pool_.pset[id];
    return chunk.appender == kNoVTensor && chunk.written_bytes == written;
  });
  if (!vacant) return false;
  for (const ChunkId id : tail) pool_.pset[id].appender = vtensor.id;
  vtensor.tail_shared = false;
  return true;
}

void Scheduler::update_write_limit(VTensor& vtensor) const {
  const size_t rows = pool_.vset.mapped_rows(vtensor.slot);
  const size_t mapped = std::min(pool_.geometry.tokens_in(rows), pool_.geometry.max_tokens);
  vtensor.write_limit = vtensor.tail_shared ? vtensor.num_tokens : mapped;
}

// Makes the vTensor the appender of rows [first_row, end_row).
void Scheduler::own_rows(VTensor& vtensor, size_t first_row, size_t end_row) {
  const size_t planes = pool_.geometry.num_planes;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  for (size_t i = first_row * planes; i < end_row * planes; ++i) {
    Chunk& chunk = pool_.pset[table[i]];
    chunk.appender = vtensor.id;
    chunk.tenant = vtensor.tenant;
    chunk.written_bytes = 0;
  }
}

// Ends the vTensor's appender roles from `first_row` on and leaves its watermarks in the chunks.
// While views are alive, what they may show counts as written: nobody goes on below it.
void Scheduler::stamp(const VTensor& vtensor, size_t first_row) {
  const size_t planes = pool_.geometry.num_planes;
  const Slot& slot = pool_.vset[vtensor.slot];
  const std::vector<ChunkId>& table = slot.table;
  const size_t written_tokens = slot.num_views > 0 ? vtensor.peak_tokens : vtensor.num_tokens;
  for (size_t i = std::max(vtensor.own_row, first_row) * planes; i < table.size(); ++i) {
    Chunk& chunk = pool_.pset[table[i]];
    if (chunk.appender != vtensor.id) continue;
    chunk.appender = kNoVTensor;
    chunk.written_bytes = pool_.geometry.bytes_used(i / planes, written_tokens);
    chunk.dirty_bytes =
        std::max(chunk.dirty_bytes, pool_.geometry.bytes_used(i / planes, vtensor.peak_tokens));
  }
}

void Scheduler::release(VTensorId id) {
  VTensor& vtensor = live(id);
  stamp(vtensor);
  const SlotId slot = vtensor.slot;
  if (pool_.vset[slot].num_views > 0) {
    pool_.vset.hold(slot);
  } else {
    retire_slot(slot);
  }
}

void Scheduler::unhold(SlotId slot) {
  if (pool_.vset[slot].state == SlotState::kHeld) retire_slot(slot);
}

// The slot of a released vTensor is settled once no running step can read it.
void Scheduler::retire_slot(SlotId slot) {
  pool_.vset.retire(slot);
  retiring_.emplace_back(epochs_.last_used(), slot);
  reap();
}

void Scheduler::reap() {
  while (!retiring_.empty() && retiring_.front().first <= epochs_.completed()) {
    const SlotId slot = retiring_.front().second;
    retiring_.pop_front();
    settle_slot(slot);
  }
}

void Scheduler::finish_steps() {
  if (epochs_.is_open()) {
    pool_.driver->synchronize();
    epochs_.end(nullptr);
  }
  epochs_.wait();
  reap();
}

// Where the slot of a released vTensor goes. A driver that fails to unmap leaves it parked, which
// loses nothing: the rows are unmapped when they are needed.
void Scheduler::settle_slot(SlotId slot) {
  pool_.vset.park(slot);
  if (options_.park && pool_.vset.mapped_rows(slot) > 0) return;
  try {
    shrink_slot(slot, 0);
    v_free(pool_, slot);
  } catch (const std::exception&) {
    return;
  }
}

std::vector<Handle> Scheduler::handles(SlotId slot, size_t first_row, size_t end_row) const {
  const size_t planes = pool_.geometry.num_planes;
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  std::vector<Handle> found;
  found.reserve((end_row - first_row) * planes);
  for (size_t i = first_row * planes; i < end_row * planes; ++i) {
    found.push_back(pool_.pset[table[i]].handle);
  }
  return found;
}

// Nobody knows what is mapped in the slot: it is never used again, and what may be mapped there
// (its table and `chunks`) stays referenced, so that nobody else writes to it.
void Scheduler::break_slot(SlotId slot, std::span<const ChunkId> chunks) {
  if (pool_.vset[slot].state == SlotState::kLive) stamp(vtensors_[slot]);
  for (const ChunkId id : chunks) {
    pool_.pset.add_table_ref(id);
    pool_.vset[slot].table.push_back(id);
  }
  pool_.vset.make_broken(slot);
}

// Unmaps all rows from keep_rows on and drops their references. What a live vTensor wrote there is
// noted first: a chunk that becomes free must be known to be dirty.
void Scheduler::shrink_slot(SlotId slot, size_t keep_rows) {
  const size_t rows = pool_.vset.mapped_rows(slot);
  if (rows <= keep_rows) return;
  if (pool_.vset[slot].state == SlotState::kLive) epochs_.wait();
  try {
    unmap(*pool_.driver, {pool_.vset, pool_.geometry, slot, keep_rows},
          handles(slot, keep_rows, rows));
  } catch (const BrokenMapping&) {
    break_slot(slot, {});
    throw;
  }
  if (pool_.vset[slot].state == SlotState::kLive) stamp(vtensors_[slot], keep_rows);
  std::vector<ChunkId>& table = pool_.vset[slot].table;
  const std::span<const ChunkId> tail =
      std::span(table).subspan(keep_rows * pool_.geometry.num_planes);
  p_free(pool_, tail);
  table.resize(keep_rows * pool_.geometry.num_planes);
}

void Scheduler::truncate(VTensorId id, size_t num_tokens) {
  VTensor& vtensor = resident(id);
  if (num_tokens > vtensor.num_tokens) {
    throw std::invalid_argument("truncate to " + std::to_string(num_tokens) +
                                " tokens, but the vTensor has only " +
                                std::to_string(vtensor.num_tokens));
  }
  const bool rewrites_shared =
      num_tokens < vtensor.frozen_tokens || pool_.geometry.full_rows(num_tokens) < vtensor.own_row;
  if (rewrites_shared) {
    const size_t keep_rows = pool_.geometry.rows_for(num_tokens);
    if (pool_.vset[vtensor.slot].num_views > 0 &&
        keep_rows < pool_.vset.mapped_rows(vtensor.slot)) {
      throw std::invalid_argument("truncate to " + std::to_string(num_tokens) +
                                  " tokens gives up memory that others share, but tensor views of "
                                  "the vTensor are alive; drop them first");
    }
    shrink_slot(vtensor.slot, keep_rows);
    stamp(vtensor);
    vtensor.own_row = pool_.geometry.full_rows(num_tokens);
    vtensor.tail_shared = vtensor.own_row < pool_.geometry.rows_for(num_tokens);
    vtensor.frozen_tokens = num_tokens;
  }
  vtensor.num_tokens = num_tokens;
  update_write_limit(vtensor);
}

size_t Scheduler::record_prefix(VTensorId id, std::span<const Token> tokens) {
  VTensor& vtensor = resident(id);
  if (tokens.size() > vtensor.num_tokens) {
    throw std::invalid_argument("record_prefix of " + std::to_string(tokens.size()) +
                                " tokens, but the vTensor has only " +
                                std::to_string(vtensor.num_tokens));
  }
  vtensor.frozen_tokens = std::max(vtensor.frozen_tokens, tokens.size());
  return r_push(pool_, vtensor.salt, tokens, vtensor.slot);
}

}  // namespace vtensor
