// OffsetAllocator: hands out byte extents of one address space (the host driver's memfd).
//
// Not thread-safe; the owner locks.
//
// Invariants:
//  1. Free extents are disjoint, non-empty and never adjacent (they coalesce).
//  2. take() returns the lowest offset that fits, so that chunks created one after the other are
//     consecutive: such chunks map in one call and merge into one mapping.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

namespace vtensor {

class OffsetAllocator {
 public:
  explicit OffsetAllocator(size_t space_bytes);

  // Lowest free offset that is a multiple of `alignment_bytes`, or nothing when none fits.
  std::optional<uint64_t> take(size_t size_bytes, size_t alignment_bytes);

  // REQUIRES: the extent was taken and is given back once.
  void give_back(uint64_t offset, size_t size_bytes);

  size_t num_free_extents() const noexcept { return free_.size(); }

 private:
  std::map<uint64_t, uint64_t> free_;  // offset -> end
};

}  // namespace vtensor
