// Keys that stand rotated in the arena, and what they are multiplied with.
//
// A few numbers of a trained model's keys are much larger than the others, the same ones in all
// tokens, and a scale for all of a head would leave few bits to these. Times a Hadamard matrix
// every number has its part of all, and scores are the same (QuaRot, Ashkboos et al. 2024, section
// 4). Values have no such numbers, and fp8 has an exponent of its own for each.
//
// Queries are rotated, too, and stay float32 or have 16 bits of their own: eight, those of
// bfloat16, would be felt where scores are large. Where many rows meet a key in float32, it is
// rotated back as it is packed, once for all rows.
#pragma once

#include <type_traits>

#include "kernels/calls/attention.h"
#include "kernels/simd/hadamard.h"
#include "kernels/simd/stored_kv.h"

namespace vtensor::kernels {
namespace {

template <class S>
constexpr bool kIsRotated = std::is_same_v<S, Int8>;

// Twice the matrix is times rotated_inputs(width): a power of two, of which keys are divided by the
// larger half, and what meets them or rotates them back by the other, so that neither grows by more
// than the root of two.
VTENSOR_INLINE float key_factor(int width) {
  return 1.0F / static_cast<float>(1 << (__builtin_ctz(static_cast<unsigned>(width)) + 1) / 2);
}
VTENSOR_INLINE float back_factor(int width) {
  return 1.0F / static_cast<float>(1 << __builtin_ctz(static_cast<unsigned>(width)) / 2);
}

// `width` numbers of a key as they stand.
template <class T, class S>
void quantise_key(const void* numbers, void* row, int width) {
  if constexpr (kIsRotated<S>) {
    float rotated[kMaxHeadDim];
    times_hadamard(static_cast<const T*>(numbers), width, key_factor(width), rotated);
    quantise<float, S>(rotated, row, width);
  } else {
    quantise<T, S>(numbers, row, width);
  }
}

// The numbers of a query as keys of type S want them that stand in the arena: where they are, or in
// `rotated`.
template <class S, class T>
VTENSOR_INLINE const auto* query_numbers(const T* row, int key_dim, float* rotated) {
  if constexpr (kIsRotated<S>) {
    times_hadamard(row, key_dim, back_factor(key_dim), rotated);
    return static_cast<const float*>(rotated);
  } else {
    return row;
  }
}

// Calls use(numbers, scale): what a key was that stands in `row`, up to its rounding.
template <class S, class Use>
VTENSOR_INLINE void with_key(const S* row, int key_dim, const Use& use) {
  const float scale = scale_of(row, key_dim);
  if constexpr (kIsRotated<S>) {
    float numbers[kMaxHeadDim];
    for (int i = 0; i < key_dim; i += kLanes) store(numbers + i, load(row + i) * scale);
    times_hadamard(numbers, key_dim, back_factor(key_dim), numbers);
    use(static_cast<const float*>(numbers), 1.0F);
  } else {
    use(row, scale);
  }
}

}  // namespace
}  // namespace vtensor::kernels
