// Tasks with many query rows in float32, whatever their numbers and KV are stored as.
#pragma once

#include "kernels/simd/lane_products.h"
#include "kernels/simd/rotated_heads.h"
#include "kernels/simd/stored_kv.h"

namespace vtensor::kernels {
namespace {

// Of many_rows.h, for queries of type T, KV stored as S. A tile's keys and values are widened once
// for all rows of the task.
template <class T, class S>
struct WideProducts {
  using Number = T;
  using Stored = S;
  static constexpr int kPairFloats = 2;
  static constexpr int kKeyStep = kKeysPerStep;
  static constexpr int64_t kWeightFloats = kScoreFloats;
  static constexpr bool kOverlaps = false;
  static constexpr bool kScalesScores = false;
  static constexpr bool kRough = false;

  static Vec pack_queries(const T* const* rows, int num_rows, int key_dim, int vec,
                          float* queries) {
    pack_lanes([&](int j, int i) { return load(rows[j] + i); }, num_rows, key_dim,
               queries + vec * kLanes);
    return splat(1);
  }

  // packed: [keys, key_dim]
  static void pack_keys(const S* k, int64_t stride, int num_keys, int key_dim, float* packed) {
    for (int j = 0; j < num_keys; ++j, packed += key_dim) {
      with_key(k + j * stride, key_dim,
               [&](const auto* row, float scale) { widen(row, scale, key_dim, packed); });
    }
  }

  // Values up to the next multiple of kKeyStep are 0.
  static void pack_values(const S* v, int64_t stride, int num_keys, int value_dim, float* packed) {
    int j = 0;
    for (; j < num_keys; ++j, packed += value_dim) {
      const S* row = v + j * stride;
      widen(row, scale_of(row, value_dim), value_dim, packed);
    }
    for (; j % kKeyStep != 0; ++j, packed += value_dim) {
      for (int i = 0; i < value_dim; i += kLanes) store(packed + i, Vec{});
    }
  }

  template <class Overlap>
  static void multiply_keys(const RowBlock& block, const float* queries, const float* keys,
                            int key_dim, float* scores, Overlap& /*nothing*/) {
    multiply_lanes_keys(block, queries, keys, key_dim, scores);
  }

  VTENSOR_INLINE static void store_weights(Vec even, Vec odd, int key, int vec, float* weights) {
    store(weights + key * kBlockRows + vec * kLanes, even);
    store(weights + (key + 1) * kBlockRows + vec * kLanes, odd);
  }

  template <class Overlap>
  static void multiply_values(const RowBlock& block, const float* weights, const float* values,
                              int value_dim, float* output, Overlap& /*nothing*/) {
    multiply_lanes_values(block, block.end - block.begin, weights + block.begin * kBlockRows,
                          values + block.begin * value_dim, value_dim, output);
  }

 private:
  template <class N>
  VTENSOR_INLINE static void widen(const N* row, float scale, int width, float* output) {
    for (int i = 0; i < width; i += kLanes) {
      const Vec x = load(row + i);
      store(output + i, kHasScale<N> ? x * scale : x);
    }
  }
};

}  // namespace
}  // namespace vtensor::kernels
