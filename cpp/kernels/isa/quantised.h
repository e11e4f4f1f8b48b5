// QuantisedIsa: the kernels for quantised weights compiled for one instruction set.
//
// They have levels of their own: AVX-VNNI and AMX's bytes are nothing to the other kernels, which
// would only be compiled once more (isa/isa.h). Which one runs is chosen at run time.
//
// Thread-safety: no state.
#pragma once

#include <array>

#include "kernels/calls/quantised.h"
#include "kernels/dtype.h"

namespace vtensor::kernels {

// How inputs of type T are made ready, as simd/inputs.h and simd/hadamard.h say.
template <class T>
struct InputKernels {
  float (*to_bytes)(const T* x, int64_t count, uint8_t zero, uint8_t* bytes);
  void (*to_byte_groups)(const T* x, int64_t depth, int64_t piece, int64_t group, bool in_order,
                         uint8_t* bytes, float* scales, int32_t* sums);
  float (*to_int16s)(const T* x, int64_t count, int16_t* output);
  void (*times_hadamard)(const T* x, int64_t depth, float factor, float* output);
};

struct QuantisedIsa {
  using Multiply = void (*)(const QuantisedCall&, DType, const LinearBlock&);
  // None where the instruction set multiplies no such pairs, or others sooner.
  using ByInputs = std::array<Multiply, kNumInputs>;

  const char* name;
  // Rows whose inputs are made ready at once and for which the weight is read once: a few
  // megabytes, and a multiple of the rows that are computed at once.
  int64_t block_rows;
  InputKernels<float> float_inputs;
  InputKernels<BFloat16> bfloat16_inputs;
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
