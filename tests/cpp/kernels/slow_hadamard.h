// slow_hadamard: numbers times Hadamard matrices, as their definition says.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace vtensor::kernels {

// Each `block` of them, a power of two, times `factor` and then the matrix of 1 and -1.
inline std::vector<float> slow_hadamard(std::vector<float> x, int64_t block, float factor) {
  for (float& number : x) number *= factor;
  for (size_t distance = 1; distance < static_cast<size_t>(block); distance *= 2) {
    for (size_t i = 0; i < x.size(); ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
  return x;
}

}  // namespace vtensor::kernels
