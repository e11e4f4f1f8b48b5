// PSet, the paper's pSet: the sorted set of physical chunks with their reference counts.
//
// A chunk id is `absent` (no memory behind it), `free` (memory, no reference) or `referenced`.
// References are counted apart: one for each page-table entry, one for each rTree entry. A claimed
// chunk may still lack memory: its claim counts against the budget at once, the driver call comes
// later and without the manager's lock.
//
// Thread-safety: none; the manager's mutex guards it. No driver calls are made here.
//
// Invariants:
//  1. a chunk is free exactly when it has memory and table_refs + tree_refs == 0;
//  2. num_created() == num_free() + num_referenced(), and num_created() <= budget_chunks();
//  3. a chunk has at most one appender, a vTensor whose page table names it;
//  4. memory that stands apart (driver.h) serves one owner: a free chunk's is given back, and other
//     memory created, before the chunk serves another.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "vtensor/driver/driver.h"
#include "vtensor/util/id_set.h"

namespace vtensor {

using ChunkId = uint32_t;
// In the place of a chunk that was given back: it has no references, and nothing to map.
inline constexpr ChunkId kNoChunk = UINT32_MAX;
inline constexpr Handle kNoHandle{UINT64_MAX};
using VTensorId = uint64_t;
inline constexpr VTensorId kNoVTensor = 0;

// One of millions: as small as it can be.
struct Chunk {
  Handle handle{};
  uint32_t table_refs = 0;          // page-table entries that name this chunk
  uint32_t parked_refs = 0;         // of them, those of parked slots
  uint32_t tree_refs = 0;           // rTree entries that name this chunk
  uint32_t pins : 29 = 0;           // pinned rTree entries that name this chunk
  bool created : 1 = false;         // memory is behind it
  bool apart : 1 = false;           // which is not the pool's: others may hold it; never recycled
  bool sealed : 1 = false;          // never written again: somebody else may go on there
  uint32_t written_bytes = 0;       // watermark; exact while there is no appender
  uint32_t dirty_bytes = 0;         // leading bytes that may be non-zero
  VTensorId appender = kNoVTensor;  // may write beyond what is recorded
  uint64_t tenant = 0;              // whose bytes it holds
  uint32_t generation = 0;          // raised whenever it begins to hold something else

  uint32_t refs() const { return table_refs + tree_refs; }
  // Page-table entries of slots that are not parked.
  uint32_t uses() const { return table_refs - parked_refs; }
  // No vTensor uses it: recorded prefixes and parked slots alone hold it, unpinned.
  bool idle() const { return refs() > 0 && uses() == 0 && pins == 0; }
  bool is_private() const { return table_refs == 1 && tree_refs == 0; }
  bool is_recyclable() const { return is_private() && !apart; }
  bool shared() const { return uses() > 1; }
  // Chunks that the sharing of this one saves.
  uint32_t saved() const { return shared() ? uses() - 1 : 0; }
};

static_assert(sizeof(Chunk) == 56);

class PSet {
 public:
  explicit PSet(size_t budget_chunks) : budget_chunks_(budget_chunks) {}

  const Chunk& operator[](ChunkId id) const { return chunks_[id]; }
  Chunk& operator[](ChunkId id) { return chunks_[id]; }
  Handle handle(ChunkId id) const { return id == kNoChunk ? kNoHandle : chunks_[id].handle; }
  size_t num_ids() const { return chunks_.size(); }

  size_t budget_chunks() const { return budget_chunks_; }
  // Requires: budget_chunks >= num_created().
  void set_budget_chunks(size_t budget_chunks) { budget_chunks_ = budget_chunks; }

  size_t num_created() const { return num_created_; }  // claimed for creation counts as created
  size_t num_free() const { return free_.size(); }
  size_t num_referenced() const { return num_created_ - free_.size(); }
  bool is_free(ChunkId id) const { return free_.contains(id); }
  bool is_absent(ChunkId id) const { return absent_.contains(id); }
  size_t num_dirty_free() const { return dirty_free_.size(); }
  bool is_dirty_free(ChunkId id) const { return dirty_free_.contains(id); }
  size_t num_apart_free() const { return apart_free_.size(); }
  bool is_apart_free(ChunkId id) const { return apart_free_.contains(id); }
  size_t num_idle() const { return num_idle_; }  // see Chunk::idle()
  size_t num_idle_unrecorded() const { return num_idle_unrecorded_; }
  size_t num_shared() const { return num_shared_; }      // see Chunk::shared()
  size_t num_saved() const { return num_saved_; }        // see Chunk::saved()
  size_t num_recorded() const { return num_recorded_; }  // named by the rTree
  // Chunks that a claim can have without taking anything from anybody.
  size_t num_claimable() const { return free_.size() + (budget_chunks_ - num_created_); }

  // Claims one chunk with one table reference: a free one, lowest id first, else an absent one
  // under the budget (created == false: the caller creates it before use).
  // Requires: num_claimable() > 0.
  ChunkId claim();
  // Claims an absent chunk though free ones are left. Requires: num_created() < budget_chunks().
  ChunkId claim_absent();
  // Claims a free chunk that holds old data. Requires: num_dirty_free() > 0.
  ChunkId claim_dirty();
  // Claims a free chunk whose memory is to be given back. Requires: num_apart_free() > 0.
  ChunkId claim_apart();
  // Undoes the creation part of a claim whose driver call failed, and drops its table reference.
  void unclaim(ChunkId id);

  // These do nothing for kNoChunk.
  void add_table_ref(ChunkId id);
  void drop_table_ref(ChunkId id);
  // One of its page-table entries is a parked slot's now, or no longer. Requires: one is.
  void add_parked_ref(ChunkId id);
  void drop_parked_ref(ChunkId id);
  void add_tree_ref(ChunkId id);
  void drop_tree_ref(ChunkId id);
  void add_pin(ChunkId id);
  void drop_pin(ChunkId id);

  // Takes the free chunk with the highest id out, for release to the system. It counts as created
  // until forget() or put_back(). Requires: num_free() > 0.
  ChunkId take_free();
  // The same, of one whose memory stands apart. Requires: num_apart_free() > 0.
  ChunkId take_apart();
  void put_back(ChunkId id);
  void forget(ChunkId id);

 private:
  ChunkId claimed(ChunkId id);
  void reset(ChunkId id);
  void take_out(ChunkId id);
  void count(const Chunk& chunk, size_t by);
  template <typename Change>
  void change(ChunkId id, Change&& apply);

  std::vector<Chunk> chunks_;
  IdSet free_;
  IdSet dirty_free_;  // of free_, those of the pool's memory with dirty bytes
  IdSet apart_free_;  // of free_, those with other memory
  IdSet absent_;      // ids below chunks_.size() without memory
  size_t budget_chunks_;
  size_t num_created_ = 0;
  size_t num_idle_ = 0;
  size_t num_idle_unrecorded_ = 0;
  size_t num_shared_ = 0;
  size_t num_saved_ = 0;
  size_t num_recorded_ = 0;
};

}  // namespace vtensor
