// AVX-512 (F, BW, DQ, VL); CMake compiles this file with it on x86-64, elsewhere it defines
// nothing.
#include "kernels/attention/task.h"

#if defined(__AVX512F__)
#define VTENSOR_LANES 16
#include "kernels/simd/kernel.h"

namespace vtensor::kernels {

const Level* avx512_level() {
  static constexpr Level kLevel = make_level("avx512");
  return &kLevel;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Level* vtensor::kernels::avx512_level() { return nullptr; }
#endif
