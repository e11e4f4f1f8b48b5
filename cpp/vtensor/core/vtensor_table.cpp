#include "vtensor/core/vtensor_table.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "vtensor/ops/mapping.h"
#include "vtensor/util/error.h"

namespace vtensor {

uint64_t tenant_of(const std::string& salt) { return std::hash<std::string>{}(salt); }

// An id names its slot and the generation of the slot, so that a lookup is one division and a
// stale id is told from a foreign one.
VTensorId VTensorTable::id_of(SlotId slot) const {
  return pool_.vset[slot].generation * pool_.vset.num_slots() + slot;
}

bool VTensorTable::is_live(VTensorId id) const {
  const auto slot = static_cast<SlotId>(id % pool_.vset.num_slots());
  return pool_.vset[slot].state == SlotState::kLive && vtensors_[slot].id == id;
}

VTensor* VTensorTable::find(VTensorId id) {
  const auto slot = static_cast<SlotId>(id % pool_.vset.num_slots());
  const bool is_live = vtensors_[slot].id == id && pool_.vset[slot].state == SlotState::kLive;
  return is_live ? &vtensors_[slot] : nullptr;
}

VTensor& VTensorTable::live(VTensorId id) {
  const auto slot = static_cast<SlotId>(id % pool_.vset.num_slots());
  if (is_live(id)) return vtensors_[slot];
  if (id == kNoVTensor || id > id_of(slot)) {
    throw std::out_of_range("no vTensor has id " + std::to_string(id) + " in this manager");
  }
  throw ReleasedError("vTensor " + std::to_string(id) + " has been released");
}

VTensor& VTensorTable::resident(VTensorId id) {
  VTensor& vtensor = live(id);
  if (vtensor.is_swapped) {
    throw std::invalid_argument("vTensor " + std::to_string(id) +
                                " is swapped out; swap it in first");
  }
  return vtensor;
}

std::vector<VTensorId> VTensorTable::live_ids() const {
  std::vector<VTensorId> ids;
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    if (pool_.vset[slot].state == SlotState::kLive) ids.push_back(vtensors_[slot].id);
  }
  return ids;
}

void VTensorTable::update_write_limit(VTensor& vtensor) const {
  const size_t rows = pool_.vset.mapped_rows(vtensor.slot);
  const size_t mapped = std::min(pool_.geometry.tokens_in(rows), pool_.geometry.max_tokens);
  vtensor.write_limit = vtensor.last_row_shared ? vtensor.num_tokens : mapped;
}

void VTensorTable::own_rows(VTensor& vtensor, size_t first_row, size_t end_row) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  for (size_t i = first_row * row_chunks; i < end_row * row_chunks; ++i) {
    if (table[i] == kNoChunk) continue;
    Chunk& chunk = pool_.pset[table[i]];
    chunk.appender = vtensor.id;
    chunk.tenant = vtensor.tenant;
    chunk.written_bytes = 0;
  }
}

void VTensorTable::record_watermark(const VTensor& vtensor, size_t first_row) {
  const size_t rows = pool_.vset.mapped_rows(vtensor.slot);
  for (size_t row = std::max(vtensor.first_owned_row, first_row); row < rows; ++row) {
    leave_row(vtensor, row);
  }
}

void VTensorTable::leave_row(const VTensor& vtensor, size_t row) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  for (size_t i = row * row_chunks; i < (row + 1) * row_chunks; ++i) leave_entry(vtensor, i);
}

void VTensorTable::leave_entry(const VTensor& vtensor, size_t entry) {
  const Slot& slot = pool_.vset[vtensor.slot];
  if (slot.table[entry] == kNoChunk) return;
  Chunk& chunk = pool_.pset[slot.table[entry]];
  if (chunk.appender != vtensor.id) return;
  const size_t written_tokens = slot.num_views > 0 ? vtensor.peak_tokens : vtensor.num_tokens;
  chunk.appender = kNoVTensor;
  chunk.written_bytes = pool_.geometry.bytes_used(entry, written_tokens);
  chunk.dirty_bytes =
      std::max(chunk.dirty_bytes, pool_.geometry.bytes_used(entry, vtensor.peak_tokens));
}

size_t VTensorTable::rows_forgotten(SlotId slot, const Window& window) const {
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  size_t low = 0;
  for (size_t high = pool_.vset.mapped_rows(slot); low < high;) {
    const size_t middle = (low + high) / 2;
    const bool gone = table[middle * pool_.geometry.row_chunks + window.first_column] == kNoChunk;
    (gone ? low : high) = gone ? middle + 1 : middle;
  }
  return low;
}

void VTensorTable::update_forget_at(VTensor& vtensor) const {
  const Geometry& geometry = pool_.geometry;
  vtensor.forget_at = SIZE_MAX;
  for (const Window& window : geometry.windows) {
    const size_t row = rows_forgotten(vtensor.slot, window) + 1;
    const size_t token = ceil_div(row * geometry.chunk_bytes, geometry.token_bytes);
    vtensor.forget_at = std::min(vtensor.forget_at, token + window.num_tokens - 1);
  }
}

VTensor& VTensorTable::begin(SlotId slot, const std::string& salt) {
  VTensor& vtensor = vtensors_[slot];
  vtensor = VTensor{};
  vtensor.id = id_of(slot);
  vtensor.slot = slot;
  vtensor.salt = salt;
  vtensor.tenant = tenant_of(salt);
  return vtensor;
}

std::vector<Handle> VTensorTable::handles(SlotId slot, size_t first_row, size_t end_row) const {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  std::vector<Handle> found;
  found.reserve((end_row - first_row) * row_chunks);
  for (size_t i = first_row * row_chunks; i < end_row * row_chunks; ++i) {
    found.push_back(pool_.pset.handle(table[i]));
  }
  return found;
}

void VTensorTable::freeze_rows(VTensor& vtensor, size_t end_row) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  for (size_t i = vtensor.first_owned_row * row_chunks; i < end_row * row_chunks; ++i) {
    if (table[i] == kNoChunk) continue;
    Chunk& chunk = pool_.pset[table[i]];
    if (chunk.appender != vtensor.id) continue;
    chunk.appender = kNoVTensor;
    chunk.written_bytes = chunk.dirty_bytes = static_cast<uint32_t>(pool_.geometry.chunk_bytes);
  }
  vtensor.first_owned_row = std::max(vtensor.first_owned_row, end_row);
}

void VTensorTable::guard(SlotId slot, size_t end_row) {
  Slot& entry = pool_.vset[slot];
  const size_t end = std::min(end_row, pool_.vset.mapped_rows(slot));
  if (end <= entry.guarded_rows) return;
  try {
    set_access(*pool_.driver, {pool_.vset, pool_.geometry, slot, entry.guarded_rows},
               handles(slot, entry.guarded_rows, end), Access::kReadWrite, Access::kCopyOnWrite);
  } catch (const BrokenMapping&) {
    break_slot(slot, {});
    throw;
  }
  entry.guarded_rows = end;
}

void VTensorTable::unguard(SlotId slot) {
  Slot& entry = pool_.vset[slot];
  if (entry.guarded_rows == 0) return;
  try {
    set_access(*pool_.driver, {pool_.vset, pool_.geometry, slot, 0},
               handles(slot, 0, entry.guarded_rows), Access::kCopyOnWrite, Access::kReadWrite);
  } catch (const BrokenMapping&) {
    break_slot(slot, {});
    throw;
  }
  entry.guarded_rows = 0;
}

void VTensorTable::forget_guard(SlotId slot, size_t first_row) {
  Slot& entry = pool_.vset[slot];
  entry.guarded_rows = std::min(entry.guarded_rows, first_row);
}

void VTensorTable::park(SlotId slot) {
  pool_.vset.park(slot);
  for (const ChunkId id : pool_.vset[slot].table) pool_.pset.add_parked_ref(id);
}

void VTensorTable::unpark(SlotId slot) {
  if (pool_.vset[slot].state != SlotState::kParked) return;
  for (const ChunkId id : pool_.vset[slot].table) pool_.pset.drop_parked_ref(id);
}

void VTensorTable::break_slot(SlotId slot, std::span<const ChunkId> chunks) {
  unpark(slot);
  if (pool_.vset[slot].state == SlotState::kLive) record_watermark(vtensors_[slot]);
  for (const ChunkId id : chunks) {
    pool_.pset.add_table_ref(id);
    pool_.vset[slot].table.push_back(id);
  }
  num_broken_ += pool_.vset[slot].state == SlotState::kBroken ? 0 : 1;
  pool_.vset.make_broken(slot);
}

size_t VTensorTable::repair_broken() {
  if (num_broken_ == 0 || state_.epochs.is_open()) return 0;
  state_.epochs.wait();
  const size_t before = num_broken_;
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) {
    const Slot& entry = pool_.vset[slot];
    if (entry.state != SlotState::kBroken || entry.num_views > 0) continue;
    if (!repair(slot)) break;  // the driver fails still
  }
  return before - num_broken_;
}

// Chunk by chunk, since nobody knows which are mapped. The table names each of them at least once.
bool VTensorTable::repair(SlotId slot) {
  const Geometry& geometry = pool_.geometry;
  std::vector<ChunkId>& table = pool_.vset[slot].table;
  const size_t rows = std::min(ceil_div(table.size(), geometry.row_chunks), geometry.max_rows());
  for (size_t i = 0; i < rows * geometry.row_chunks; ++i) {
    const size_t row = i / geometry.row_chunks;
    try {
      pool_.driver->unmap(pool_.vset.address(i % geometry.row_chunks, slot, row),
                          geometry.chunk_bytes, geometry.chunk_bytes);
    } catch (const std::invalid_argument&) {
      continue;  // nothing is mapped there
    } catch (const std::exception&) {
      return false;
    }
  }
  p_free(pool_, table);
  table.clear();
  forget_guard(slot, 0);
  pool_.vset.make_free(slot);
  --num_broken_;
  return true;
}

void VTensorTable::shrink(SlotId slot, size_t keep_rows) {
  const size_t rows = pool_.vset.mapped_rows(slot);
  if (rows <= keep_rows) return;
  if (pool_.vset[slot].state == SlotState::kLive) state_.epochs.wait();
  try {
    unmap(*pool_.driver, {pool_.vset, pool_.geometry, slot, keep_rows},
          handles(slot, keep_rows, rows));
  } catch (const BrokenMapping&) {
    break_slot(slot, {});
    throw;
  }
  if (pool_.vset[slot].state == SlotState::kLive) record_watermark(vtensors_[slot], keep_rows);
  std::vector<ChunkId>& table = pool_.vset[slot].table;
  forget_guard(slot, keep_rows);
  const auto dropped =
      std::span<const ChunkId>(table).subspan(keep_rows * pool_.geometry.row_chunks);
  if (pool_.vset[slot].state == SlotState::kParked) {
    for (const ChunkId id : dropped) pool_.pset.drop_parked_ref(id);
  }
  p_free(pool_, dropped);
  table.resize(keep_rows * pool_.geometry.row_chunks);
}

}  // namespace vtensor
