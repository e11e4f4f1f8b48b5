// Stats: a manager's numbers. Plain values, safe to keep. The only list of them: the Python binding
// follows from it.
#pragma once

#include <cstddef>

#include "vtensor/core/counters.h"
#include "vtensor/driver/wrappers/metered_driver.h"

namespace vtensor {

// X(type, name, doc). Bytes are of now; counts and times are totals since the start.
#define VTENSOR_STATS(X)                                                               \
  X(size_t, reserved_bytes, "Virtual: all arenas.")                                    \
  X(size_t, mapped_bytes, "Virtual: behind live vTensors, aliases counted each time.") \
  X(size_t, resident_bytes, "Physical: created chunks.")                               \
  X(size_t, shared_bytes, "Physical: chunks that more than one vTensor maps.")         \
  X(size_t, saved_bytes, "Physical: what they would take beyond that, each its own.")  \
  X(size_t, free_bytes, "Physical: created, without reference.")                       \
  X(size_t, parked_bytes, "Virtual: mapped behind parked slots.")                      \
  X(size_t, held_bytes, "Virtual: mapped behind released vTensors with living views.") \
  X(size_t, recorded_bytes, "Physical: chunks of recorded prefixes.")                  \
  X(size_t, swapped_bytes, "Host: contents of swapped-out vTensors.")                  \
  X(size_t, asleep_bytes, "Host: contents of a sleeping manager.")                     \
  X(size_t, budget_bytes, "Bound on physical bytes.")                                  \
  X(size_t, available_bytes, "What extend() could still have.")                        \
  X(size_t, num_vtensors, "vTensors alive.")                                           \
  X(size_t, num_free_slots, "Slots free or parked.")                                   \
  X(size_t, num_broken_slots, "Slots that a failing driver broke, until repaired.")    \
  X(size_t, broken_bytes, "Virtual: what these may map.")                              \
  X(size_t, recorded_tokens, "Tokens of recorded prefixes.")                           \
  X(size_t, pre_extend_failures, "Mapping ahead of need that failed.")                 \
  X(double, map_us_exposed, "Microseconds that callers waited for driver work.")       \
  X(double, map_us_hidden, "Microseconds of driver work of the worker.")

struct Stats : CoreCounters {
#define X(type, name, doc) type name = 0;
  VTENSOR_STATS(X)
#undef X
  DriverStats driver;
};

}  // namespace vtensor
