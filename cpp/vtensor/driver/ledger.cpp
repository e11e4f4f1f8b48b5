#include "vtensor/driver/ledger.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <stdexcept>
#include <string>

#include "vtensor/util/text.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

uint64_t number(Handle handle) { return static_cast<uint64_t>(handle); }

[[noreturn]] void refuse(const std::string& text) { throw std::invalid_argument(text); }

}  // namespace

void Ledger::require_range_shape(size_t size_bytes, size_t alignment_bytes) const {
  if (size_bytes == 0 || size_bytes % granularity_bytes_ != 0) {
    refuse("size_bytes must be a positive multiple of " + std::to_string(granularity_bytes_) +
           ": " + std::to_string(size_bytes));
  }
  if (!std::has_single_bit(alignment_bytes) || alignment_bytes < granularity_bytes_) {
    refuse("alignment_bytes must be a power of two, at least " +
           std::to_string(granularity_bytes_) + ": " + std::to_string(alignment_bytes));
  }
}

void Ledger::require_chunk_shape(size_t chunk_bytes) const {
  if (chunk_bytes == 0 || chunk_bytes % granularity_bytes_ != 0) {
    refuse("chunk_bytes must be a positive multiple of " + std::to_string(granularity_bytes_) +
           ": " + std::to_string(chunk_bytes));
  }
  if (chunk_bytes_ != 0 && chunk_bytes != chunk_bytes_) {
    refuse("chunk_bytes is " + std::to_string(chunk_bytes) + ", but this driver's chunks have " +
           std::to_string(chunk_bytes_) + " bytes, as the first one");
  }
}

void Ledger::add_range(uintptr_t addr, size_t size_bytes) {
  ranges_.emplace(addr, size_bytes);
  ++num_mappings_;
}

void Ledger::remove_range(uintptr_t addr, size_t size_bytes) {
  const auto range = ranges_.find(addr);
  if (range == ranges_.end() || range->second != size_bytes) {
    refuse("not a reserved range: " + span_text(addr, size_bytes));
  }
  const auto segment = segments_.lower_bound(addr);
  if (segment != segments_.end() && segment->first < addr + size_bytes) {
    refuse("range " + span_text(addr, size_bytes) + " still has chunks mapped at " +
           hex_text(segment->first));
  }
  ranges_.erase(range);
  --num_mappings_;
}

Handle Ledger::add_chunk(size_t chunk_bytes) {
  require_chunk_shape(chunk_bytes);
  chunk_bytes_ = chunk_bytes;
  if (free_.empty()) {
    free_.insert(static_cast<uint32_t>(num_maps_.size()));
    num_maps_.push_back(kGone);
  }
  const uint32_t place = free_.pop_lowest();
  num_maps_[place] = 0;
  return Handle{place * chunk_bytes};
}

void Ledger::add_chunk_at(Handle handle, size_t chunk_bytes) {
  require_chunk_shape(chunk_bytes);
  chunk_bytes_ = chunk_bytes;
  num_maps_at_.emplace(number(handle), 0);
}

void Ledger::begin_release(Handle handle, size_t chunk_bytes) {
  require_chunk_shape(chunk_bytes);
  if (const uint32_t count = num_maps(handle); count > 0) {
    refuse("chunk " + hex_text(number(handle)) + " is still mapped " + std::to_string(count) +
           " times");
  }
  *find_maps(number(handle)) = kGone;
}

void Ledger::finish_release(Handle handle) {
  if (num_maps_at_.erase(number(handle)) > 0) return;
  free_.insert(static_cast<uint32_t>(number(handle) / chunk_bytes_));
}

void Ledger::undo_release(Handle handle) noexcept { *find_maps(number(handle)) = 0; }

void Ledger::require_bytes(Handle handle, size_t offset_bytes, size_t size_bytes) const {
  num_maps(handle);  // throws when there is no such chunk
  if (offset_bytes > chunk_bytes_ || size_bytes > chunk_bytes_ - offset_bytes) {
    refuse("bytes " + std::to_string(offset_bytes) + " + " + std::to_string(size_bytes) +
           " leave a chunk of " + std::to_string(chunk_bytes_) + " bytes");
  }
}

std::optional<Handle> Ledger::mapped_at(uintptr_t addr) const {
  const auto above = segments_.upper_bound(addr);
  if (above == segments_.begin() || std::prev(above)->second.end() <= addr) return std::nullopt;
  const Run& run = std::prev(above)->second;
  return Handle{run.offset + (addr - run.addr) / chunk_bytes_ * chunk_bytes_};
}

std::vector<Ledger::Run> Ledger::runs() const {
  std::vector<Run> all;
  for (const auto& [addr, run] : segments_) all.push_back(run);
  return all;
}

void Ledger::map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) {
  require_chunk_shape(chunk_bytes);
  if (handles.empty()) return;
  const size_t size_bytes = checked_mul(handles.size(), chunk_bytes, "map size");
  const Span range = range_around(addr, size_bytes);
  const uintptr_t end = addr + size_bytes;
  for (const Handle handle : handles) num_maps(handle);  // throws when there is no such chunk
  const auto above = segments_.lower_bound(addr);
  if (above != segments_.end() && above->first < end) {
    refuse("chunks are already mapped at " + hex_text(above->first));
  }
  if (above != segments_.begin() && std::prev(above)->second.end() > addr) {
    refuse("chunks are already mapped at " + hex_text(addr));
  }
  recount(range, addr, end, [&] {
    for (size_t i = 0; i < handles.size();) {
      Run run{addr + i * chunk_bytes, number(handles[i]), 0, Access::kNone};
      do {
        run.size_bytes += chunk_bytes;
        ++i;
      } while (i < handles.size() && number(handles[i]) == run.offset + run.size_bytes);
      count_maps(run, true);
      insert(range, run);
    }
  });
}

std::vector<Ledger::Run> Ledger::set_access(uintptr_t addr, size_t size_bytes, Access access) {
  if (size_bytes == 0) return {};
  const Span range = range_around(addr, size_bytes);
  require_covered(addr, size_bytes);
  std::vector<Run> before;
  recount(range, addr, addr + size_bytes, [&] {
    before = carve(addr, addr + size_bytes);
    for (Run run : before) {
      run.access = access;
      insert(range, run);
    }
  });
  return before;
}

std::vector<Ledger::Run> Ledger::unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) {
  require_chunk_shape(chunk_bytes);
  if (size_bytes == 0) return {};
  const Span range = range_around(addr, size_bytes);
  require_covered(addr, size_bytes);
  std::vector<Run> before;
  recount(range, addr, addr + size_bytes, [&] { before = carve(addr, addr + size_bytes); });
  for (const Run& run : before) count_maps(run, false);
  return before;
}

void Ledger::undo_set_access(std::span<const Run> before) {
  for (const Run& run : before) set_access(run.addr, run.size_bytes, run.access);
}

void Ledger::undo_unmap(std::span<const Run> before) {
  for (const Run& run : before) {
    const Span range = range_around(run.addr, run.size_bytes);
    recount(range, run.addr, run.end(), [&] { insert(range, run); });
    count_maps(run, true);
  }
}

// The reserved range that holds all of [addr, addr + size).
Ledger::Span Ledger::range_around(uintptr_t addr, size_t size_bytes) const {
  const auto above = ranges_.upper_bound(addr);
  if (above != ranges_.begin()) {
    const auto& [begin, range_bytes] = *std::prev(above);
    if (size_bytes <= range_bytes && addr - begin <= range_bytes - size_bytes) {
      if ((addr - begin) % granularity_bytes_ != 0) {
        refuse("address is not a multiple of the granularity: " + hex_text(addr));
      }
      return {begin, begin + range_bytes};
    }
  }
  refuse("not inside one reserved range: " + span_text(addr, size_bytes));
}

bool Ledger::continues(const Run& first, const Run& second) const {
  return first.end() == second.addr && first.offset + first.size_bytes == second.offset &&
         first.access == second.access;
}

// How often the chunk is mapped; nullptr: there never was one of that number.
uint32_t* Ledger::find_maps(uint64_t offset) {
  if (const auto at = num_maps_at_.find(offset); at != num_maps_at_.end()) return &at->second;
  const bool known =
      chunk_bytes_ != 0 && offset % chunk_bytes_ == 0 && offset / chunk_bytes_ < num_maps_.size();
  return known ? &num_maps_[offset / chunk_bytes_] : nullptr;
}

// The same. Throws when there is no such chunk.
uint32_t Ledger::num_maps(Handle handle) const {
  const uint32_t* count = const_cast<Ledger*>(this)->find_maps(number(handle));
  if (count == nullptr || *count == kGone) {
    refuse("unknown or released chunk " + hex_text(number(handle)));
  }
  return *count;
}

// [addr, addr + size) is mapped without holes and begins and ends between chunks.
void Ledger::require_covered(uintptr_t addr, size_t size_bytes) const {
  const uintptr_t end = addr + size_bytes;
  auto it = segments_.upper_bound(addr);
  if (it != segments_.begin()) --it;
  for (uintptr_t cursor = addr; cursor < end; ++it) {
    if (it == segments_.end() || it->first > cursor || it->second.end() <= cursor) {
      refuse("no chunk is mapped at " + hex_text(cursor));
    }
    const Run& run = it->second;
    const uintptr_t stop = std::min(end, run.end());
    if ((cursor - run.addr) % chunk_bytes_ != 0 || (stop - run.addr) % chunk_bytes_ != 0) {
      refuse("not whole chunks: " + span_text(addr, size_bytes));
    }
    cursor = stop;
  }
}

// Takes all segments of [addr, end) out. REQUIRES: require_covered.
std::vector<Ledger::Run> Ledger::carve(uintptr_t addr, uintptr_t end) {
  split(addr);
  split(end);
  const auto first = segments_.lower_bound(addr);
  const auto last = segments_.lower_bound(end);
  std::vector<Run> runs;
  for (auto it = first; it != last; ++it) runs.push_back(it->second);
  segments_.erase(first, last);
  return runs;
}

// Makes `addr` a segment boundary if a segment contains it.
void Ledger::split(uintptr_t addr) {
  auto it = segments_.lower_bound(addr);
  if (it == segments_.begin()) return;
  Run& low = std::prev(it)->second;
  if (low.end() <= addr) return;
  Run high = low;
  low.size_bytes = addr - low.addr;
  high.addr = addr;
  high.offset += low.size_bytes;
  high.size_bytes -= low.size_bytes;
  segments_.emplace_hint(it, addr, high);
}

void Ledger::insert(Span range, const Run& run) {
  auto it = segments_.emplace(run.addr, run).first;
  if (const auto next = std::next(it);
      next != segments_.end() && next->first < range.end && continues(it->second, next->second)) {
    it->second.size_bytes += next->second.size_bytes;
    segments_.erase(next);
  }
  if (it != segments_.begin() && it->first > range.begin &&
      continues(std::prev(it)->second, it->second)) {
    std::prev(it)->second.size_bytes += it->second.size_bytes;
    segments_.erase(it);
  }
}

void Ledger::count_maps(const Run& run, bool add) {
  for (size_t done = 0; done < run.size_bytes; done += chunk_bytes_) {
    *find_maps(run.offset + done) += add ? 1U : -1U;
  }
}

// The part of `range` whose mappings a change of [addr, end) can split or join: out to the far
// edge of the segment on either side, which stays an edge.
Ledger::Span Ledger::surroundings(Span range, uintptr_t addr, uintptr_t end) const {
  Span span = range;
  const auto at = segments_.lower_bound(addr);
  if (at != segments_.begin()) span.begin = std::max(span.begin, std::prev(at)->first);
  auto next = segments_.lower_bound(end);
  if (next != segments_.begin() && std::prev(next)->second.end() > end) --next;
  if (next != segments_.end()) span.end = std::min(span.end, next->second.end());
  return span;
}

size_t Ledger::count_mappings(Span span) const {
  size_t count = 0;
  uintptr_t cursor = span.begin;
  for (auto it = segments_.lower_bound(span.begin); it != segments_.end() && it->first < span.end;
       ++it) {
    count += it->first > cursor ? 2 : 1;  // the gap before it, and itself
    cursor = it->second.end();
  }
  return cursor < span.end ? count + 1 : count;
}

// Runs `change`, which touches only [addr, end), and brings num_mappings_ up to date.
template <class Change>
void Ledger::recount(Span range, uintptr_t addr, uintptr_t end, Change&& change) {
  const Span span = surroundings(range, addr, end);
  const size_t before = count_mappings(span);
  change();
  num_mappings_ = num_mappings_ + count_mappings(span) - before;
}

}  // namespace vtensor
