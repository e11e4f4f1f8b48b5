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
  const size_t arena_bytes = reserved_bytes() / geometry_.num_planes;
  bases_.reserve(geometry_.num_planes);
  try {
    while (bases_.size() < geometry_.num_planes) {
      bases_.push_back(driver_.reserve(arena_bytes, arena_alignment(driver_)));
    }
  } catch (...) {
    for (const uintptr_t base : bases_) driver_.free(base, arena_bytes);
    throw;
  }
  for (SlotId slot = 0; slot < slots_.size(); ++slot) free_.insert(slot);
}

VSet::~VSet() {
  const size_t arena_bytes = reserved_bytes() / geometry_.num_planes;
  for (const uintptr_t base : bases_) {
    try {
      driver_.free(base, arena_bytes);
    } catch (const std::exception&) {
      // A destructor has nobody to tell; the range stays reserved until the process ends.
    }
  }
}

size_t VSet::reserved_bytes() const {
  const size_t per_plane =
      checked_mul(geometry_.slot_stride_bytes(), geometry_.max_slots, "the arena of one plane");
  return checked_mul(per_plane, geometry_.num_planes, "the arena");
}

uintptr_t VSet::address(size_t plane, SlotId slot, size_t row) const {
  return bases_[plane] + slot * geometry_.slot_stride_bytes() + row * geometry_.chunk_bytes;
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
