// AVX-512 with VNNI's products of bytes; CMake compiles this file with them on x86-64 if the
// compiler knows them, elsewhere it defines nothing.
#include "kernels/isa/isa.h"

#if defined(__AVX512VNNI__)
#define VTENSOR_LANES 16
#include "kernels/isa/make_isa.h"

namespace vtensor::kernels {

const Isa* avx512_vnni_isa() {
  static constexpr Isa kIsa = make_isa("avx512_vnni");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
const vtensor::kernels::Isa* vtensor::kernels::avx512_vnni_isa() { return nullptr; }
#endif
