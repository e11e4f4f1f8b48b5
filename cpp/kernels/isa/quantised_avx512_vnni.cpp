// Quantised weights with AVX-512 and VNNI's products of bytes; elsewhere this file defines nothing.
#include "kernels/isa/quantised.h"

#if defined(__AVX512VNNI__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_quantised.h"

namespace vtensor::kernels {

const QuantisedIsa* avx512_vnni_quantised() {
  static constexpr QuantisedIsa kIsa = make_quantised("avx512_vnni");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::QuantisedIsa* vtensor::kernels::avx512_vnni_quantised() { return nullptr; }
#endif
