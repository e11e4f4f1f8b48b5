// CudaBook: what is reserved, created and mapped on one device, to tell a caller's mistake from a
// driver's failure before the driver is called (CUDA answers most mistakes with the same "invalid
// value", and some with undefined behaviour).
//
// Each driver call is framed by two steps here: a check that claims (it throws, changing nothing),
// then the call, then a commit or an undo, which are noexcept. The lock is not held during the
// call, so the worker's slow creates do not hold up a map on the step's path.
//
// Not ledger.h: that one merges chunks with consecutive handles into segments, as the kernel
// does with file offsets; CUDA's handles have no order, its undo must not throw, and each chunk
// carries its window address.
//
// Thread-safety: all members may be called from any thread; calls about the same addresses or the
// same chunk are ordered by the caller (Driver's rule).
//
// Invariants:
//  1. Mappings do not overlap, and each lies inside one reservation.
//  2. A chunk's num_mappings counts the entries of mappings that name it.
//  3. Caller mistakes throw std::invalid_argument with the offending value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "vtensor/driver/driver.h"

namespace vtensor {

class CudaBook {
 public:
  struct Chunk {
    size_t size_bytes;
    uintptr_t window_addr;  // 0: lost when an undo failed too; contents cannot be reached
    size_t num_mappings = 0;
    bool in_release = false;  // claimed by release(): to everyone else it does not exist
  };
  struct Mapping {
    Handle handle;
    size_t size_bytes;
    Access access = Access::kNone;
  };
  struct PlacedMapping {
    uintptr_t addr;
    Mapping mapping;
  };
  using ChunkMap = std::unordered_map<uint64_t, Chunk>;

  explicit CudaBook(size_t granularity) : granularity_(granularity) {}

  // Throws unless `size_bytes` is a positive multiple of the granularity.
  void check_size(size_t size_bytes, const char* what) const;

  void add_reservation(uintptr_t addr, size_t size_bytes);
  void check_free(uintptr_t addr, size_t size_bytes) const;
  void remove_reservation(uintptr_t addr) noexcept;

  void add_chunk(Handle handle, const Chunk& chunk);
  // Returns a copy of the chunk; then either finish_release() or undo_release().
  Chunk begin_release(Handle handle, size_t chunk_bytes);
  void finish_release(Handle handle) noexcept;
  void undo_release(Handle handle, uintptr_t window_addr) noexcept;

  // Address of `size_bytes` at `offset` of the chunk in the window.
  uintptr_t content_addr(Handle handle, size_t offset, size_t size_bytes) const;

  void claim_map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes);
  // Forgets `num_chunks` mappings from `addr` on; also the undo of claim_map().
  void forget_mappings(uintptr_t addr, size_t num_chunks) noexcept;

  // The mappings that fill [addr, addr + size_bytes) exactly. `chunk_bytes` 0: of any size.
  std::vector<PlacedMapping> check_run(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) const;
  // The chunk mapped from `addr` on.
  std::optional<Handle> mapped_at(uintptr_t addr) const;
  void set_run_access(uintptr_t addr, size_t size_bytes, Access access) noexcept;

  // For the destructor: everything that is still there.
  std::vector<PlacedMapping> all_mappings() const;
  const ChunkMap& chunks() const noexcept { return chunks_; }
  const std::map<uintptr_t, size_t>& reservations() const noexcept { return reservations_; }

 private:
  void check_inside_reservation(uintptr_t addr, size_t size_bytes) const;
  void check_nothing_mapped(uintptr_t addr, size_t size_bytes) const;
  const Chunk& find_chunk(Handle handle, size_t chunk_bytes) const;

  const size_t granularity_;
  mutable std::mutex mutex_;
  std::map<uintptr_t, size_t> reservations_;  // addr -> bytes
  std::map<uintptr_t, Mapping> mappings_;
  ChunkMap chunks_;
};

}  // namespace vtensor
