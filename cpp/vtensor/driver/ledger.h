// Ledger: what is reserved, created and mapped, kept beside the real thing. It enforces rules 1, 4,
// 6 (by refusing) and 7 of driver.h, so that a driver is a ledger plus its own calls. A call is
// checked and written down first, made then, and taken back here when the system refuses it.
//
// Mappings are kept as maximal segments, not as chunks: a segment is a run of chunks at consecutive
// addresses whose handles are consecutive numbers too and whose access is the same. For the host
// driver, where a handle is a file offset, that is what the kernel merges into one mapping (VMA),
// so num_mappings() is its count (CUDA's, an offset in its window, merge here alone):
//
//   range    |=================================================|
//   segments |[A RW, offsets 0..6M)[B RW, 40..42M)             |   2 segments + the rest = 3
//   mappings
//
// Not thread-safe; the owner locks. Every throwing function throws std::invalid_argument with the
// offending value and changes nothing.
//
// Invariants:
//  1. Ranges are disjoint. A segment lies in one range; segments are disjoint.
//  2. No two neighbouring segments of one range could be one segment.
//  3. num_maps_ of a chunk = the number of times segments contain it.
//  4. num_mappings() = for each range, its segments plus the gaps around them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "vtensor/driver/driver.h"
#include "vtensor/util/id_set.h"

namespace vtensor {

class Ledger {
 public:
  struct Run {
    uintptr_t addr;
    uint64_t offset;  // of the first chunk; the next one's is chunk_bytes() higher
    size_t size_bytes;
    Access access;

    uintptr_t end() const { return addr + size_bytes; }
  };

  // `granularity_bytes`: every address and size must be a multiple of it.
  explicit Ledger(size_t granularity_bytes) : granularity_bytes_(granularity_bytes) {}

  // Checks the arguments of Driver::reserve and Driver::create. The first chunk says how large all
  // others are.
  void require_range_shape(size_t size_bytes, size_t alignment_bytes) const;
  void require_chunk_shape(size_t chunk_bytes) const;

  void add_range(uintptr_t addr, size_t size_bytes);
  void remove_range(uintptr_t addr, size_t size_bytes);  // exactly as added, nothing mapped in it

  // The chunk at the lowest free multiple of chunk_bytes, so that chunks created one after the
  // other are consecutive: such chunks map in one call and merge into one mapping.
  Handle add_chunk(size_t chunk_bytes);
  // A chunk of the caller's numbering, above all that add_chunk() gives.
  void add_chunk_at(Handle handle, size_t chunk_bytes);
  // The chunk, mapped nowhere, is gone for all callers; then finish_release() gives its place to
  // others, or undo_release() brings it back.
  void begin_release(Handle handle, size_t chunk_bytes);
  void finish_release(Handle handle);
  void undo_release(Handle handle) noexcept;

  // The bytes [offset, offset + size) lie in a chunk that exists.
  void require_bytes(Handle handle, size_t offset_bytes, size_t size_bytes) const;

  // Records the chunks with no access.
  void map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes);

  // Both return what was there before, in address order: the runs to work on, and the way back.
  std::vector<Run> set_access(uintptr_t addr, size_t size_bytes, Access access);
  std::vector<Run> unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes);

  // Take the same call back, after the system refused it. `before`: what the call returned.
  void undo_set_access(std::span<const Run> before);
  void undo_unmap(std::span<const Run> before);

  std::optional<Handle> mapped_at(uintptr_t addr) const;
  size_t chunk_bytes() const noexcept { return chunk_bytes_; }  // 0: there has been none
  size_t num_mappings() const noexcept { return num_mappings_; }
  const std::map<uintptr_t, size_t>& ranges() const noexcept { return ranges_; }  // addr -> bytes
  std::vector<Run> runs() const;  // all that is mapped, in address order

 private:
  static constexpr uint32_t kGone = std::numeric_limits<uint32_t>::max();
  struct Span {
    uintptr_t begin;
    uintptr_t end;
  };
  using Segments = std::map<uintptr_t, Run>;

  Span range_around(uintptr_t addr, size_t size_bytes) const;
  bool continues(const Run& first, const Run& second) const;
  uint32_t* find_maps(uint64_t offset);
  uint32_t num_maps(Handle handle) const;
  void require_covered(uintptr_t addr, size_t size_bytes) const;
  std::vector<Run> carve(uintptr_t addr, uintptr_t end);
  void split(uintptr_t addr);
  void insert(Span range, const Run& run);
  void count_maps(const Run& run, bool add);
  Span surroundings(Span range, uintptr_t addr, uintptr_t end) const;
  size_t count_mappings(Span span) const;
  template <class Change>
  void recount(Span range, uintptr_t addr, uintptr_t end, Change&& change);

  size_t granularity_bytes_;
  std::map<uintptr_t, size_t> ranges_;
  size_t chunk_bytes_ = 0;
  std::vector<uint32_t> num_maps_;  // by place of the chunk; kGone: there is none
  IdSet free_;                      // places below num_maps_.size() that a new chunk may have
  std::unordered_map<uint64_t, uint32_t> num_maps_at_;  // the same, of add_chunk_at()
  Segments segments_;
  size_t num_mappings_ = 0;
};

}  // namespace vtensor
