// ManagerOptions: what a manager is opened with. Sizes are bytes here and whole chunks below.
#pragma once

#include <cstddef>
#include <limits>
#include <string>

#include "vtensor/core/core.h"
#include "vtensor/pool/kv_spec.h"
#include "vtensor/util/json_line.h"

namespace vtensor {

struct ManagerOptions {
  static constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();

  size_t max_requests = 64;
  size_t memory_budget = 0;
  size_t step_tokens =
      kNoLimit;  // that a vTensor grows by at once: what windows hold beside theirs
  size_t chunk_bytes = 2 * kMiB;
  ScrubPolicy scrub = ScrubPolicy::kOwner;
  bool park = true;                  // released slots stay mapped for the next vTensor
  bool pre_extend = true;            // false: pre_extend() does nothing
  bool alias = true;                 // false: prefixes and forks are copied
  bool dedup = true;                 // record_prefix() remaps onto equal chunks that are recorded
  size_t min_free_bytes = 0;         // clean and free, kept ready by the worker
  size_t max_free_bytes = kNoLimit;  // what is free beyond this the worker gives back
  size_t prefix_cache_bytes = kNoLimit;  // what no vTensor uses beyond this is reused first
  double prefix_cache_fraction = 1;      // the same bound as a part of the budget
  size_t swap_space_bytes = 0;           // of swapped-out vTensors
  std::string swap_directory;            // where swapped KV goes; empty: host memory
};

// Whole chunks; at least one per plane. Throws std::invalid_argument for less.
size_t budget_chunks(size_t memory_budget, const Geometry& geometry);
// The core's part, in chunks. Throws std::invalid_argument for bounds that exclude each other.
CoreOptions core_options(const ManagerOptions& options, size_t chunk_bytes);
// The header of a trace: settings, and what is alive when it starts. See docs/tracing.md.
JsonLine trace_header(const Core& core, const KVSpec& spec, const ManagerOptions& options);

}  // namespace vtensor
