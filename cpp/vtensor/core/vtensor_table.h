// VTensorTable: the vTensors that are alive, by slot, and the rows behind each: who may write them,
// how far they are written, and taking them away.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "vtensor/core/core_state.h"
#include "vtensor/core/vtensor.h"

namespace vtensor {

// The number under which chunks remember a cache salt.
uint64_t tenant_of(const std::string& salt);

class VTensorTable {
 public:
  explicit VTensorTable(CoreState& state)
      : state_(state), pool_(state.pool), vtensors_(state.pool.vset.num_slots()) {}

  // Throws ReleasedError for a vTensor of the past, std::out_of_range for an id never given out.
  VTensor& live(VTensorId id);
  const VTensor& live(VTensorId id) const { return const_cast<VTensorTable*>(this)->live(id); }
  // As live(), and std::invalid_argument for one that is swapped out.
  VTensor& resident(VTensorId id);
  const VTensor& live_in(SlotId slot) const { return vtensors_[slot]; }  // Requires: slot is live.
  // Requires: the id is live. No check: the fast path of a decode step.
  VTensor& known(VTensorId id) { return vtensors_[id % vtensors_.size()]; }
  bool is_live(VTensorId id) const;
  // nullptr where it is not. As live(), it divides once: what a decode step asks of each request.
  VTensor* find(VTensorId id);
  std::vector<VTensorId> live_ids() const;

  // A blank vTensor in a slot that has just become live.
  VTensor& begin(SlotId slot, const std::string& salt);

  std::vector<Handle> handles(SlotId slot, size_t first_row, size_t end_row) const;
  void update_write_limit(VTensor& vtensor) const;
  // Makes the vTensor the appender of rows [first_row, end_row).
  void own_rows(VTensor& vtensor, size_t first_row, size_t end_row);
  // Ends the vTensor's appender roles from `first_row` on and leaves its watermarks in the chunks.
  // While views are alive, what they may show counts as written: nobody goes on below it.
  void record_watermark(const VTensor& vtensor, size_t first_row = 0);
  // Unmaps all rows from keep_rows on and drops their references. What a live vTensor wrote there
  // is noted first: a chunk that becomes free must be known to be dirty.
  void shrink(SlotId slot, size_t keep_rows);
  // Rows below `end_row` are full and never written again: ends the vTensor's roles there.
  void freeze_rows(VTensor& vtensor, size_t end_row);
  // Ends its role in `row`, or in one entry of its page table, alone, and leaves its watermark
  // there, as record_watermark() does.
  void leave_row(const VTensor& vtensor, size_t row);
  void leave_entry(const VTensor& vtensor, size_t entry);
  // Leading rows of a window's planes that have been given back.
  size_t rows_forgotten(SlotId slot, const Window& window) const;
  // Sets VTensor::forget_at.
  void update_forget_at(VTensor& vtensor) const;

  // Maps the rows below `end_row` copy-on-write: see shield.h. Requires: the driver can.
  void guard(SlotId slot, size_t end_row);
  // Maps them as all others again; what was written to them meanwhile is gone.
  void unguard(SlotId slot);
  // Rows from `first_row` on have been unmapped or remapped.
  void forget_guard(SlotId slot, size_t first_row);

  // Parks a slot. Its chunks count as idle unless something else uses them.
  void park(SlotId slot);
  // Before a slot that may be parked changes its state: its chunks are in use again.
  void unpark(SlotId slot);
  // Nobody knows what is mapped in the slot: it is not used until it is repaired, and what may be
  // mapped there (its table and `chunks`) stays referenced, so that nobody else writes to it.
  void break_slot(SlotId slot, std::span<const ChunkId> chunks);
  // Unmaps whatever broken slots may map, so that they are free again. What the driver still
  // refuses, what views show and what an open step may read stays broken. Returns repaired slots.
  size_t repair_broken();
  size_t num_broken() const { return num_broken_; }

 private:
  bool repair(SlotId slot);
  VTensorId id_of(SlotId slot) const;

  CoreState& state_;
  Pool& pool_;
  size_t num_broken_ = 0;
  std::vector<VTensor> vtensors_;  // by slot; of the past where the slot is not live
};

}  // namespace vtensor
