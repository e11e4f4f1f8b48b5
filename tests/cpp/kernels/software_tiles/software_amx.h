// The AMX levels on tiles in software. Nothing of the standard library here: see isa/isa.h.
#pragma once

#include "kernels/isa/isa.h"
#include "kernels/isa/quantised.h"

namespace vtensor::kernels {

// None where the compiler does not know the instructions; they need a CPU with avx512_bf16.
const Isa* software_amx_isa();
const QuantisedIsa* software_amx_quantised();

}  // namespace vtensor::kernels
