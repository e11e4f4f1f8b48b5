#include "vtensor/pool/vset.h"

#include <algorithm>
#include <bit>

namespace vtensor {
namespace {

// Arenas start at a multiple of a huge page, so that 2 MiB chunks can be mapped by one PMD entry.
size_t arena_alignment(const Driver& driver) { return std::max(driver.granularity(), 2 * kMiB); }

}  // namespace

const char* to_string(SlotState state) {
  switch (state) {
    case SlotState::kFree:
      return "free";
    case SlotState::kLive:
      return "live";
    case SlotState::kParked:
      return "parked";
    case SlotState::kHeld:
      return "held";
    case SlotState::kRetiring:
      return "retiring";
    case SlotState::kBroken:
      return "broken";
  }
  return "unknown";
}

VSet::VSet(Driver& driver, const Geometry& geometry)
    : driver_(driver), geometry_(geometry), slots_(geometry.max_slots) {
  reserved_bytes();  // throws on overflow
  bases_.reserve(geometry_.planes.size());
  try {
    while (bases_.size() < geometry_.planes.size()) {
      bases_.push_back(driver_.reserve(arena_bytes(bases_.size()), arena_alignment(driver_)));
    }
  } catch (...) {
    for (size_t i = 0; i < bases_.size(); ++i) driver_.free(bases_[i], arena_bytes(i));
    throw;
  }
  for (size_t plane = 0; plane < bases_.size(); ++plane) {
    const size_t num_columns = geometry_.planes[plane].num_columns;
    for (size_t idx = 0; idx < num_columns; ++idx) {
      places_.push_back({bases_[plane] + idx * geometry_.chunk_bytes, slot_stride_bytes(plane),
                         num_columns * geometry_.chunk_bytes});
    }
  }
  for (SlotId slot = 0; slot < slots_.size(); ++slot) free_.insert(slot);
}

VSet::~VSet() {
  for (size_t plane = 0; plane < bases_.size(); ++plane) {
    try {
      driver_.free(bases_[plane], arena_bytes(plane));
    } catch (const std::exception&) {
      // A destructor has nobody to tell; the range stays reserved until the process ends.
    }
  }
}

size_t VSet::slot_stride_bytes(size_t plane) const {
  return checked_mul(geometry_.slot_stride_bytes(), geometry_.planes[plane].num_columns,
                     "the arena of one plane");
}

size_t VSet::arena_bytes(size_t plane) const {
  return checked_mul(slot_stride_bytes(plane), geometry_.max_slots, "the arena of one plane");
}

size_t VSet::reserved_bytes() const {
  const size_t per_column =
      checked_mul(geometry_.slot_stride_bytes(), geometry_.max_slots, "the arena of one plane");
  return checked_mul(per_column, geometry_.row_chunks, "the arena");
}

SlotId VSet::take_free() {
  const SlotId slot = free_.pop_lowest();
  slots_[slot].state = SlotState::kLive;
  ++slots_[slot].generation;
  return slot;
}

void VSet::make_live(SlotId slot) {
  if (slots_[slot].state == SlotState::kParked) parked_.remove(slot);
  slots_[slot].state = SlotState::kLive;
  ++slots_[slot].generation;
}

void VSet::park(SlotId slot) {
  slots_[slot].state = SlotState::kParked;
  parked_.push_back(slot);
}

void VSet::hold(SlotId slot) { slots_[slot].state = SlotState::kHeld; }

void VSet::retire(SlotId slot) { slots_[slot].state = SlotState::kRetiring; }

void VSet::make_broken(SlotId slot) {
  if (slots_[slot].state == SlotState::kParked) parked_.remove(slot);
  slots_[slot].state = SlotState::kBroken;
}

void VSet::make_free(SlotId slot) {
  if (slots_[slot].state == SlotState::kParked) parked_.remove(slot);
  slots_[slot].state = SlotState::kFree;
  free_.insert(slot);
}

}  // namespace vtensor
