// Snapshot and Stats: what the manager tells about itself. Plain values, safe to keep.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "vtensor/driver/wrappers/metered_driver.h"
#include "vtensor/pool/vset.h"

namespace vtensor {

// One physical chunk and who names it.
struct ChunkInfo {
  ChunkId id = 0;
  uint32_t refs = 0;      // page-table and rTree entries
  bool recorded = false;  // the rTree names it
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
  size_t mapped_tokens = 0;
  size_t mapped_bytes = 0;
  size_t chunks_aliased = 0;
  size_t chunks_copied = 0;
  std::vector<ChunkId> table;  // [row * num_planes + plane]; empty in info()
};

// A node of the rTree.
struct PrefixInfo {
  std::string cache_salt;
  ptrdiff_t parent = -1;  // index in Snapshot::prefixes of the node that it continues; -1: none
  size_t start_tokens = 0;
  size_t num_tokens = 0;  // of this node; the prefix ends at start_tokens + num_tokens
  uint64_t last_used = 0;
  std::vector<ChunkId> chunks;
  std::vector<std::string> pinned_by;
};

struct Snapshot {
  size_t chunk_bytes = 0;
  size_t num_planes = 0;
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

// Bytes are of now, counts are totals since the start.
struct Stats {
  size_t reserved_bytes = 0;  // virtual: all arenas
  size_t mapped_bytes = 0;    // virtual: behind live vTensors, aliases counted each time
  size_t resident_bytes = 0;  // physical: created chunks
  size_t shared_bytes = 0;    // physical: chunks that more than one live vTensor maps
  size_t saved_bytes = 0;     // what sharing saves: mapped by live vTensors minus distinct chunks
  size_t free_bytes = 0;      // physical: created, without reference
  size_t parked_bytes = 0;    // virtual: mapped behind parked slots
  size_t held_bytes = 0;      // virtual: mapped behind released vTensors with living views
  size_t recorded_bytes = 0;  // physical: chunks that the rTree names
  size_t swapped_bytes = 0;   // host: contents of swapped-out vTensors
  size_t asleep_bytes = 0;    // host: contents of a sleeping manager
  size_t budget_bytes = 0;
  size_t obtainable_bytes = 0;  // what extend() could still have
  size_t num_vtensors = 0;
  size_t num_free_slots = 0;  // free or parked
  size_t recorded_tokens = 0;
  size_t prefix_queries = 0;
  size_t prefix_query_tokens = 0;
  size_t prefix_hit_tokens = 0;
  size_t chunks_aliased = 0;
  size_t chunks_copied = 0;
  size_t chunks_evicted = 0;
  size_t chunks_adopted = 0;
  size_t chunks_deduplicated = 0;
  size_t dedup_failures = 0;
  size_t chunks_swapped_out = 0;
  size_t chunks_swapped_in = 0;
  size_t pre_extend_failures = 0;
  double map_us_exposed = 0;  // time callers waited for driver work
  double map_us_hidden = 0;   // driver time of the worker
  DriverStats driver;
};

}  // namespace vtensor
