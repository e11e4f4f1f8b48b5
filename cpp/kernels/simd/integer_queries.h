// Query rows as keys of int8 want them: rotated (rotated_heads.h), and rounded to integers, of a
// unit for each row.
//
// Keys are integers as they stand, and sums of integers are exact: what is lost is the rounding to
// so many units, of which bfloat16 has 256.
#pragma once

#include "kernels/simd/rotated_heads.h"

namespace vtensor::kernels {
namespace {

// By what numbers up to `largest` become integers, and what one is then worth; `odd` is not 0 if
// one of them is not finite, and then the unit is none either.
struct Units {
  float factor;
  float unit;

  VTENSOR_INLINE Units(float largest, float odd, float count) {
    const bool counts = odd == 0 && largest >= kSmallestMaximum;
    factor = counts ? count / largest : 0;
    unit = counts ? largest / count : odd;
  }
};

// Calls use(i, integers) for kLanes integers of the row after the other, from number i on: the
// numbers times `factor`, in units of which the largest one is `count`. Gives the unit.
template <class T, class Use>
VTENSOR_INLINE float with_integers(const T* query, int key_dim, float factor, float count,
                                   const Use& use) {
  float rotated[kMaxHeadDim];
  const float* row = query_numbers<Int8>(query, key_dim, rotated);
  Vec largest = {}, strange = {};
  for (int i = 0; i < key_dim; i += kLanes) {
    const Vec x = load(row + i) * factor;
    largest = max(from_bits(bits_of(x) & 0x7fffffff), largest);
    strange += x * 0.0F;
  }
  const Units units(max_lane(largest), sum_lanes(strange), count);
  for (int i = 0; i < key_dim; i += kLanes) {
    const Vec x = load(row + i) * factor;
    use(i, round_to_integers(units.factor == 0 ? Vec{} : x * units.factor));
  }
  return units.unit;
}

}  // namespace
}  // namespace vtensor::kernels
