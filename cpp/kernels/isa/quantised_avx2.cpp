// Quantised weights with AVX2 and FMA; elsewhere this file defines nothing.
#include "kernels/isa/quantised.h"

#if defined(__AVX2__)
#define VTENSOR_LANES 8
#include "kernels/isa/make_quantised.h"

namespace vtensor::kernels {

const QuantisedIsa* avx2_quantised() {
  static constexpr QuantisedIsa kIsa = make_quantised("avx2");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::QuantisedIsa* vtensor::kernels::avx2_quantised() { return nullptr; }
#endif
