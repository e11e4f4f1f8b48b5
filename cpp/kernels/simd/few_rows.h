// Tiles of tasks with few query rows (decodes): K and V are read once, where they stand.
//
// Bound by memory: a key is multiplied with all rows while it is in registers, and K and V of the
// next tile are prefetched meanwhile. Scores are dot products; kLanes of them are summed
// across their lanes at once.
#pragma once

#include "kernels/simd/lines_ahead.h"
#include "kernels/simd/pairs.h"
#include "kernels/simd/softmax.h"
#include "kernels/simd/stored_kv.h"

namespace vtensor::kernels {
namespace {

// Rows that are multiplied with a key at once: rows x keys = kLanes dot products in registers.
constexpr int kDotRows = 4;
// Keys of a tile: K and V of that many tokens stay in the first-level cache between the two passes.
template <class T>
constexpr int kFewRowsTile = sizeof(T) == 1 ? 64 : 32;

// Keys and values of the tile that is read after the present one, asked for a key at a time of the
// present one's keys, or columns of its values.
struct NextTile {
  LinesAhead keys, values;
};

// The next numbers of a key, for a query of float32 numbers or, as bfloat16, of pairs.
template <class T>
VTENSOR_INLINE Vec load_factors(const T* p, const float* /*query*/) {
  return load(p);
}
VTENSOR_INLINE Vec add_products(Vec sum, Vec x, Vec w) { return sum + x * w; }
#if defined(VTENSOR_HAS_PAIRS)
VTENSOR_INLINE UVec load_factors(const BFloat16* p, const BFloat16* /*query*/) {
  return load_pairs(p);
}
#endif
template <class Q>
constexpr int kFactors = kLanes * 4 / static_cast<int>(sizeof(Q));

// score[r][j] for R rows and `num_keys` keys; keys beyond the last are the last one again.
template <class T, int R, class Q>
inline void dot_rows(const AttendTask& task, const Q* query, int key_dim, float* score,
                     int64_t tile, int num_keys, LinesAhead& next) {
  constexpr int kKeys = kLanes / R;
  const T* k = static_cast<const T*>(task.k) + tile * task.k_stride;
  for (int j = 0; j < num_keys; j += kKeys) {
    const T* key[kKeys];
#pragma GCC unroll 16
    for (int n = 0; n < kKeys; ++n) {
      const int64_t token = j + n < num_keys ? j + n : num_keys - 1;
      key[n] = k + token * task.k_stride;
    }
    next.advance(kKeys);
    Vec acc[kLanes] = {};
    for (int i = 0; i < key_dim; i += kFactors<Q>) {
#pragma GCC unroll 16
      for (int n = 0; n < kKeys; ++n) {
        const auto x = load_factors(key[n] + i, query);
#pragma GCC unroll 4
        for (int r = 0; r < R; ++r) {
          Vec& sum = acc[r * kKeys + n];
          sum = add_products(sum, x, load_factors(query + r * key_dim + i, query));
        }
      }
    }
    const Vec sums = sums_of(acc);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      __builtin_memcpy(score + r * kTileTokens + j,
                       reinterpret_cast<const float*>(&sums) + r * kKeys, kKeys * sizeof(float));
    }
  }
}

// The scales of a tile's keys or values. Loaded well before they are read: vectors that hold what
// was stored number by number wait until it has left the store buffer.
template <class T>
struct TileScales {
  alignas(64) float of[kFewRowsTile<T>] = {};

  VTENSOR_INLINE TileScales(const void* base, int64_t stride, int head_dim, int64_t tile,
                            int num_keys) {
    if constexpr (kHasScale<T>) {
      const T* row = static_cast<const T*>(base) + tile * stride;
      for (int j = 0; j < num_keys; ++j) of[j] = scale_of(row + j * stride, head_dim);
    }
  }
};

// Scores or weights of a tile times the scales of its keys or values.
template <class T>
inline void scale_rows(const TileScales<T>& scales, int num_keys, float* rows, int num_rows) {
  if constexpr (!kHasScale<T>) return;
  for (int r = 0; r < num_rows; ++r) {
    float* p = rows + r * kTileTokens;
    for (int j = 0; j < num_keys; j += kLanes) store(p + j, load(p + j) * load(scales.of + j));
  }
}

// output[r] += sum over keys of weight[r][j] * value[j], for R rows and N vectors of columns.
template <class T, int R, int N>
VTENSOR_INLINE void add_columns(const T* v, int64_t token_stride, const float* weight,
                                float* output, int value_dim, int num_keys, LinesAhead& next) {
  Vec acc[R][N];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) acc[r][n] = load(output + r * value_dim + n * kLanes);
  }
  for (int j = 0; j < num_keys; ++j) {
    Vec value[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) value[n] = load(v + j * token_stride + n * kLanes);
    next.advance(N * kLanes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const float w = weight[r * kTileTokens + j];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[r][n] += w * value[n];
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(output + r * value_dim + n * kLanes, acc[r][n]);
  }
}

template <class T, int R>
inline void add_values(const AttendTask& task, const float* weight, float* output, int value_dim,
                       int64_t tile, int num_keys, LinesAhead& next) {
  constexpr int kVecs = kLanes == 16 ? 4 : 2;
  const T* v = static_cast<const T*>(task.v) + tile * task.v_stride;
  int i = 0;
  for (; i + kVecs * kLanes <= value_dim; i += kVecs * kLanes) {
    add_columns<T, R, kVecs>(v + i, task.v_stride, weight, output + i, value_dim, num_keys, next);
  }
  for (; i < value_dim; i += kLanes) {
    add_columns<T, R, 1>(v + i, task.v_stride, weight, output + i, value_dim, num_keys, next);
  }
}

// Calls fn<R>(first row) for all rows, in groups of 4, 2 and 1.
template <class Fn>
VTENSOR_INLINE void in_row_groups(int rows, const Fn& fn) {
  int row = 0;
  for (; row + kDotRows <= rows; row += kDotRows) fn.template operator()<kDotRows>(row);
  for (; row + 2 <= rows; row += 2) fn.template operator()<2>(row);
  if (row < rows) fn.template operator()<1>(row);
}

template <class T>
void few_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s, int64_t tile,
                   int num_keys, NextTile& next) {
  LinesAhead nothing;
  const int rows = task.num_tokens * task.num_heads;
  const int key_dim = call.key_dim, value_dim = call.value_dim;
  const TileScales<T> key_scales(task.k, task.k_stride, key_dim, tile, num_keys);
  const TileScales<T> value_scales(task.v, task.v_stride, value_dim, tile, num_keys);
  in_row_groups(rows, [&]<int R>(int row) {
    dot_rows<T, R>(task, s.query + row * key_dim, key_dim, s.score + row * kTileTokens, tile,
                   num_keys, row == 0 ? next.keys : nothing);
  });
  const int width = (num_keys + kLanes - 1) / kLanes * kLanes;
  scale_rows(key_scales, num_keys, s.score, rows);
  softmax_tile<float>(call, task, s, tile, num_keys, width, 1);
  scale_rows(value_scales, num_keys, s.score, rows);
  in_row_groups(rows, [&]<int R>(int row) {
    add_values<T, R>(task, s.score + row * kTileTokens, s.output + row * value_dim, value_dim, tile,
                     num_keys, row == 0 ? next.values : nothing);
  });
}

}  // namespace
}  // namespace vtensor::kernels
