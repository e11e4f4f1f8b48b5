// CoreState: what the classes of core/ have in common: the pool, the options, the counters, and
// which steps and chunks are under way.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_set>

#include "vtensor/core/counters.h"
#include "vtensor/core/epochs.h"
#include "vtensor/ops/alloc.h"
#include "vtensor/pool/pool.h"

namespace vtensor {

struct CoreOptions {
  ScrubPolicy scrub = ScrubPolicy::kOwner;
  bool park = true;   // released slots stay mapped for the next vTensor (deferred reclamation)
  bool alias = true;  // false: prefixes and forks are copied, chunk by chunk
  size_t min_free_chunks = 0;  // clean free chunks that upkeep keeps ready (eager allocation)
  size_t max_free_chunks = SIZE_MAX;  // free chunks beyond this go back to the system
  // Idle chunks beyond this, free ones that upkeep keeps ready among them, are reused before any is
  // created; the lesser of the two.
  size_t prefix_cache_chunks = SIZE_MAX;
  double prefix_cache_fraction = 1;  // of the budget, as it is then
};

struct CoreState {
  Pool& pool;
  CoreOptions options;
  CoreCounters counters;
  Epochs epochs;                        // steps whose kernels may be running
  std::unordered_set<ChunkId> claimed;  // by extensions and upkeep that are planned, not finished
  uint64_t plan = 0;                    // which plan_extend() is under way; see VTensor::plan
  uint64_t num_aparts = 0;              // numbers given out

  // With room for all that a vTensor holds, and a row that is copied beside it.
  Apart apart(uint64_t number) const {
    const Geometry& geometry = pool.geometry;
    return {number, number == 0 ? 0 : (geometry.max_rows() + 1) * geometry.row_bytes()};
  }
};

}  // namespace vtensor
