// AVX2 and FMA; CMake compiles this file with them on x86-64, elsewhere it defines nothing.
#include "kernels/attention/task.h"

#if defined(__AVX2__) && defined(__FMA__)
#define VTENSOR_LANES 8
#include "kernels/simd/kernel.h"

namespace vtensor::kernels {

const Level* avx2_level() {
  static constexpr Level kLevel = make_level("avx2");
  return &kLevel;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Level* vtensor::kernels::avx2_level() { return nullptr; }
#endif
