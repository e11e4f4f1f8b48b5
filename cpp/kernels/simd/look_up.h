// look_up: what bytes that are places in a codebook stand for, and its numbers in other formats.
#pragma once

#include "kernels/calls/codebook.h"
#include "kernels/simd/vec.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vtensor::kernels {
namespace {

// The numbers plus zero_of(), from the lowest byte on, for each 128 bits of a vector.
template <Codebook kCodebook>
struct UnsignedNumbers {
  uint8_t of[kLanes * 4];
  constexpr UnsignedNumbers() : of() {
    for (size_t i = 0; i < sizeof of; ++i) {
      of[i] = static_cast<uint8_t>(numbers_of(kCodebook)[i % 16] + zero_of(kCodebook));
    }
  }
};

// Of each byte below 16 its number plus zero_of(); of 128 a 0.
template <Codebook kCodebook>
VTENSOR_INLINE UVec look_up(UVec places) {
  alignas(64) static constexpr UnsignedNumbers<kCodebook> kNumbers;
#if defined(__AVX512BW__) && VTENSOR_LANES == 16
  return reinterpret_cast<UVec>(
      _mm512_shuffle_epi8(_mm512_load_si512(kNumbers.of), reinterpret_cast<__m512i>(places)));
#elif defined(__AVX2__) && VTENSOR_LANES == 8
  return reinterpret_cast<UVec>(
      _mm256_shuffle_epi8(_mm256_load_si256(reinterpret_cast<const __m256i*>(kNumbers.of)),
                          reinterpret_cast<__m256i>(places)));
#else
  uint8_t bytes[sizeof places];
  __builtin_memcpy(bytes, &places, sizeof places);
  for (uint8_t& byte : bytes) byte = byte < 16 ? kNumbers.of[byte] : 0;
  __builtin_memcpy(&places, bytes, sizeof places);
  return places;
#endif
}

template <Codebook kCodebook>
struct FloatNumbers {
  float of[16];
  constexpr FloatNumbers() : of() {
    for (size_t i = 0; i < 16; ++i) of[i] = static_cast<float>(numbers_of(kCodebook)[i]);
  }
};

// bfloat16, in which all of them are exact; twice, as bit 4 of an index is the next number's.
template <Codebook kCodebook>
struct BFloat16Numbers {
  uint16_t of[32];
  constexpr BFloat16Numbers() : of() {
    for (size_t i = 0; i < 32; ++i) {
      const auto number = static_cast<float>(numbers_of(kCodebook)[i % 16]);
      of[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, number) >> 16);
    }
  }
};

}  // namespace
}  // namespace vtensor::kernels
