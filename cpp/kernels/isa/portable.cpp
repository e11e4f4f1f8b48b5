// The instruction set that every CPU has: vectors of four floats, compiled for the target's
// baseline.
#define VTENSOR_LANES 4
#include "kernels/isa/make_isa.h"

namespace vtensor::kernels {

const Isa* portable_isa() {
  static constexpr Isa kIsa = make_isa("portable");
  return &kIsa;
}

}  // namespace vtensor::kernels
