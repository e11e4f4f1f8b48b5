// make_amx_quantised: the table of avx512_bf16, but with products of bytes on AMX's tiles. Included
// by isa/quantised_amx.cpp, and by the test that computes on tiles in software.
#pragma once

#include "kernels/isa/quantised.h"
#include "kernels/simd/amx_quantised.h"

namespace vtensor::kernels {
namespace {

inline QuantisedIsa make_amx_quantised(const char* name) {
  QuantisedIsa isa = *avx512_bf16_quantised();
  isa.name = name;
  isa.block_rows = 256;
  isa.multiply_outputs = multiply_bytes;
  return isa;
}

}  // namespace
}  // namespace vtensor::kernels
