// The binding of Parcel.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor {

void bind_parcel(nanobind::module_& module);

}  // namespace vtensor
