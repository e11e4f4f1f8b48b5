// What Python sees of Experts.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor::kernels {

// REQUIRES: the other classes of the module are bound already.
void bind_experts(nanobind::module_& m);

}  // namespace vtensor::kernels
