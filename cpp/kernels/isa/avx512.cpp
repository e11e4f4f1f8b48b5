// AVX-512 (F, BW, DQ, VL); CMake compiles this file with it on x86-64, elsewhere it defines
// nothing.
#include "kernels/isa/isa.h"

#if defined(__AVX512F__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_isa.h"

namespace vtensor::kernels {

const Isa* avx512_isa() {
  static constexpr Isa kIsa = make_isa("avx512");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Isa* vtensor::kernels::avx512_isa() { return nullptr; }
#endif
