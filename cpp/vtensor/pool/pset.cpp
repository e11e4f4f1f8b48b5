#include "vtensor/pool/pset.h"

namespace vtensor {

void PSet::count(const Chunk& chunk, size_t by) {
  num_idle_ += by * static_cast<size_t>(chunk.idle());
  num_idle_unrecorded_ += by * static_cast<size_t>(chunk.idle() && chunk.tree_refs == 0);
  num_shared_ += by * static_cast<size_t>(chunk.shared());
  num_saved_ += by * chunk.saved();
  num_recorded_ += by * static_cast<size_t>(chunk.tree_refs > 0);
}

// Applies a change of reference counts and keeps the free set and the counts of chunks in step.
template <typename Change>
void PSet::change(ChunkId id, Change&& apply) {
  if (id == kNoChunk) return;
  Chunk& chunk = chunks_[id];
  count(chunk, static_cast<size_t>(-1));
  apply(chunk);
  count(chunk, 1);
  if (chunk.refs() == 0) {
    chunk.appender = kNoVTensor;
    chunk.written_bytes = 0;  // nobody goes on there
    chunk.sealed = false;
    put_back(id);
  }
}

ChunkId PSet::claimed(ChunkId id) {
  chunks_[id].table_refs = 1;
  ++chunks_[id].generation;
  return id;
}

// As if it had never been used, but for its generation.
void PSet::reset(ChunkId id) { chunks_[id] = Chunk{.generation = chunks_[id].generation}; }

void PSet::take_out(ChunkId id) {
  if (dirty_free_.contains(id)) dirty_free_.erase(id);
  if (apart_free_.contains(id)) apart_free_.erase(id);
}

ChunkId PSet::claim() {
  if (free_.empty()) return claim_absent();
  const ChunkId id = free_.pop_lowest();
  take_out(id);
  return claimed(id);
}

ChunkId PSet::claim_absent() {
  if (absent_.empty()) {
    absent_.insert(static_cast<ChunkId>(chunks_.size()));
    chunks_.emplace_back();
  }
  const ChunkId id = absent_.pop_lowest();
  reset(id);
  ++num_created_;
  return claimed(id);
}

ChunkId PSet::claim_dirty() {
  const ChunkId id = dirty_free_.pop_lowest();
  free_.erase(id);
  return claimed(id);
}

ChunkId PSet::claim_apart() { return claimed(take_apart()); }

void PSet::unclaim(ChunkId id) {
  if (chunks_[id].created) {
    drop_table_ref(id);
    return;
  }
  chunks_[id].table_refs = 0;
  forget(id);
}

void PSet::add_table_ref(ChunkId id) {
  change(id, [](Chunk& chunk) { ++chunk.table_refs; });
}

void PSet::drop_table_ref(ChunkId id) {
  change(id, [](Chunk& chunk) { --chunk.table_refs; });
}

void PSet::add_parked_ref(ChunkId id) {
  change(id, [](Chunk& chunk) { ++chunk.parked_refs; });
}

void PSet::drop_parked_ref(ChunkId id) {
  change(id, [](Chunk& chunk) {
    --chunk.parked_refs;
    // Nothing that is known was in it: who adopts the slot writes over it.
    chunk.generation += static_cast<uint32_t>(chunk.tree_refs == 0);
  });
}

void PSet::add_tree_ref(ChunkId id) {
  change(id, [](Chunk& chunk) { ++chunk.tree_refs; });
}

void PSet::drop_tree_ref(ChunkId id) {
  change(id, [](Chunk& chunk) { --chunk.tree_refs; });
}

void PSet::add_pin(ChunkId id) {
  change(id, [](Chunk& chunk) { ++chunk.pins; });
}

void PSet::drop_pin(ChunkId id) {
  change(id, [](Chunk& chunk) { --chunk.pins; });
}

ChunkId PSet::take_free() {
  const ChunkId id = free_.pop_highest();
  take_out(id);
  return id;
}

ChunkId PSet::take_apart() {
  const ChunkId id = apart_free_.pop_lowest();
  free_.erase(id);
  return id;
}

void PSet::put_back(ChunkId id) {
  free_.insert(id);
  if (chunks_[id].apart) {
    apart_free_.insert(id);
  } else if (chunks_[id].dirty_bytes > 0) {
    dirty_free_.insert(id);
  }
}

void PSet::forget(ChunkId id) {
  reset(id);
  absent_.insert(id);
  --num_created_;
}

}  // namespace vtensor
