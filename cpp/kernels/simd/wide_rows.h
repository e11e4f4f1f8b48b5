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
  using Query = QueryNumber<T, S>;
  static constexpr int kPairFloats = 2;
  static constexpr int kKeyStep = kKeysPerStep;
  static constexpr int64_t kWeightFloats = kScoreFloats;
  static constexpr bool kOverlaps = false;
  static constexpr bool kRough = false;

  static void pack_queries(const Query* const* rows, int num_rows, int key_dim, int vec,
                           float* queries) {
    pack_lanes([&](int j, int i) { return load(rows[j] + i); }, num_rows, key_dim,
               queries + vec * kLanes);
  }

  // packed: [keys, key_dim]
  static void pack_keys(const S* k, int64_t stride, int num_keys, int key_dim, float* packed) {
    for (int j = 0; j < num_keys; ++j) {
      const S* row = k + j * stride;
      const float scale = scale_of(row, key_dim);
      for (int i = 0; i < key_dim; i += kLanes) {
        const Vec x = load(row + i);
        store(packed + j * key_dim + i, kHasScale<S> ? x * scale : x);
      }
    }
  }

  // Values up to the next multiple of kKeyStep are 0.
  static void pack_values(const S* v, int64_t stride, int num_keys, int value_dim, float* packed) {
    pack_keys(v, stride, num_keys, value_dim, packed);
    for (int j = num_keys; j % kKeyStep != 0; ++j) {
      for (int i = 0; i < value_dim; i += kLanes) store(packed + j * value_dim + i, Vec{});
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
};

}  // namespace
}  // namespace vtensor::kernels
