// to_bytes, to_byte_groups, to_int16s: inputs of quantised weights as integers, to nearest, ties to
// even.
//
// Maxima, and products of single numbers that are rounded before anything else is done with them:
// the same bits at all levels.
#pragma once

#include "kernels/calls/quantised.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

template <int H = kLanes / 2>
VTENSOR_INLINE int32_t max_lane(IVec v) {
  const auto swapped =
      shuffle<SwapIndex<H>>(reinterpret_cast<Vec>(v), reinterpret_cast<Vec>(v), Lanes{});
  const auto others = reinterpret_cast<IVec>(swapped);
  const IVec best = others > v ? others : v;
  if constexpr (H == 1) {
    return best[0];
  } else {
    return max_lane<H / 2>(best);
  }
}

// The bits of the largest magnitude; as integers, where a NaN is more than all else.
template <class T>
int32_t largest_magnitude(const T* x, int64_t count) {
  IVec largest{};
  const auto add = [&](Vec v) {
    const auto magnitudes = reinterpret_cast<IVec>(bits_of(v) & 0x7fffffff);
    largest = magnitudes > largest ? magnitudes : largest;
  };
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) add(load(x + k));
  if (k < count) add(load_few(x + k, count - k));
  return max_lane(largest);
}

// x times `factor`, which must fit.
template <class T>
void scale_to_int16s(const T* x, int64_t count, float factor, int16_t* output) {
  int64_t k = 0;
  for (; k + kLanes <= count; k += kLanes) {
    store_halves(output + k, reinterpret_cast<UVec>(round_to_integers(load(x + k) * factor)));
  }
  if (k == count) return;
  int16_t few[kLanes];
  const IVec integers = round_to_integers(load_few(x + k, count - k) * factor);
  store_halves(few, reinterpret_cast<UVec>(integers));
  for (int i = 0; k < count; ++k, ++i) output[k] = few[i];
}

// Bytes are zero + x / scale, scale: the largest magnitude / 127, which is returned.
template <class T>
float to_bytes(const T* x, int64_t count, uint8_t zero, uint8_t* bytes) {
  const int32_t largest_bits = largest_magnitude(x, count);
  float largest;
  __builtin_memcpy(&largest, &largest_bits, sizeof largest);
  // Of numbers with no finite scale nothing can be told: 0 times infinity is NaN below.
  const float factor = 127 / largest, scale = largest / 127;
  if (!(factor > 0) || factor > 0x1p126F) {  // NaN, infinity; zero, or next to it
    for (int64_t k = 0; k < count; ++k) bytes[k] = zero;
    if (largest < 1) return 0;
    return __builtin_isfinite(largest) ? scale : __builtin_nanf("");
  }
  constexpr int64_t kBlock = 64;
  for (int64_t first = 0; first < count; first += kBlock) {
    int16_t integers[kBlock];
    const auto narrow = [&](int64_t n) {
      scale_to_int16s(x + first, n, factor, integers);
      for (int64_t k = 0; k < n; ++k) bytes[first + k] = static_cast<uint8_t>(integers[k] + zero);
    };
    if (first + kBlock <= count) {
      narrow(kBlock);
    } else {
      narrow(count - first);
    }
  }
  return scale;
}

// Each eight of them in a step's order.
inline void order_eights(uint8_t* bytes, int64_t count) {
  for (int64_t k = 0; k < count; k += 8) {
    uint64_t eight;
    __builtin_memcpy(&eight, bytes + k, sizeof eight);
    eight = order_bytes(eight);
    __builtin_memcpy(bytes + k, &eight, sizeof eight);
  }
}

// As signed bytes: `piece` inputs with a scale of their own, and the sums of each group of bytes.
// piece: a multiple of group.
template <class T>
void to_byte_groups(const T* x, int64_t depth, int64_t piece, int64_t group, bool in_order,
                    uint8_t* bytes, float* scales, int32_t* sums) {
  for (int64_t k = 0; k < depth; k += piece) *scales++ = to_bytes(x + k, piece, 0, bytes + k);
  for (int64_t k = 0; k < depth; k += group) {
    int32_t sum = 0;
    for (int64_t i = k; i < k + group; ++i) sum += static_cast<int8_t>(bytes[i]);
    *sums++ = sum;
  }
  if (in_order) order_eights(bytes, depth);
}

// A power of two, and what takes numbers to multiples of it.
struct Unit {
  float factor;
  float unit;

  // From the bits of the largest magnitude, which it takes to 2^14 and more.
  explicit Unit(int32_t largest_bits) {
    constexpr int32_t kBias = 127, kLargest = 14, kSmallest = kBias - 100, kOdd = 255;
    const int32_t exponent = largest_bits >> 23;
    const bool counts = exponent >= kSmallest && exponent < kOdd;
    const int32_t factor_bits = counts ? (2 * kBias + kLargest - exponent) << 23 : 0;
    const int32_t unit_bits = exponent == kOdd ? 0x7fc00000
                              : counts         ? (exponent - kLargest) << 23
                                               : 0;
    __builtin_memcpy(&factor, &factor_bits, sizeof factor);
    __builtin_memcpy(&unit, &unit_bits, sizeof unit);
  }
};

// x / unit; returns the unit.
template <class T>
float to_int16s(const T* x, int64_t count, int16_t* output) {
  const Unit of(largest_magnitude(x, count));
  if (of.factor == 0) {
    for (int64_t k = 0; k < count; ++k) output[k] = 0;
  } else {
    scale_to_int16s(x, count, of.factor, output);
  }
  return of.unit;
}

}  // namespace
}  // namespace vtensor::kernels
