// Quantised weights on every CPU: vectors of four floats, compiled for the target's baseline.
#define VTENSOR_LANES 4
#include "kernels/isa/make_quantised.h"

namespace vtensor::kernels {

const QuantisedIsa* portable_quantised() {
  static constexpr QuantisedIsa kIsa = make_quantised("portable");
  return &kIsa;
}

}  // namespace vtensor::kernels
