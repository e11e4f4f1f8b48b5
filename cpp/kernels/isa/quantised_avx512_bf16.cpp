// Quantised weights with AVX-512, VNNI and products of bfloat16; elsewhere this file defines
// nothing.
#include "kernels/isa/quantised.h"

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_quantised.h"

namespace vtensor::kernels {

const QuantisedIsa* avx512_bf16_quantised() {
  static constexpr QuantisedIsa kIsa = make_quantised("avx512_bf16");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::QuantisedIsa* vtensor::kernels::avx512_bf16_quantised() { return nullptr; }
#endif
