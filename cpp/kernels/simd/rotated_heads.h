// Keys that stand rotated in the arena, and the queries that they are multiplied with.
//
// A few numbers of a trained model's keys are much larger than the others, the same ones in all
// tokens, and a scale for all of a head would leave few bits to these. Times a Hadamard matrix
// every number has its part of all, and scores are the same (QuaRot, Ashkboos et al. 2024, section
// 4). Values have no such numbers, and fp8 has an exponent of its own for each.
#pragma once

#include <type_traits>

#include "kernels/calls/attention.h"
#include "kernels/simd/hadamard.h"
#include "kernels/simd/stored_kv.h"

namespace vtensor::kernels {
namespace {

template <class S>
constexpr bool kIsRotated = std::is_same_v<S, Int8>;

// Twice the matrix is times rotated_inputs(width): a power of two, of which keys and queries are
// divided by half each, so that neither grows by more than the root of two.
VTENSOR_INLINE float key_factor(int width) {
  return 1.0F / static_cast<float>(1 << (__builtin_ctz(static_cast<unsigned>(width)) + 1) / 2);
}
VTENSOR_INLINE float rotated_query_factor(int width) {
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

// Of queries of type T, as keys of type S want them.
template <class T, class S>
using QueryNumber = std::conditional_t<kIsRotated<S>, float, T>;

// The numbers of a query as keys of type S want them: where they stand, or in `output`, rounded if
// it has fewer bits.
template <class S, class T, class Q>
VTENSOR_INLINE const Q* query_row(const T* row, int key_dim, Q* output) {
  if constexpr (!kIsRotated<S>) {
    return row;
  } else if constexpr (std::is_same_v<Q, float>) {
    times_hadamard(row, key_dim, rotated_query_factor(key_dim), output);
    return output;
  } else {
    float rotated[kMaxHeadDim];
    times_hadamard(row, key_dim, rotated_query_factor(key_dim), rotated);
    for (int i = 0; i < key_dim; i += kLanes) store(output + i, load(rotated + i));
    return output;
  }
}

}  // namespace
}  // namespace vtensor::kernels
