// What Python sees of quantised weights, and of linear layers with them.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor::kernels {

void bind_quantised_linear(nanobind::module_& m);

}  // namespace vtensor::kernels
