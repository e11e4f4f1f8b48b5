// Chore: one piece of upkeep for the worker, so that a step finds clean chunks ready.
//
// Planned and finished under the manager's mutex, run without it. Its chunk is claimed meanwhile.
#pragma once

#include <cstddef>
#include <string_view>

#include "vtensor/ops/alloc.h"

namespace vtensor {

struct Chore {
  enum class Kind { kCreate, kScrub, kRelease };

  Kind kind = Kind::kCreate;
  Claim claim;

  // Makes the driver call. On failure nothing has changed.
  void run(Driver& driver, size_t chunk_bytes);
};

std::string_view chore_name(Chore::Kind kind);

}  // namespace vtensor
