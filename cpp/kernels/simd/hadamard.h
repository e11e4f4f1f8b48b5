// times_hadamard: a row times a Hadamard matrix (Sylvester's order, not normalised).
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
  constexpr Vec kSigns = {(kLane & kDistance ? -1.0F : 1.0F)...};
  return v * kSigns + shuffle<SwapIndex<kDistance>>(v, v, Lanes{});  // the product is exact
}

template <int kDistance = 1>
VTENSOR_INLINE Vec add_lanes(Vec v) {
  if constexpr (kDistance == kLanes) {
    return v;
  } else {
    const Vec sums = add_within<kDistance>(v, Lanes{});
    return add_lanes<2 * kDistance>(sums);
  }
}

// v: kCount vectors, the pairs of which are added, next to each other first.
template <int kCount, int kDistance = 1>
VTENSOR_INLINE void add_vectors(Vec* v) {
  if constexpr (kDistance < kCount) {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) {
      if ((i & kDistance) != 0) continue;
      const Vec a = v[i], b = v[i + kDistance];
      v[i] = a + b;
      v[i + kDistance] = a - b;
    }
    add_vectors<kCount, 2 * kDistance>(v);
  }
}

// Numbers `distance`, 2 * distance, ... kCount / 2 * distance apart: what is read once is added
// more than once. distance: a multiple of kLanes.
template <int kCount>
void add_apart(float* x, int64_t block, int64_t distance) {
  for (int64_t i = 0; i < block; i += kCount * distance) {
    for (int64_t k = i; k < i + distance; k += kLanes) {
      Vec v[kCount];
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) v[j] = load(x + k + j * distance);
      add_vectors<kCount>(v);
#pragma GCC unroll 8
      for (int j = 0; j < kCount; ++j) store(x + k + j * distance, v[j]);
    }
  }
}

// Of fewer numbers than a vector has.
VTENSOR_INLINE void add_few(float* x, int64_t block) {
  for (int64_t distance = 1; distance < block; distance *= 2) {
    for (int64_t i = 0; i < block; ++i) {
      if ((i & distance) != 0) continue;
      const float a = x[i], b = x[i + distance];
      x[i] = a + b;
      x[i + distance] = a - b;
    }
  }
}

// output: the numbers of x times `factor`, which is a power of two, times the matrix; may be x.
template <class T>
void times_hadamard(const T* x, int64_t depth, float factor, float* output) {
  const int64_t block = rotated_inputs(depth);
  for (; depth > 0; depth -= block, x += block, output += block) {
    if (block < kLanes) {
      float few[kLanes];
      store(few, load_few(x, block) * factor);
      add_few(few, block);
      for (int64_t i = 0; i < block; ++i) output[i] = few[i];
      continue;
    }
    for (int64_t k = 0; k < block; k += kLanes) store(output + k, add_lanes(load(x + k) * factor));
    int64_t distance = kLanes;
    for (; 8 * distance <= block; distance *= 8) add_apart<8>(output, block, distance);
    if (4 * distance <= block) {
      add_apart<4>(output, block, distance);
    } else if (2 * distance <= block) {
      add_apart<2>(output, block, distance);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
