// Pairs of bfloat16 numbers, one in each half of a 32-bit word, and the sums of their products.
//
// AVX512_BF16 multiplies and adds two pairs in a lane at once, in float32: twice as many products
// per instruction as in float32, and nothing is widened first.
#pragma once

#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// Not where AMX is: Intel's CPUs multiply pairs no faster than float32, and tiles are faster.
#if defined(__AVX512BF16__) && !defined(__AMX_BF16__) && VTENSOR_LANES == 16
#define VTENSOR_HAS_PAIRS 1
constexpr bool kHasPairs = true;

// Numbers of kLanes pairs.
constexpr int kPairLanes = 2 * kLanes;

VTENSOR_INLINE UVec load_pairs(const void* p) {
  UVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

VTENSOR_INLINE uint32_t load_pair(const void* p) {
  uint32_t pair;
  __builtin_memcpy(&pair, p, sizeof pair);
  return pair;
}

// sum + x0 w0 + x1 w1 in each lane.
VTENSOR_INLINE Vec add_products(Vec sum, UVec x, UVec w) {
  return reinterpret_cast<Vec>(_mm512_dpbf16_ps(
      reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(x), reinterpret_cast<__m512bh>(w)));
}

VTENSOR_INLINE Vec add_products(Vec sum, uint32_t x, UVec w) {
  return add_products(sum, UVec{} + x, w);
}

// Numbers i of both, side by side, for i in [0, kLanes) or from kLanes on.
template <bool kSecondHalf>
VTENSOR_INLINE UVec pair_up(UVec even, UVec odd) {
  struct Index {
    uint16_t of[kPairLanes];
    constexpr Index() : of() {
      for (int i = 0; i < kPairLanes; ++i) {
        of[i] = static_cast<uint16_t>(i / 2 + i % 2 * kPairLanes + (kSecondHalf ? kLanes : 0));
      }
    }
  };
  alignas(64) static constexpr Index kIndex;
  return reinterpret_cast<UVec>(_mm512_permutex2var_epi16(reinterpret_cast<__m512i>(even),
                                                          _mm512_load_si512(kIndex.of),
                                                          reinterpret_cast<__m512i>(odd)));
}

// Numbers, rounded to the nearest, those of `first` before those of `second`.
VTENSOR_INLINE UVec round_in_order(Vec first, Vec second) {
  const __m512bh both =
      _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first));
  return reinterpret_cast<UVec>(both);
}

// Numbers, rounded to the nearest: even ones in the lower halves.
VTENSOR_INLINE UVec round_to_pairs(Vec even, Vec odd) {
  struct Index {
    uint16_t of[kPairLanes];
    constexpr Index() : of() {
      for (int i = 0; i < kPairLanes; ++i) of[i] = static_cast<uint16_t>(i / 2 + i % 2 * kLanes);
    }
  };
  alignas(64) static constexpr Index kIndex;
  return reinterpret_cast<UVec>(
      _mm512_maskz_permutexvar_epi16(0xffffffff, _mm512_load_si512(kIndex.of),
                                     reinterpret_cast<__m512i>(round_in_order(even, odd))));
}
#else
constexpr bool kHasPairs = false;
#endif

}  // namespace
}  // namespace vtensor::kernels
