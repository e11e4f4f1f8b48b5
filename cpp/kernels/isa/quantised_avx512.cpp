// Quantised weights with AVX-512 (F, BW, DQ, VL); elsewhere this file defines nothing.
#include "kernels/isa/quantised.h"

#if defined(__AVX512F__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_quantised.h"

namespace vtensor::kernels {

const QuantisedIsa* avx512_quantised() {
  static constexpr QuantisedIsa kIsa = make_quantised("avx512");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::QuantisedIsa* vtensor::kernels::avx512_quantised() { return nullptr; }
#endif
