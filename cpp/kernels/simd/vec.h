// Vec: kLanes floats, in the vector extensions of GCC and Clang, whatever the instruction set.
//
// Each isa/<name>.cpp sets VTENSOR_LANES, includes these headers and is compiled with its own
// target options. Everything here therefore has internal linkage: nothing compiled for one
// instruction set may be linked into another one.
#pragma once

#include <cstdint>
#include <utility>
#if defined(__F16C__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#include "kernels/dtype.h"

#define VTENSOR_INLINE [[gnu::always_inline]] inline

namespace vtensor::kernels {
namespace {

constexpr int kLanes = VTENSOR_LANES;

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t HVec __attribute__((vector_size(kLanes * 2)));
typedef int8_t ByteVec __attribute__((vector_size(kLanes)));

constexpr float kMinusInfinity = -__builtin_inff();

VTENSOR_INLINE Vec splat(float x) { return x - Vec{}; }
VTENSOR_INLINE UVec bits_of(Vec v) { return reinterpret_cast<UVec>(v); }
VTENSOR_INLINE Vec from_bits(UVec v) { return reinterpret_cast<Vec>(v); }
// a > b ? a : b
#if defined(__AVX512F__) && VTENSOR_LANES == 16
VTENSOR_INLINE Vec max(Vec a, Vec b) {  // gcc 12 makes a comparison and a blend of it
  return reinterpret_cast<Vec>(
      _mm512_maskz_max_ps(0xffff, reinterpret_cast<__m512>(a), reinterpret_cast<__m512>(b)));
}
#else
VTENSOR_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
#endif

// ------------------------------------------------------------------------- loads and stores

VTENSOR_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

VTENSOR_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof v); }

VTENSOR_INLINE UVec load_halves(const void* p) {
  HVec h;
  __builtin_memcpy(&h, p, sizeof h);
  return __builtin_convertvector(h, UVec);
}

VTENSOR_INLINE void store_halves(void* p, UVec v) {
  const HVec h = __builtin_convertvector(v, HVec);
  __builtin_memcpy(p, &h, sizeof h);
}

VTENSOR_INLINE Vec load(const BFloat16* p) { return from_bits(load_halves(p) << 16); }

// Round to nearest even; a NaN stays one.
#if defined(__AVX512BF16__) && VTENSOR_LANES == 16
VTENSOR_INLINE void store(BFloat16* p, Vec v) {
  const __m256bh h = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  __builtin_memcpy(p, &h, sizeof h);
}
#else
VTENSOR_INLINE void store(BFloat16* p, Vec v) {
  const UVec bits = bits_of(v);
  const UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  store_halves(p, v == v ? rounded : UVec{} + 0x7fc0);
}
#endif

#if defined(__F16C__) && VTENSOR_LANES == 16
// With a mask of all lanes: gcc 12 takes the plain forms for reads of uninitialised memory (PR
// 105593).
VTENSOR_INLINE Vec load(const Float16* p) {
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
}
VTENSOR_INLINE void store(Float16* p, Vec v) {
  _mm256_storeu_si256(
      reinterpret_cast<__m256i*>(p),
      _mm512_maskz_cvtps_ph(0xffff, reinterpret_cast<__m512>(v), _MM_FROUND_TO_NEAREST_INT));
}
#elif defined(__F16C__) && VTENSOR_LANES == 8
VTENSOR_INLINE Vec load(const Float16* p) {
  return reinterpret_cast<Vec>(
      _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
VTENSOR_INLINE void store(Float16* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph(reinterpret_cast<__m256>(v), _MM_FROUND_TO_NEAREST_INT));
}
#else
// Exponent and mantissa move to their places; a factor of 2^112 repairs the exponent's bias, of
// subnormal numbers too.
VTENSOR_INLINE Vec load(const Float16* p) {
  const UVec h = load_halves(p);
  const UVec magnitude = h & 0x7fff;
  const UVec finite = bits_of(from_bits(magnitude << 13) * splat(0x1p112F));
  const UVec special = (magnitude << 13) | 0x7f800000;
  return from_bits((magnitude >= 0x7c00 ? special : finite) | ((h & 0x8000) << 16));
}
// Round to nearest even. Too large becomes infinity; subnormal numbers are rounded by an addition.
VTENSOR_INLINE void store(Float16* p, Vec v) {
  const UVec bits = bits_of(v) & 0x7fffffff;
  const UVec sign = (bits_of(v) >> 16) & 0x8000;
  const UVec normal = (bits - (112U << 23) + 0xfff + ((bits >> 13) & 1)) >> 13;
  const UVec subnormal = bits_of(from_bits(bits) + splat(0.5F)) - (126U << 23);
  const UVec special = bits > 0x7f800000 ? UVec{} + 0x7e00 : UVec{} + 0x7c00;
  UVec half = bits < (113U << 23) ? subnormal : normal;
  half = bits >= (143U << 23) ? special : half;
  store_halves(p, half | sign);
}
#endif

// GCC takes its own conversion of vectors apart.
#if defined(__AVX512F__) && VTENSOR_LANES == 16
VTENSOR_INLINE Vec load(const Int8* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Vec>(
      _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, bytes)));
}
VTENSOR_INLINE Vec load(const PowerOf2* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return from_bits(reinterpret_cast<UVec>(_mm512_maskz_cvtepu8_epi32(0xffff, bytes)) << 23);
}
#elif defined(__AVX2__) && VTENSOR_LANES == 8
VTENSOR_INLINE Vec load(const Int8* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return reinterpret_cast<Vec>(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)));
}
VTENSOR_INLINE Vec load(const PowerOf2* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  return from_bits(reinterpret_cast<UVec>(_mm256_cvtepu8_epi32(bytes)) << 23);
}
#else
VTENSOR_INLINE Vec load(const Int8* p) {
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, IVec), Vec);
}
VTENSOR_INLINE Vec load(const PowerOf2* p) {
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  const IVec exponents = __builtin_convertvector(bytes, IVec);
  return from_bits((reinterpret_cast<UVec>(exponents) & 0xff) << 23);
}
#endif

// The first `count` numbers, and zeros behind them.
template <class T>
VTENSOR_INLINE Vec load_few(const T* p, int64_t count) {
  T few[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) few[i] = p[i];
  return load(few);
}

// ------------------------------------------------------------------------- shuffles

using Lanes = std::make_integer_sequence<int, kLanes>;

// Lane i of the result is lane Index::of(i) of the 2 * kLanes lanes (a, b).
template <class Index, int... I>
VTENSOR_INLINE Vec shuffle(Vec a, Vec b, std::integer_sequence<int, I...> /*lanes*/) {
#if defined(__clang__)
  return __builtin_shufflevector(a, b, Index::of(I)...);
#else
  return __builtin_shuffle(a, b, IVec{Index::of(I)...});
#endif
}

// Of each pair of blocks of H lanes, the first one of a and the first one of b, or both second
// ones.
template <int H, bool kSecond>
struct ZipIndex {
  static constexpr int of(int lane) {
    const bool from_b = (lane & H) != 0;
    if (kSecond) return from_b ? lane + kLanes : lane + H;
    return from_b ? lane - H + kLanes : lane;
  }
};

template <int H, bool kSecond>
VTENSOR_INLINE Vec zip_blocks(Vec a, Vec b) {
  return shuffle<ZipIndex<H, kSecond>>(a, b, Lanes{});
}

template <int H>
struct SwapIndex {
  static constexpr int of(int lane) { return lane ^ H; }
};

// v: N vectors, used up. In each block of N lanes of the result, lane j is the sum of that block of
// v[j].
template <int N = kLanes, int H = 1, class V>
VTENSOR_INLINE V sums_of(V* v) {
  if constexpr (H == N) {
    return v[0];
  } else {
#pragma GCC unroll 16
    for (int i = 0; i < N; i += 2 * H) {
      const Vec a = reinterpret_cast<Vec>(v[i]), b = reinterpret_cast<Vec>(v[i + H]);
      v[i] = reinterpret_cast<V>(zip_blocks<H, false>(a, b)) +
             reinterpret_cast<V>(zip_blocks<H, true>(a, b));
    }
    return sums_of<N, 2 * H>(v);
  }
}

// v: kLanes vectors, the rows of a square, transposed in place.
template <int H = 1>
VTENSOR_INLINE void transpose(Vec* v) {
  if constexpr (H < kLanes) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
      if ((i & H) != 0) continue;
      const Vec first = zip_blocks<H, false>(v[i], v[i + H]);
      v[i + H] = zip_blocks<H, true>(v[i], v[i + H]);
      v[i] = first;
    }
    transpose<2 * H>(v);
  }
}

template <int H = kLanes / 2>
VTENSOR_INLINE float max_lane(Vec v) {
  const Vec best = max(v, shuffle<SwapIndex<H>>(v, v, Lanes{}));
  if constexpr (H == 1) {
    return best[0];
  } else {
    return max_lane<H / 2>(best);
  }
}

template <int H = kLanes / 2>
VTENSOR_INLINE float sum_lanes(Vec v) {
  const Vec sum = v + shuffle<SwapIndex<H>>(v, v, Lanes{});
  if constexpr (H == 1) {
    return sum[0];
  } else {
    return sum_lanes<H / 2>(sum);
  }
}

// ------------------------------------------------------------------------- functions

// Halves to even; |v| below 2^31. By no addition, which could become one instruction with a product
// before, and that rounds once.
VTENSOR_INLINE IVec round_to_integers(Vec v) {
#if defined(__AVX512F__) && VTENSOR_LANES == 16
  return reinterpret_cast<IVec>(_mm512_maskz_cvtps_epi32(0xffff, reinterpret_cast<__m512>(v)));
#elif defined(__AVX2__) && VTENSOR_LANES == 8
  return reinterpret_cast<IVec>(_mm256_cvtps_epi32(reinterpret_cast<__m256>(v)));
#elif defined(__SSE2__) && VTENSOR_LANES == 4
  return reinterpret_cast<IVec>(_mm_cvtps_epi32(reinterpret_cast<__m128>(v)));
#else
  IVec integers;
  for (int i = 0; i < kLanes; ++i) integers[i] = static_cast<int32_t>(__builtin_nearbyintf(v[i]));
  return integers;
#endif
}

// 2^x for x <= 127, relative error below 2e-7; 0 below -126 and for minus infinity.
// x = n + r, n an integer, |r| <= 1/2; a minimax polynomial gives 2^r, n goes to the exponent.
VTENSOR_INLINE Vec exp2(Vec x) {
  const Vec magic = splat(0x1.8p23F);  // adding it rounds to an integer, in the low bits
  const Vec shifted = x + magic;
  const Vec r = x - (shifted - magic);
  Vec p = splat(0.0013276472454890609F);
  p = p * r + 0.009675540961325169F;
  p = p * r + 0.05550713092088699F;
  p = p * r + 0.24022120237350464F;
  p = p * r + 0.6931469440460205F;
  p = p * r + 1.0F;
  const Vec power = from_bits(bits_of(p) + (bits_of(shifted) << 23));
  return x < splat(-126.0F) ? Vec{} : power;
}

VTENSOR_INLINE float exp2(float x) { return exp2(splat(x))[0]; }

// tanh(x) = sign(x) (1 - 2 / (e^(2 |x|) + 1))
VTENSOR_INLINE Vec tanh(Vec x) {
  constexpr float kTwoLog2e = 2 * 1.4426950408889634F;
  const UVec sign = bits_of(x) & 0x80000000;
  const Vec magnitude = from_bits(bits_of(x) & 0x7fffffff);
  const Vec bounded = magnitude > splat(40.0F) ? splat(40.0F) : magnitude;
  const Vec power = exp2(bounded * kTwoLog2e);
  const Vec result = 1.0F - 2.0F / (power + 1.0F);
  return from_bits(bits_of(result) | sign);
}

}  // namespace
}  // namespace vtensor::kernels
