// What a manager tells, as Python values: numbers, the memory map, which blocks are recorded.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor {

void bind_insight(nanobind::module_& m);

}  // namespace vtensor
