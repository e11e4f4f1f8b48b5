#include "vtensor/core/recorder.h"

#include <algorithm>
#include <stdexcept>

#include "vtensor/ops/mapping.h"
#include "vtensor/ops/prefix.h"
#include "vtensor/util/error.h"

namespace vtensor {

size_t Recorder::record_prefix(VTensorId id, std::span<const Token> tokens) {
  VTensor& vtensor = vtensors_.resident(id);
  if (tokens.size() > vtensor.num_tokens) {
    throw std::invalid_argument("record_prefix of " + std::to_string(tokens.size()) +
                                " tokens, but the vTensor has only " +
                                std::to_string(vtensor.num_tokens));
  }
  const size_t num_shared = shield_.before_sharing(vtensor, tokens.size());
  vtensor.frozen_tokens = std::max(vtensor.frozen_tokens, tokens.size());
  return r_push(pool_, vtensor.salt, tokens.first(num_shared), vtensor.slot);
}

// Rows [begin, end) of the vTensor become the chunks of `table` (a match's, row-major from row 0).
void Recorder::replace_rows(VTensor& vtensor, size_t begin, size_t end,
                            std::span<const ChunkId> table) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  std::vector<ChunkId>& mapped = pool_.vset[vtensor.slot].table;
  std::vector<ChunkId> wanted;
  std::vector<Handle> after;
  for (size_t i = begin * row_chunks; i < end * row_chunks; ++i) {
    const bool replaced = table[i] != kNoChunk && mapped[i] != kNoChunk;
    wanted.push_back(replaced ? table[i] : mapped[i]);
    after.push_back(pool_.pset.handle(wanted.back()));
  }
  vtensors_.unguard(vtensor.slot);
  vtensors_.freeze_rows(vtensor, end);
  try {
    remap(*pool_.driver, {pool_.vset, pool_.geometry, vtensor.slot, begin},
          {vtensors_.handles(vtensor.slot, begin, end)}, {after});
  } catch (const BrokenMapping&) {
    vtensors_.break_slot(vtensor.slot, wanted);
    throw;
  }
  for (size_t i = 0; i < wanted.size(); ++i) {
    ChunkId& entry = mapped[begin * row_chunks + i];
    pool_.pset.add_table_ref(wanted[i]);
    pool_.pset.drop_table_ref(entry);
    entry = wanted[i];
  }
}

// Two requests that computed the same prefix side by side hold the same KV twice; when the second
// records it, its full rows are remapped onto the first one's chunks. It only saves memory, so
// whatever speaks against it now leaves the vTensor as it is: a step that is open, and tensor
// views, which go on showing what the vTensor itself computed.
size_t Recorder::dedup(VTensorId id, std::span<const Token> tokens) {
  VTensor& vtensor = vtensors_.resident(id);
  if (!state_.options.alias || state_.epochs.is_open()) return 0;
  if (pool_.vset[vtensor.slot].num_views > 0) return 0;
  const size_t row_chunks = pool_.geometry.row_chunks;
  const size_t known = std::min(tokens.size(), vtensor.num_tokens);
  const RTree::Match match = pool_.rtree.match(vtensor.salt, tokens.first(known));
  const size_t end = pool_.geometry.full_rows(match.num_tokens);
  const std::vector<ChunkId>& mapped = pool_.vset[vtensor.slot].table;
  const auto differs = [&](size_t i) {  // a chunk given back is nobody's
    return mapped[i] != match.table[i] && mapped[i] != kNoChunk && match.table[i] != kNoChunk;
  };
  size_t first = 0;
  while (first < end * row_chunks && !differs(first)) ++first;
  const size_t begin = first / row_chunks;
  if (begin == end) return 0;
  state_.epochs.wait();
  try {
    replace_rows(vtensor, begin, end, match.table);
  } catch (const BrokenMapping&) {
    throw;  // the vTensor is lost
  } catch (const Error&) {
    ++state_.counters.dedup_failures;
    return 0;
  }
  const auto given_up = std::span(mapped).subspan(begin * row_chunks, (end - begin) * row_chunks);
  const auto num_chunks = static_cast<size_t>(
      std::ranges::count_if(given_up, [](ChunkId id) { return id != kNoChunk; }));
  state_.counters.chunks_deduplicated += num_chunks;
  vtensor.chunks_aliased += num_chunks;
  return num_chunks;
}

}  // namespace vtensor
