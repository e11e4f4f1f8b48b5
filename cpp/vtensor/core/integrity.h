// check_integrity(): the invariants of the design (section 4), recomputed from nothing.
#pragma once

#include "vtensor/core/core.h"

namespace vtensor {

// Throws IntegrityError naming the first invariant that does not hold. O(everything).
void check_integrity(const Core& core);

}  // namespace vtensor
