// VSet, the paper's vSet: the virtual ranges of the arena, one slot per vTensor, and what is mapped
// in each. One arena a plane, so that a batched kernel sees one tensor [slots, max_tokens, ...]:
//
//   plane p   | slot 0 ........ | slot 1 ........ | ...     slot i starts at base(p) + i * stride
//
// A slot is free (nothing mapped), live (a vTensor's), parked (released, still mapped: the next
// vTensor adopts it), held (released, but tensor views of it are alive), retiring (released, but a
// running step may still read it) or broken (a driver call
// failed and could not be undone: never used again, its chunks stay referenced).
//
// Thread-safety: none; the manager's mutex guards it.
//
// Invariants:
//  1. each plane of a slot is mapped on a prefix of rows, never with holes, but for the rows at its
//     head that a window has left (kNoChunk in the page table): the page table of a slot has
//     exactly mapped_rows x row_chunks entries, row-major over columns;
//  2. a free slot has an empty page table; parked_ holds exactly the parked slots, oldest first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <vector>

#include "vtensor/driver/driver.h"
#include "vtensor/pool/geometry.h"
#include "vtensor/pool/pset.h"
#include "vtensor/util/id_set.h"

namespace vtensor {

using SlotId = uint32_t;

enum class SlotState { kFree, kLive, kParked, kHeld, kRetiring, kBroken };
const char* to_string(SlotState state);

struct Slot {
  SlotState state = SlotState::kFree;
  std::vector<ChunkId> table;  // [row * row_chunks + column]
  size_t num_views = 0;        // exported tensor views that are alive
  size_t guarded_rows = 0;     // leading rows that are mapped copy-on-write; see core/shield.h
  uint64_t generation = 0;     // counts the vTensors that lived here
};

class VSet {
 public:
  // Reserves the arenas of all planes. On failure nothing stays reserved.
  VSet(Driver& driver, const Geometry& geometry);
  ~VSet();
  VSet(const VSet&) = delete;
  VSet& operator=(const VSet&) = delete;

  Slot& operator[](SlotId id) { return slots_[id]; }
  const Slot& operator[](SlotId id) const { return slots_[id]; }
  size_t num_slots() const { return slots_.size(); }
  size_t num_free() const { return free_.size(); }
  bool is_free(SlotId slot) const { return free_.contains(slot); }
  const std::list<SlotId>& parked() const { return parked_; }  // least recently parked first
  size_t reserved_bytes() const;

  uintptr_t address(size_t column, SlotId slot, size_t row) const {
    const Place& place = places_[column];
    return place.base + slot * place.slot_stride_bytes + row * place.row_stride_bytes;
  }
  uintptr_t base(size_t plane, SlotId slot) const {
    return address(geometry_.planes[plane].first_column, slot, 0);
  }
  size_t slot_stride_bytes(size_t plane) const;
  size_t mapped_rows(SlotId slot) const { return slots_[slot].table.size() / geometry_.row_chunks; }

  // Moves between states. take_free() requires num_free() > 0.
  SlotId take_free();
  void make_live(SlotId slot);
  void park(SlotId slot);
  void hold(SlotId slot);
  void retire(SlotId slot);
  void make_free(SlotId slot);  // Requires: an empty page table.
  void make_broken(SlotId slot);

 private:
  // Where a column's chunks go: slot 0, row 0, and how far the next ones are.
  struct Place {
    uintptr_t base = 0;
    size_t slot_stride_bytes = 0;
    size_t row_stride_bytes = 0;
  };

  size_t arena_bytes(size_t plane) const;

  Driver& driver_;
  Geometry geometry_;
  std::vector<Place> places_;     // by column
  std::vector<uintptr_t> bases_;  // one arena a plane
  std::vector<Slot> slots_;
  IdSet free_;
  std::list<SlotId> parked_;
};

}  // namespace vtensor
