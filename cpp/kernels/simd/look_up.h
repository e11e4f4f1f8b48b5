// LookUp: what places in a codebook stand for, as bytes, bfloat16 or float32.
//
// Its numbers are read once for a tile: all 16 of one form are a register, or less.
#pragma once

#include "kernels/calls/codebook.h"
#include "kernels/simd/vec.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vtensor::kernels {
namespace {

#if defined(__AVX512BW__) && VTENSOR_LANES == 16
// With masks of all lanes: gcc 12 takes the plain forms for reads of uninitialised memory (PR
// 105593).
class LookUp {
 public:
  VTENSOR_INLINE explicit LookUp(const Codebook& codebook) {
    const __m128i numbers =
        _mm_loadu_si128(reinterpret_cast<const __m128i*>(codebook.numbers().data()));
    const auto zero = static_cast<char>(codebook.zero());
    bytes_ = _mm512_maskz_broadcast_i32x4(0xffff, _mm_add_epi8(numbers, _mm_set1_epi8(zero)));
    floats_ = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, numbers));
    const __m512i upper = _mm512_maskz_srli_epi32(0xffff, reinterpret_cast<__m512i>(floats_), 16);
    bfloat16s_ = _mm512_maskz_broadcast_i64x4(0xff, _mm512_maskz_cvtepi32_epi16(0xffff, upper));
  }

  // Of each byte below 16 its number plus zero(); of 128 a 0.
  VTENSOR_INLINE UVec bytes(UVec places) const {
    return reinterpret_cast<UVec>(_mm512_shuffle_epi8(bytes_, reinterpret_cast<__m512i>(places)));
  }
  // Of the lower four bits of each lane.
  VTENSOR_INLINE Vec floats(UVec places) const {
    return reinterpret_cast<Vec>(
        _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(places), floats_));
  }
  // Of the lower four bits of each half of a lane: all numbers are exact in bfloat16.
  VTENSOR_INLINE UVec bfloat16s(UVec places) const {
    return reinterpret_cast<UVec>(
        _mm512_maskz_permutexvar_epi16(0xffffffff, reinterpret_cast<__m512i>(places), bfloat16s_));
  }

 private:
  __m512i bytes_;
  __m512 floats_;
  __m512i bfloat16s_;  // twice, as bit 4 of an index is the next number's
};

using StoredLookUp = LookUp;
template <bool kIsUsed>
VTENSOR_INLINE const LookUp& at_hand(const StoredLookUp* stored) {
  return *stored;
}
#else
class LookUp {
 public:
  VTENSOR_INLINE LookUp(UVec bytes, int32_t zero) : bytes_(bytes), zero_(zero) {}

  VTENSOR_INLINE UVec bytes(UVec places) const {
#if defined(__AVX2__) && VTENSOR_LANES == 8
    return reinterpret_cast<UVec>(
        _mm256_shuffle_epi8(reinterpret_cast<__m256i>(bytes_), reinterpret_cast<__m256i>(places)));
#else
    uint8_t numbers[sizeof bytes_], each[sizeof places];
    __builtin_memcpy(numbers, &bytes_, sizeof numbers);
    __builtin_memcpy(each, &places, sizeof each);
    for (uint8_t& byte : each) byte = byte < 16 ? numbers[byte] : 0;
    __builtin_memcpy(&places, each, sizeof each);
    return places;
#endif
  }
  VTENSOR_INLINE Vec floats(UVec places) const {
    const UVec numbers = bytes((places & 15) | 0x80808000);
    return __builtin_convertvector(reinterpret_cast<IVec>(numbers) - zero_, Vec);
  }

 private:
  UVec bytes_;
  int32_t zero_;
};

// In memory: a register of 16 that it stayed in would be one of the sums'.
struct StoredLookUp {
  alignas(32) uint8_t bytes[kLanes * 4];
  int32_t zero;

  VTENSOR_INLINE explicit StoredLookUp(const Codebook& codebook) : zero(codebook.zero()) {
    for (size_t i = 0; i < sizeof bytes; ++i) {
      bytes[i] = static_cast<uint8_t>(codebook.numbers()[i % 16] + zero);
    }
  }
};
template <bool kIsUsed>
VTENSOR_INLINE LookUp at_hand(const StoredLookUp* stored) {
  const uint8_t* from = stored->bytes;
  if constexpr (kIsUsed) __asm__ volatile("" : "+r"(from));  // gcc would load it once for all
  UVec bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return LookUp(bytes, stored->zero);
}
#endif

}  // namespace
}  // namespace vtensor::kernels
