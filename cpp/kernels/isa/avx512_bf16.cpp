// AVX-512 with products of bfloat16 pairs and of bytes; CMake compiles this file with them on
// x86-64 if the compiler knows them, elsewhere it defines nothing.
#include "kernels/isa/isa.h"

#if defined(__AVX512BF16__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_isa.h"

namespace vtensor::kernels {

const Isa* avx512_bf16_isa() {
  static constexpr Isa kIsa = make_isa("avx512_bf16");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Isa* vtensor::kernels::avx512_bf16_isa() { return nullptr; }
#endif
