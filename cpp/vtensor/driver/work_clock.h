// The clock by which driver work is measured: the steady clock, plus the time that simulated calls
// of this thread would have taken. So a simulation that does not sleep is measured as if it had.
//
// Thread-safety: the simulated part is the thread's own; only differences taken on one thread mean
// anything.
#pragma once

#include <cstdint>

#include "vtensor/driver/driver_call.h"

namespace vtensor {

inline constinit thread_local int64_t simulated_ns = 0;

inline int64_t work_now_ns() { return steady_now_ns() + simulated_ns; }

}  // namespace vtensor
