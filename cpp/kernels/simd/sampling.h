// The passes over a row of logits that sampling is made of.
#pragma once

#include "kernels/calls/sampling.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// `num_values` >= 1 of a vector's numbers from p; minus infinity for the rest.
template <class T>
VTENSOR_INLINE Vec load_first(const T* p, int64_t num_values) {
  if (num_values >= kLanes) return load(p);
  T some[kLanes];
  for (int i = 0; i < kLanes; ++i) some[i] = p[i < num_values ? i : 0];
  Vec v = load(some);
  for (int i = 0; i < kLanes; ++i) v[i] = i < num_values ? v[i] : kMinusInfinity;
  return v;
}

// The row's values as float32, where T is another type, filled up to whole blocks by minus
// infinity, and each block's maximum. False if one is no number.
template <class T>
bool read_row(const void* row, int64_t num_values, float* values, float* block_max) {
  const T* from = static_cast<const T*>(row);
  UVec numbers = ~UVec{};
  for (int64_t block = 0; block < num_values; block += kSampleBlock) {
    const int64_t left = num_values - block;
    Vec best = splat(kMinusInfinity);
    for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
      const Vec v = i < left ? load_first(from + block + i, left - i) : splat(kMinusInfinity);
      numbers &= reinterpret_cast<UVec>(v == v);
      best = max(best, v);
      if constexpr (sizeof(T) != sizeof(float)) store(values + block + i, v);
    }
    block_max[block / kSampleBlock] = max_lane(best);
  }
  for (int i = 0; i < kLanes; ++i) {
    if (numbers[i] == 0) return false;
  }
  return true;
}

inline void weigh(const WeighCall& call) {
  for (int64_t block = 0; block < call.num_values; block += kSampleBlock) {
    const int64_t left = call.num_values - block, idx = block / kSampleBlock;
    Vec sum = {};
    if (call.block_max[idx] >= call.threshold) {
      for (int64_t i = 0; i < kSampleBlock; i += kLanes) {
        const Vec v =
            i < left ? load_first(call.values + block + i, left - i) : splat(kMinusInfinity);
        const Vec power = exp2((v - call.maximum) * call.scale);
        const Vec weight = v >= splat(call.threshold) ? power : Vec{};
        sum += weight;
        if (call.weights != nullptr) store(call.weights + block + i, weight);
      }
    }
    call.block_sums[idx] = sum_lanes(sum);
  }
}

}  // namespace
}  // namespace vtensor::kernels
