// Codebook: the 16 numbers that weights of 4 bits stand for.
//
// All are integers of a byte, so that any kernel can multiply them: scales make them what they are.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace vtensor::kernels {

enum class Codebook {
  kEven,  // -8 to 7
  kE2m1,  // twice the numbers of MXFP4 (OCP Microscaling Formats Specification 1.0, 5.3.3)
  kIq4    // of ggml's IQ4_NL and IQ4_XS
};
inline constexpr size_t kNumCodebooks = 3;
// Python's, by Codebook; "" where none is said.
inline constexpr const char* kCodebookNames[kNumCodebooks] = {"", "E2M1", "IQ4"};

using CodebookNumbers = std::array<int8_t, 16>;

constexpr CodebookNumbers numbers_of(Codebook codebook) {
  switch (codebook) {
    case Codebook::kE2m1:
      return {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    case Codebook::kIq4:
      return {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    default:
      return {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
  }
}

// What is added to them where bytes are multiplied that must not be negative.
constexpr int32_t zero_of(Codebook codebook) {
  return codebook == Codebook::kIq4 ? 128 : codebook == Codebook::kE2m1 ? 12 : 8;
}

}  // namespace vtensor::kernels
