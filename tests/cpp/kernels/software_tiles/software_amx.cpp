// AMX's kernels, compiled for tiles in software. CMake compiles this file as isa/amx.cpp and
// isa/quantised_amx.cpp where the compiler knows the instructions; elsewhere it defines nothing.
#include "tests/cpp/kernels/software_tiles/software_amx.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define VTENSOR_LANES 16
#include "tests/cpp/kernels/software_tiles/software_tiles.h"
// After the tiles.
#include "kernels/isa/make_amx_quantised.h"
#include "kernels/isa/make_isa.h"

namespace vtensor::kernels {

const Isa* software_amx_isa() {
  static constexpr Isa kIsa = make_isa("software_amx");
  return &kIsa;
}

const QuantisedIsa* software_amx_quantised() {
  static const QuantisedIsa kIsa = make_amx_quantised("software_amx");
  return &kIsa;
}

}  // namespace vtensor::kernels
#else
namespace vtensor::kernels {
const Isa* software_amx_isa() { return nullptr; }
const QuantisedIsa* software_amx_quantised() { return nullptr; }
}  // namespace vtensor::kernels
#endif
