// Product: a linear layer's weight in either of its formats.
//
// Plain values: who makes one sees to it that its addresses live as long.
#pragma once

#include <cstdint>

#include "kernels/calls/quantised.h"

namespace vtensor::kernels {

// No words: `panels` is the weight.
struct Product {
  const void* panels = nullptr;
  QuantisedWeight quantised;
  const void* bias = nullptr;  // [columns] or none
  int64_t depth = 0;
  int64_t columns = 0;  // a multiple of kHeadDimStep
};

}  // namespace vtensor::kernels
