// AVX2 and FMA; CMake compiles this file with them on x86-64, elsewhere it defines nothing.
#include "kernels/isa/isa.h"

#if defined(__AVX2__) && defined(__FMA__)
#define VTENSOR_LANES 8
#include "kernels/isa/make_isa.h"

namespace vtensor::kernels {

const Isa* avx2_isa() {
  static constexpr Isa kIsa = make_isa("avx2");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Isa* vtensor::kernels::avx2_isa() { return nullptr; }
#endif
