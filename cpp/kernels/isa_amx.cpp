// AVX-512 and its bfloat16 numbers, with AMX tiles for products of bfloat16 matrices; CMake
// compiles this file with them on x86-64 if the compiler knows them, elsewhere it defines nothing.
#include "kernels/attention/task.h"

#if defined(__AMX_BF16__)
#define VTENSOR_LANES 16
#include "kernels/simd/kernel.h"

namespace vtensor::kernels {

const Level* amx_level() {
  static constexpr Level kLevel = make_level("amx");
  return &kLevel;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Level* vtensor::kernels::amx_level() { return nullptr; }
#endif
