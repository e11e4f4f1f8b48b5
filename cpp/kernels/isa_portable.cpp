// The level that every CPU has: vectors of four floats, compiled for the target's baseline.
#define VTENSOR_LANES 4
#include "kernels/simd/kernel.h"

namespace vtensor::kernels {

const Level* portable_level() {
  static constexpr Level kLevel = make_level("portable");
  return &kLevel;
}

}  // namespace vtensor::kernels
