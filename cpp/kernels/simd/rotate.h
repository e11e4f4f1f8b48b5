// rotate: a row times a Hadamard matrix, in place (Sylvester's order, not normalised).
//
// Sums and differences of pairs alone, in an order that does not hang on kLanes: the same bits at
// all levels. Twice it is the row times rotated_inputs(depth).
#pragma once

#include "kernels/calls/quantised.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// Pairs of numbers kDistance apart, within a vector: the second is taken from the first.
template <int kDistance, int... kLane>
VTENSOR_INLINE Vec add_within(Vec v, std::integer_sequence<int, kLane...> /*lanes*/) {
  constexpr UVec kSigns = {(kLane & kDistance ? 0x80000000 : 0)...};
  const Vec others = shuffle<SwapIndex<kDistance>>(v, v, Lanes{});
  return others + from_bits(bits_of(v) ^ kSigns);
}

template <int kDistance = 1>
VTENSOR_INLINE Vec rotate_lanes(Vec v) {
  if constexpr (kDistance == kLanes) {
    return v;
  } else {
    const Vec sums = add_within<kDistance>(v, Lanes{});
    return rotate_lanes<2 * kDistance>(sums);
  }
}

// Numbers `distance` apart; distance: a multiple of kLanes.
inline void add_apart(float* x, int64_t block, int64_t distance) {
  for (int64_t i = 0; i < block; i += 2 * distance) {
    for (int64_t k = i; k < i + distance; k += kLanes) {
      const Vec a = load(x + k), b = load(x + k + distance);
      store(x + k, a + b);
      store(x + k + distance, a - b);
    }
  }
}

inline void rotate_few(float* x, int64_t block) {
  for (int64_t distance = 1; distance < block; distance *= 2) {
    for (int64_t i = 0; i < block; ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
}

inline void rotate(float* x, int64_t depth) {
  const int64_t block = rotated_inputs(depth);
  for (int64_t first = 0; first < depth; first += block) {
    float* part = x + first;
    if (block < kLanes) {
      rotate_few(part, block);
      continue;
    }
    for (int64_t k = 0; k < block; k += kLanes) store(part + k, rotate_lanes(load(part + k)));
    for (int64_t distance = kLanes; distance < block; distance *= 2) {
      add_apart(part, block, distance);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
