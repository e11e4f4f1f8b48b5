// StepWords: the words of a step, the fewest inputs that are taken apart at once, of a vector of
// outputs, and their integers: as bytes, as integers of 16 bits, or as factors of
// float32 or bfloat16 inputs.
//
// kernels/calls/quantised.h says where each integer stands, and what those of 4 bits stand for. An
// index below is known when the loop around it is unrolled.
#pragma once

#include "kernels/calls/quantised.h"
#include "kernels/simd/dot.h"
#include "kernels/simd/look_up.h"
#include "kernels/simd/pairs.h"
#include "kernels/simd/vec.h"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace vtensor::kernels {
namespace {

VTENSOR_INLINE UVec load_words(const uint32_t* words) {
  UVec v;
  __builtin_memcpy(&v, words, sizeof v);
  return v;
}

template <int kNumBits, CodebookKind kKind = CodebookKind::kEven>
struct StepWords {
  static constexpr int kBits = kNumBits;
  static constexpr bool kIsEven = kKind == CodebookKind::kEven;
  // Whether bytes_of() gives some above kMaxSmallByte.
  static constexpr bool kHasLargeBytes = kBits == 8 || kKind == CodebookKind::kLarge;

  UVec of[step_words(kBits)];

  StepWords() = default;
  VTENSOR_INLINE explicit StepWords(const uint32_t* words) {
    for (int i = 0; i < step_words(kBits); ++i) of[i] = load_words(words + i * kQuantisedColumns);
  }
};

// Four integers, those of group i of four in a word's order, in the lower six bits of each byte;
// what stands above is of others.
VTENSOR_INLINE UVec six_bits_of(const StepWords<6>& step, int i) {
  if (i < 3) return step.of[i];
  const UVec low = (step.of[0] >> 6 & 0x03030303) | (step.of[1] >> 4 & 0x0c0c0c0c);
  return low | (step.of[2] >> 2 & 0x30303030);
}

// Four of them, alone in bytes, plus zero() where that is more than none.
template <class Words>
VTENSOR_INLINE UVec bytes_of(const Words& step, const LookUp& look_up, int i) {
  if constexpr (Words::kBits == 8) {
    return step.of[0];
  } else if constexpr (Words::kBits == 6) {
    return six_bits_of(step, i) & 0x3f3f3f3f;
  } else {
    const UVec places = step.of[0] >> (4 * i) & 0x0f0f0f0f;
    if constexpr (Words::kIsEven) return places;
    return look_up.bytes(places);
  }
}

// Input k as float32.
template <class Words>
VTENSOR_INLINE Vec float_of(const Words& step, const LookUp& look_up, int k) {
  if constexpr (Words::kBits == 8) {
    const IVec integers = reinterpret_cast<IVec>(step.of[0]) << (24 - 8 * k) >> 24;
    return __builtin_convertvector(integers, Vec);
  } else if constexpr (Words::kBits == 6) {
    const UVec shifted = six_bits_of(step, k / 8 * 2 + k % 4 / 2) >> (k % 2 * 16 + k % 8 / 4 * 8);
    const IVec integers = reinterpret_cast<IVec>(shifted & 63) - 32;
    return __builtin_convertvector(integers, Vec);
  } else {
    const UVec places = step.of[0] >> (k % 2 * 16 + k / 2 * 4);
    if constexpr (Words::kIsEven && kLanes < 16) {
      return __builtin_convertvector(reinterpret_cast<IVec>(places & 15) - 8, Vec);
    }
    return look_up.floats(places);
  }
}

#if defined(__AVX512BF16__) && VTENSOR_LANES == 16
// bfloat16 of [-32, 32), by those numbers plus 32.
struct SixBitNumbers {
  uint16_t of[64];
  constexpr SixBitNumbers() : of() {
    for (int i = 0; i < 64; ++i) {
      const auto number = static_cast<float>(i - 32);
      of[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, number) >> 16);
    }
  }
};

// Inputs 2 k and 2 k + 1 as pairs of bfloat16: such integers are exact in it.
template <class Words>
VTENSOR_INLINE UVec pairs_of(const Words& step, const LookUp& look_up, int k) {
  if constexpr (Words::kBits == 8) {
    const UVec first = bits_of(float_of(step, look_up, 2 * k));
    return (first >> 16) | (bits_of(float_of(step, look_up, 2 * k + 1)) & 0xffff0000);
  } else if constexpr (Words::kBits == 6) {
    alignas(64) static constexpr SixBitNumbers kNumbers;
    const UVec shifted = six_bits_of(step, k / 4 * 2 + k % 2) >> (k % 4 / 2 * 8);
    return reinterpret_cast<UVec>(_mm512_permutex2var_epi16(_mm512_load_si512(kNumbers.of),
                                                            reinterpret_cast<__m512i>(shifted),
                                                            _mm512_load_si512(kNumbers.of + 32)));
  } else {
    const auto places = reinterpret_cast<UVec>(
        _mm512_srli_epi16(reinterpret_cast<__m512i>(step.of[0]), static_cast<unsigned>(4 * k)));
    return look_up.bfloat16s(places);
  }
}
#endif

// Two of them in 16 bits each: of 8 bits inputs k and k + 2 of four, signed; else inputs 2 k and
// 2 k + 1, plus zero().
template <class Words>
VTENSOR_INLINE SVec int16s_of(const Words& step, const LookUp& look_up, int k) {
  if constexpr (Words::kBits == 8) {
    const SVec both = reinterpret_cast<SVec>(step.of[0]);
    return k == 0 ? both << 8 >> 8 : both >> 8;
  } else if constexpr (Words::kBits == 6) {
    return reinterpret_cast<SVec>(six_bits_of(step, k / 4 * 2 + k % 2) >> (k % 4 / 2 * 8) &
                                  0x003f003f);
  } else {
    const UVec places = step.of[0] >> (4 * k) & 0x000f000f;
    if constexpr (Words::kIsEven) return reinterpret_cast<SVec>(places);
    return reinterpret_cast<SVec>(look_up.bytes(places | 0x80008000));
  }
}

}  // namespace
}  // namespace vtensor::kernels
