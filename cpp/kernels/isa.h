// Level: the attention kernel compiled for one instruction set, and the choice among them.
//
// One source, simd/*.h, is compiled once a level (level_<name>.cpp). A level computes one task;
// what tasks a step consists of is the plan's business, who runs them the attention's.
//
// Thread-safety: all of it may be called from any thread; levels have no state.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/attention/task.h"

namespace vtensor::kernels {

// Of one thread.
size_t scratch_floats(int head_dim);

// What this build and this CPU both have, best last; "portable" is always there.
const std::vector<const Level*>& available_levels();

// The level called `name`; "": that of the environment variable FLEXINFER_SIMD, else the best.
// Throws std::invalid_argument, naming the choices, for one that this build or CPU does not have.
const Level& find_level(const std::string& name);

}  // namespace vtensor::kernels
