// Products of quantised numbers in vectors, by the instructions that each set has for them: four
// bytes times four bytes, and a word's integers as factors of float32 or bfloat16 inputs.
#pragma once

#include "kernels/simd/pairs.h"
#include "kernels/simd/vec.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vtensor::kernels {
namespace {

// ------------------------------------------------------------------------- bytes times bytes
//
// sum + x0 w0 + x1 w1 + x2 w2 + x3 w3 in each lane, exactly: x unsigned, w signed. Four and two
// products stay far below 2^31, so all ways give the same.

#if (defined(__AVX512VNNI__) && VTENSOR_LANES == 16) || (defined(__AVXVNNI__) && VTENSOR_LANES == 8)
struct SignedBytes {
  UVec of;
  SignedBytes() = default;
  VTENSOR_INLINE explicit SignedBytes(UVec words) : of(words) {}
};
struct UnsignedBytes {
  UVec of;
  UnsignedBytes() = default;
  VTENSOR_INLINE explicit UnsignedBytes(UVec words) : of(words) {}
};
VTENSOR_INLINE IVec add_dot(IVec sum, const UnsignedBytes& x, const SignedBytes& w) {
#if VTENSOR_LANES == 16
  return reinterpret_cast<IVec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum),
                                                    reinterpret_cast<__m512i>(x.of),
                                                    reinterpret_cast<__m512i>(w.of)));
#else
  return reinterpret_cast<IVec>(_mm256_dpbusd_avx_epi32(reinterpret_cast<__m256i>(sum),
                                                        reinterpret_cast<__m256i>(x.of),
                                                        reinterpret_cast<__m256i>(w.of)));
#endif
}
#else

typedef int16_t SVec __attribute__((vector_size(kLanes * 4)));

// Pairs of products of 16 bits: bytes 0 and 2 of each word, then 1 and 3.
struct SignedBytes {
  SVec even, odd;
  SignedBytes() = default;
  VTENSOR_INLINE explicit SignedBytes(UVec words)
      : even(reinterpret_cast<SVec>(words) << 8 >> 8), odd(reinterpret_cast<SVec>(words) >> 8) {}
};
struct UnsignedBytes {
  SVec even, odd;
  UnsignedBytes() = default;
  VTENSOR_INLINE explicit UnsignedBytes(UVec words)
      : even(reinterpret_cast<SVec>(words & 0x00ff00ff)),
        odd(reinterpret_cast<SVec>(words >> 8 & 0x00ff00ff)) {}
};
VTENSOR_INLINE IVec add_pairs(SVec a, SVec b) {
#if defined(__AVX512BW__) && VTENSOR_LANES == 16
  return reinterpret_cast<IVec>(
      _mm512_madd_epi16(reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
#elif defined(__AVX2__) && VTENSOR_LANES == 8
  return reinterpret_cast<IVec>(
      _mm256_madd_epi16(reinterpret_cast<__m256i>(a), reinterpret_cast<__m256i>(b)));
#else
  const IVec first = reinterpret_cast<IVec>(a), second = reinterpret_cast<IVec>(b);
  return (first << 16 >> 16) * (second << 16 >> 16) + (first >> 16) * (second >> 16);
#endif
}
VTENSOR_INLINE IVec add_dot(IVec sum, const UnsignedBytes& x, const SignedBytes& w) {
  return sum + add_pairs(x.even, w.even) + add_pairs(x.odd, w.odd);
}
#endif

// Four integers of words as bytes: all of 8 bits, or half of those of 4, which are the lower four
// of each byte, or the upper ones.
template <int kBits>
VTENSOR_INLINE UVec bytes_of(UVec words, int half) {
  return kBits == 8 ? words : words >> (4 * half) & 0x0f0f0f0f;
}

// ------------------------------------------------------------------------- integers as factors

// Input k of words of kBits, as float32; k is known when the loop around it is unrolled.
template <int kBits>
VTENSOR_INLINE Vec float_of(UVec words, int k) {
  if constexpr (kBits == 8) {
    const IVec integers = reinterpret_cast<IVec>(words) << (24 - 8 * k) >> 24;
    return __builtin_convertvector(integers, Vec);
  } else {
    const UVec shifted = words >> (k % 2 * 16 + k / 2 * 4);
#if defined(__AVX512F__) && VTENSOR_LANES == 16
    const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
    return reinterpret_cast<Vec>(
        _mm512_maskz_permutexvar_ps(0xffff, reinterpret_cast<__m512i>(shifted), table));
#else
    const IVec integers = reinterpret_cast<IVec>(shifted & 15) - 8;
    return __builtin_convertvector(integers, Vec);
#endif
  }
}

#if defined(__AVX512BF16__) && VTENSOR_LANES == 16
// bfloat16 of [-32, 32), by the lowest six bits.
struct SixBitNumbers {
  uint16_t of[64];
  constexpr SixBitNumbers() : of() {
    for (int i = 0; i < 64; ++i) {
      const auto number = static_cast<float>(i < 32 ? i : i - 64);
      of[i] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, number) >> 16);
    }
  }
};

// Inputs 2 k and 2 k + 1 of words of kBits, as pairs of bfloat16: such integers are exact in it.
template <int kBits>
VTENSOR_INLINE UVec pairs_of(UVec words, int k) {
  if constexpr (kBits == 8) {
    const UVec first = bits_of(float_of<8>(words, 2 * k));
    return (first >> 16) | (bits_of(float_of<8>(words, 2 * k + 1)) & 0xffff0000);
  } else if constexpr (kBits == 6) {
    alignas(64) static constexpr SixBitNumbers kNumbers;
    // Bytes 2 k and 2 k + 1 where the lower ones of each half are.
    const __m512i bytes = _mm512_shuffle_epi8(
        reinterpret_cast<__m512i>(words),
        _mm512_add_epi8(_mm512_set4_epi32(0x000d000c, 0x00090008, 0x00050004, 0x00010000),
                        _mm512_set1_epi8(static_cast<char>(2 * k))));
    return reinterpret_cast<UVec>(_mm512_permutex2var_epi16(_mm512_load_si512(kNumbers.of), bytes,
                                                            _mm512_load_si512(kNumbers.of + 32)));
  } else {
    alignas(64) static constexpr uint16_t kTable[32] = {
        0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0,      0x3f80, 0x4000,
        0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
        0xc000, 0xbf80, 0,      0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i table = _mm512_load_si512(kTable);  // twice: bit 4 is the next number's
    const __m512i shifted =
        _mm512_srli_epi16(reinterpret_cast<__m512i>(words), static_cast<unsigned>(4 * k));
    return reinterpret_cast<UVec>(_mm512_permutexvar_epi16(shifted, table));
  }
}
#endif

}  // namespace
}  // namespace vtensor::kernels
