// Registers the core's exceptions as Python classes with their attributes; see flexinfer/errors.py.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor {

void bind_errors(nanobind::module_& module);

}  // namespace vtensor
