// Four bytes times four bytes in vectors, by the instructions that each set has for them.
//
// sum + x0 w0 + x1 w1 + x2 w2 + x3 w3 in each lane, exactly: x unsigned, w signed. Four and two
// products stay far below 2^31, so all ways give the same. And two integers of 16 bits times two,
// all signed.
#pragma once

#include "kernels/simd/vec.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace vtensor::kernels {
namespace {

typedef int16_t SVec __attribute__((vector_size(kLanes * 4)));

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
VTENSOR_INLINE IVec add_int16s(IVec sum, SVec x, SVec w) {
#if VTENSOR_LANES == 16
  return reinterpret_cast<IVec>(_mm512_dpwssd_epi32(
      reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(w)));
#else
  return reinterpret_cast<IVec>(_mm256_dpwssd_avx_epi32(
      reinterpret_cast<__m256i>(sum), reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(w)));
#endif
}
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
VTENSOR_INLINE IVec add_int16s(IVec sum, SVec x, SVec w) {
  sum += add_pairs(x, w);
#if defined(__AVX2__)
  __asm__("" : "+v"(sum));  // gcc would put a step's products on the stack, and add them at its end
#endif
  return sum;
}
VTENSOR_INLINE IVec add_dot(IVec sum, const UnsignedBytes& x, const SignedBytes& w) {
  return add_int16s(add_int16s(sum, x.even, w.even), x.odd, w.odd);
}
#endif

// The same of unsigned bytes up to kMaxSmallByte, sums of whose pairs of products fit 16 bits.
VTENSOR_INLINE IVec add_small_dot(IVec sum, UVec x, UVec w) {
#if defined(__AVX512BW__) && !defined(__AVX512VNNI__) && VTENSOR_LANES == 16
  const __m512i pairs =
      _mm512_maddubs_epi16(reinterpret_cast<__m512i>(x), reinterpret_cast<__m512i>(w));
  return add_int16s(sum, reinterpret_cast<SVec>(pairs), SVec{} + int16_t{1});
#elif defined(__AVX2__) && !defined(__AVXVNNI__) && VTENSOR_LANES == 8
  const __m256i pairs =
      _mm256_maddubs_epi16(reinterpret_cast<__m256i>(x), reinterpret_cast<__m256i>(w));
  return add_int16s(sum, reinterpret_cast<SVec>(pairs), SVec{} + int16_t{1});
#else
  return add_dot(sum, UnsignedBytes(x), SignedBytes(w));
#endif
}

}  // namespace
}  // namespace vtensor::kernels
