// Quantised weights with AVX2 and AVX-VNNI's products of bytes, as CPUs of laptops have them;
// elsewhere this file defines nothing.
#include "kernels/isa/quantised.h"

#if defined(__AVXVNNI__)
#define VTENSOR_LANES 8
#include "kernels/isa/make_quantised.h"

namespace vtensor::kernels {

const QuantisedIsa* avx_vnni_quantised() {
  static constexpr QuantisedIsa kIsa = make_quantised("avx_vnni");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::QuantisedIsa* vtensor::kernels::avx_vnni_quantised() { return nullptr; }
#endif
