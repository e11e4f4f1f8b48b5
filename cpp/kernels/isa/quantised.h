// QuantisedIsa: the kernels for quantised weights compiled for one instruction set.
//
// They have levels of their own: AVX-VNNI and AMX's bytes are nothing to the other kernels, which
// would only be compiled once more (isa/isa.h). Which one runs is chosen at run time.
//
// Thread-safety: no state.
#pragma once

#include <array>

#include "kernels/calls/quantised.h"

namespace vtensor::kernels {

struct QuantisedIsa {
  using Multiply = void (*)(const QuantisedCall&, DType, const LinearBlock&);
  // None where the instruction set multiplies no such pairs, or others sooner.
  using ByInputs = std::array<Multiply, kNumInputs>;

  const char* name;
  // Rows whose inputs are made ready at once and for which the weight is read once: a few
  // megabytes, and a multiple of the rows that are computed at once.
  int64_t block_rows;
  // Of one row of so many numbers, as simd/rotate.h says.
  void (*rotate)(float* x, int64_t depth);
  // Rows and panels of a block, of weights with one scale an output (8 bits, inputs as bytes), ...
  Multiply multiply_outputs;
  // ... and of weights in groups.
  ByInputs multiply_8_bits;
  ByInputs multiply_6_bits;
  std::array<ByInputs, kNumCodebookKinds> multiply_4_bits;
};

// One for each isa/quantised_<name>.cpp; none where the compiler's target has no such instructions.
const QuantisedIsa* portable_quantised();
const QuantisedIsa* avx2_quantised();
const QuantisedIsa* avx_vnni_quantised();
const QuantisedIsa* avx512_quantised();
const QuantisedIsa* avx512_vnni_quantised();
const QuantisedIsa* avx512_bf16_quantised();
const QuantisedIsa* amx_quantised();

}  // namespace vtensor::kernels
