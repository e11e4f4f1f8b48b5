// Snapshot: the memory map that a manager tells. Plain values, safe to keep; the functions that
// make them run under the manager's mutex.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "vtensor/core/core.h"
#include "vtensor/core/stats.h"

namespace vtensor {

// One physical chunk and who names it.
struct ChunkInfo {
  ChunkId id = 0;
  uint32_t generation = 0;  // another one: the id is the same, what it holds is not
  uint32_t refs = 0;        // page-table and rTree entries
  bool recorded = false;    // the rTree names it
  bool pinned = false;
  VTensorId appender = kNoVTensor;
  std::vector<VTensorId> sharers;  // vTensors that map it, parked ones left out
};

struct VTensorInfo {
  VTensorId id = kNoVTensor;  // 0 for a slot that is parked or broken
  SlotId slot = 0;
  SlotState state = SlotState::kLive;
  size_t num_tokens = 0;
  size_t num_cached_tokens = 0;
  size_t num_cut_tokens = 0;  // recorded beyond these, but without rows that a window reads
  size_t cut_by_window = 0;   // of so many tokens; 0: nothing was cut
  size_t mapped_tokens = 0;
  size_t mapped_bytes = 0;
  size_t chunks_aliased = 0;
  size_t chunks_copied = 0;
  std::vector<ChunkId> table;  // [row * num_planes + column], kNoChunk where a window has
                               // left a row; empty in info()
};

inline constexpr size_t kFirstTokens = 16;

// A node of the rTree.
struct PrefixInfo {
  std::string cache_salt;
  ptrdiff_t parent = -1;  // index in Snapshot::prefixes of the node that it continues; -1: none
  size_t start_tokens = 0;
  size_t num_tokens = 0;  // of this node; the prefix ends at start_tokens + num_tokens
  uint64_t last_used = 0;
  std::vector<Token> first_tokens;  // at most kFirstTokens of its own: what it can be called after
  std::vector<ChunkId> chunks;
  std::vector<BlockHash> blocks;  // that end in this node, while they are watched
  std::vector<std::string> pinned_by;
};

struct Snapshot {
  size_t chunk_bytes = 0;
  size_t num_planes = 0;  // chunks of a row: one per plane, more where planes differ in size
  std::vector<VTensorInfo> vtensors;  // every slot that is not free, by slot
  std::vector<ChunkInfo> chunks;      // every chunk that has a reference, by id
  std::vector<PrefixInfo> prefixes;   // parents before children
};

// How long driver work took, since the start.
struct MappingTimes {
  double exposed_us = 0;  // callers waited for it
  double hidden_us = 0;   // on the worker
  size_t pre_extended_rows = 0;
};

VTensorInfo describe(const Core& core, const VTensor& vtensor);
Snapshot take_snapshot(const Core& core);
// All but what the manager itself keeps: swap, sleep, times and driver calls.
Stats gather_stats(const Core& core);

}  // namespace vtensor
