// AVX-512 and its bfloat16 numbers, with AMX tiles for products of bfloat16 matrices; CMake
// compiles this file with them on x86-64 if the compiler knows them, elsewhere it defines nothing.
#include "kernels/isa/isa.h"

#if defined(__AMX_BF16__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_isa.h"

namespace vtensor::kernels {

const Isa* amx_isa() {
  static constexpr Isa kIsa = make_isa("amx");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Isa* vtensor::kernels::amx_isa() { return nullptr; }
#endif
