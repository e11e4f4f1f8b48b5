// Quantised weights with AMX tiles for products of bytes; all else is as with AVX-512, VNNI and
// products of bfloat16. Elsewhere this file defines nothing.
#include "kernels/isa/quantised.h"

#if defined(__AMX_INT8__) && defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_amx_quantised.h"

namespace vtensor::kernels {

const QuantisedIsa* amx_quantised() {
  static const QuantisedIsa isa = make_amx_quantised("amx");
  return &isa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::QuantisedIsa* vtensor::kernels::amx_quantised() { return nullptr; }
#endif
