// Scheduler: dedup by remapping. Two requests that computed the same prefix side by side hold the
// same KV twice; when the second records it, its full rows are remapped onto the first one's
// chunks.
#include <algorithm>

#include "vtensor/core/scheduler.h"
#include "vtensor/util/error.h"

namespace vtensor {

namespace {

// A full chunk below own_row has no appender: it is never written again.
void end_full(Chunk& chunk, const VTensor& vtensor, size_t chunk_bytes) {
  if (chunk.appender != vtensor.id) return;
  chunk.appender = kNoVTensor;
  chunk.written_bytes = chunk.dirty_bytes = chunk_bytes;
}

}  // namespace

// Rows [begin, end) of the vTensor become the chunks of `table` (a match's, row-major from row 0).
void Scheduler::replace_rows(VTensor& vtensor, size_t begin, size_t end,
                             std::span<const ChunkId> table) {
  const size_t planes = pool_.geometry.num_planes;
  std::vector<ChunkId>& mapped = pool_.vset[vtensor.slot].table;
  const std::span<const ChunkId> wanted = table.subspan(begin * planes, (end - begin) * planes);
  std::vector<Handle> after;
  for (const ChunkId id : wanted) after.push_back(pool_.pset[id].handle);
  try {
    remap(*pool_.driver, {pool_.vset, pool_.geometry, vtensor.slot, begin},
          handles(vtensor.slot, begin, end), after);
  } catch (const BrokenMapping&) {
    break_slot(vtensor.slot, wanted);
    throw;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    ChunkId& entry = mapped[begin * planes + i];
    pool_.pset.add_table_ref(wanted[i]);
    end_full(pool_.pset[entry], vtensor, pool_.geometry.chunk_bytes);
    pool_.pset.drop_table_ref(entry);
    entry = wanted[i];
  }
}

// It only saves memory, so whatever speaks against it now leaves the vTensor as it is.
size_t Scheduler::dedup(VTensorId id, std::span<const Token> tokens) {
  VTensor& vtensor = resident(id);
  if (!options_.alias || epochs_.is_open()) return 0;
  const size_t planes = pool_.geometry.num_planes;
  const size_t known = std::min(tokens.size(), vtensor.num_tokens);
  const RTree::Match match = pool_.rtree.match(vtensor.salt, tokens.first(known));
  const size_t end = pool_.geometry.full_rows(match.num_tokens);
  const std::vector<ChunkId>& mapped = pool_.vset[vtensor.slot].table;
  size_t begin = 0;
  while (begin < end && std::equal(mapped.begin() + static_cast<ptrdiff_t>(begin * planes),
                                   mapped.begin() + static_cast<ptrdiff_t>((begin + 1) * planes),
                                   match.table.begin() + static_cast<ptrdiff_t>(begin * planes))) {
    ++begin;
  }
  if (begin == end) return 0;
  epochs_.wait();
  try {
    replace_rows(vtensor, begin, end, match.table);
  } catch (const BrokenMapping&) {
    throw;  // the vTensor is lost
  } catch (const Error&) {
    ++counters_.dedup_failures;
    return 0;
  }
  for (size_t i = vtensor.own_row * planes; i < begin * planes; ++i) {  // recorded by itself
    end_full(pool_.pset[mapped[i]], vtensor, pool_.geometry.chunk_bytes);
  }
  vtensor.own_row = std::max(vtensor.own_row, end);
  const size_t num_chunks = (end - begin) * planes;
  counters_.chunks_deduplicated += num_chunks;
  vtensor.chunks_aliased += num_chunks;
  return num_chunks;
}

}  // namespace vtensor
