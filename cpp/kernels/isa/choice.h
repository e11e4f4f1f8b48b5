// The instruction sets that this build and this CPU both have, and the choice among them.
//
// An Isa computes one task; what tasks a step consists of is the plan's business, who runs them the
// attention's.
//
// Thread-safety: all of it may be called from any thread.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels/isa/isa.h"
#include "kernels/isa/quantised.h"

namespace vtensor::kernels {

// Of one thread.
size_t scratch_floats(int key_dim, int value_dim);

// What this build and this CPU both have, best last; "portable" is always there.
const std::vector<const Isa*>& available_isas();

// The one called `name`; "": that of the environment variable FLEXINFER_SIMD, else the best.
// Throws std::invalid_argument, naming the choices, for one that this build or CPU does not have.
const Isa& find_isa(const std::string& name);

// The same for quantised weights, which have a level more.
const std::vector<const QuantisedIsa*>& available_quantised();
const QuantisedIsa& find_quantised(const std::string& name);

}  // namespace vtensor::kernels
