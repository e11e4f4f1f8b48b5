// KV as it stands in the arena: bytes with a scale behind the numbers of a head (KVFormat), how
// they are read, and how they are made of the numbers that come.
//
// The same bytes at every level: a scale is max |x| / kLargest, rounded once; a byte the nearest
// one to x * (kLargest / max |x|), rounded once, too.
#pragma once

#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

template <class S>
constexpr bool kHasScale = false;
template <>
constexpr bool kHasScale<Int8> = true;
template <>
constexpr bool kHasScale<Float8> = true;

template <class S>
constexpr float kLargest = 127;
template <>
constexpr float kLargest<Float8> = 448;
// What load() gives is the number that stands there divided by this.
template <class S>
constexpr float kLoadUnit = 1;
template <>
constexpr float kLoadUnit<Float8> = 256;
// Heads whose numbers are all smaller are stored as zeros: their scale would not be exact.
constexpr float kSmallestMaximum = 0x1p-100F;

// By what load()'s numbers are to be multiplied; 1 for plain ones.
template <class S>
VTENSOR_INLINE float scale_of(const S* row, int head_dim) {
  if constexpr (!kHasScale<S>) {
    return 1;
  } else {
    float scale;
    __builtin_memcpy(&scale, row + head_dim, sizeof scale);
    return scale * kLoadUnit<S>;
  }
}

// By way of half precision, whose exponent is larger by 8 for the same bits.
#if defined(__F16C__) && VTENSOR_LANES == 16
VTENSOR_INLINE Vec load(const Float8* p) {
  const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(-0x4001));
  return reinterpret_cast<Vec>(_mm512_maskz_cvtph_ps(0xffff, half));
}
#elif defined(__F16C__) && VTENSOR_LANES == 8
VTENSOR_INLINE Vec load(const Float8* p) {
  const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m128i half = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(-0x4001));
  return reinterpret_cast<Vec>(_mm256_cvtph_ps(half));
}
#else
VTENSOR_INLINE Vec load(const Float8* p) {
  ByteVec bytes;
  __builtin_memcpy(&bytes, p, sizeof bytes);
  const UVec b = reinterpret_cast<UVec>(__builtin_convertvector(bytes, IVec));
  return from_bits(((b & 0x7f) << 20) | (b & 0x80000000)) * splat(0x1p112F);
}
#endif

VTENSOR_INLINE IVec bytes_of(Vec v, const Int8* /*format*/) { return round_to_integers(v); }

// Nearest e4m3 numbers, halves to even; |v| below 464. Multiples of 2^-9 come by an addition.
VTENSOR_INLINE IVec bytes_of(Vec v, const Float8* /*format*/) {
  const UVec bits = bits_of(v) & 0x7fffffff;
  const Vec magic = splat(0x1p14F);
  const UVec small = bits_of(from_bits(bits) + magic) - bits_of(magic);
  const UVec normal = ((bits + 0x7ffff + ((bits >> 20) & 1)) >> 20) - (120 << 3);
  const UVec magnitude = bits < (121U << 23) ? small : normal;
  return reinterpret_cast<IVec>(magnitude | ((bits_of(v) >> 24) & 0x80));
}

// A head with a number that is not finite gets a scale that is none either: what reads it shows it.
template <class T, class S>
void quantise(const void* numbers, void* row, int width) {
  const T* from = static_cast<const T*>(numbers);
  S* to = static_cast<S*>(row);
  Vec largest = {}, strange = {};
  for (int i = 0; i < width; i += kLanes) {
    const Vec x = load(from + i);
    largest = max(from_bits(bits_of(x) & 0x7fffffff), largest);
    strange += x * 0.0F;  // NaN where x is not finite
  }
  const float maximum = max_lane(largest), odd = sum_lanes(strange);
  const bool counts = odd == 0 && maximum >= kSmallestMaximum;
  const float factor = counts ? kLargest<S> / maximum : 0;
  const float scale = counts ? maximum / kLargest<S> : odd;
  for (int i = 0; i < width; i += kLanes) {
    const Vec x = counts ? load(from + i) * factor : Vec{};
    const ByteVec bytes = __builtin_convertvector(bytes_of(x, to), ByteVec);
    __builtin_memcpy(to + i, &bytes, sizeof bytes);
  }
  __builtin_memcpy(to + width, &scale, sizeof scale);
}

}  // namespace
}  // namespace vtensor::kernels
