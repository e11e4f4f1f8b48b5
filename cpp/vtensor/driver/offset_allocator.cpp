#include "vtensor/driver/offset_allocator.h"

#include <iterator>

#include "vtensor/util/units.h"

namespace vtensor {

OffsetAllocator::OffsetAllocator(size_t space_bytes) {
  if (space_bytes > 0) free_.emplace(0, space_bytes);
}

std::optional<uint64_t> OffsetAllocator::take(size_t size_bytes, size_t alignment_bytes) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [begin, end] = *it;
    const uint64_t offset = round_up(begin, alignment_bytes);
    if (offset > end || end - offset < size_bytes) continue;
    if (offset + size_bytes < end) free_.emplace(offset + size_bytes, end);
    if (begin < offset) {
      it->second = offset;
    } else {
      free_.erase(it);
    }
    return offset;
  }
  return std::nullopt;
}

void OffsetAllocator::give_back(uint64_t offset, size_t size_bytes) {
  uint64_t end = offset + size_bytes;
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && next->first == end) {
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin() && std::prev(next)->second == offset) {
    std::prev(next)->second = end;
  } else {
    free_.emplace_hint(next, offset, end);
  }
}

}  // namespace vtensor
