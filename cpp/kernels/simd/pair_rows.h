// Tiles of bfloat16 tasks by products of pairs (simd/pairs.h): nothing is widened.
//
// Scores sum the products of queries and keys as they are, and are scaled afterwards; weights are
// rounded to bfloat16 before they meet the values, as FlashAttention does. Sums are float32.
#pragma once

#include "kernels/simd/few_rows.h"
#include "kernels/simd/gemm.h"
#include "kernels/simd/many_rows.h"
#include "kernels/simd/pairs.h"

namespace vtensor::kernels {
namespace {

#if defined(VTENSOR_HAS_PAIRS)

inline bool takes_pairs(const LayerCall& call, const AttendTask& task) {
  return call.key_dim % kPairLanes == 0 && call.value_dim % kPairLanes == 0 &&
         task.k_stride % 2 == 0;
}

// [rows, key_dim], where float32 queries stand otherwise.
inline BFloat16* pair_query(const Scratch& s) { return reinterpret_cast<BFloat16*>(s.query); }

// A row's weights, where its scores stood.
inline const BFloat16* pair_weights(const Scratch& s, int row) {
  return reinterpret_cast<const BFloat16*>(s.score + row * kTileTokens);
}

inline void copy_queries(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  const BFloat16* query = static_cast<const BFloat16*>(call.query);
  BFloat16* out = pair_query(s);
  for (int i = 0; i < task.num_tokens; ++i) {
    for (int h = 0; h < task.num_heads; ++h) {
      const BFloat16* row = query + (task.first_head + h) * call.query_head_stride +
                            task.tokens[i] * call.query_token_stride;
      for (int j = 0; j < call.key_dim; ++j) out[j] = row[j];
      out += call.key_dim;
    }
  }
}

// Rows j and j + 1 of the values; nothing where the second is not one of num_keys.
VTENSOR_INLINE void load_two(const BFloat16* v, int64_t stride, int j, int num_keys, UVec& even,
                             UVec& odd) {
  even = load_pairs(v + j * stride);
  odd = j + 1 < num_keys ? load_pairs(v + (j + 1) * stride) : UVec{};
}

// output[r] += sum over keys of weight[r][j] * value[j], for R rows and N vectors of pairs.
template <int R, int N>
VTENSOR_INLINE void add_pair_columns(const BFloat16* v, int64_t stride, const Scratch& s, int row,
                                     int column, int value_dim, int num_keys) {
  Vec sums[R][2 * N] = {};
  for (int j = 0; j < num_keys; j += 2) {
    UVec pairs[2 * N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      UVec even, odd;
      load_two(v + column + n * kPairLanes, stride, j, num_keys, even, odd);
      pairs[2 * n] = pair_up<false>(even, odd);
      pairs[2 * n + 1] = pair_up<true>(even, odd);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint32_t weights = load_pair(pair_weights(s, row + r) + j);
#pragma GCC unroll 4
      for (int n = 0; n < 2 * N; ++n) sums[r][n] = add_products(sums[r][n], weights, pairs[n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* output = s.output + (row + r) * value_dim + column;
#pragma GCC unroll 4
    for (int n = 0; n < 2 * N; ++n) {
      store(output + n * kLanes, load(output + n * kLanes) + sums[r][n]);
    }
  }
}

inline void few_pair_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s,
                               int64_t tile, int num_keys) {
  const int rows = task.num_tokens * task.num_heads;
  const int key_dim = call.key_dim, value_dim = call.value_dim;
  in_row_groups(rows, [&]<int R>(int row) {
    dot_rows<BFloat16, R>(task, pair_query(s) + row * key_dim, key_dim, value_dim,
                          s.score + row * kTileTokens, tile, num_keys);
  });
  const int width = (num_keys + kLanes - 1) / kLanes * kLanes;
  softmax_tile<BFloat16>(call, task, s, tile, num_keys, width, query_factor(call));
  const BFloat16* v = static_cast<const BFloat16*>(task.v) + tile * task.v_stride;
  in_row_groups(rows, [&]<int R>(int row) {
    int column = 0;
    for (; column + 2 * kPairLanes <= value_dim; column += 2 * kPairLanes) {
      add_pair_columns<R, 2>(v, task.v_stride, s, row, column, value_dim, num_keys);
    }
    if (column < value_dim) {
      add_pair_columns<R, 1>(v, task.v_stride, s, row, column, value_dim, num_keys);
    }
  });
}

// packed: [pairs of keys, value_dim]
inline void pack_value_pairs(const BFloat16* v, int64_t stride, int num_keys, int value_dim,
                             uint32_t* packed) {
  for (int j = 0; j < num_keys; j += 2) {
    for (int i = 0; i < value_dim; i += kPairLanes) {
      UVec even, odd;
      load_two(v + i, stride, j, num_keys, even, odd);
      const UVec pairs[] = {pair_up<false>(even, odd), pair_up<true>(even, odd)};
      __builtin_memcpy(packed + j / 2 * value_dim + i, pairs, sizeof pairs);
    }
  }
}

inline void many_pair_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s,
                                int64_t tile, int num_keys) {
  const int rows = task.num_tokens * task.num_heads;
  const int key_pairs = call.key_dim / 2, value_dim = call.value_dim;
  // A pair is moved like a float32 number.
  const auto* k = static_cast<const BFloat16*>(task.k) + tile * task.k_stride;
  pack_keys(reinterpret_cast<const float*>(k), task.k_stride / 2, num_keys, key_pairs, s.keys);
  const auto* query = reinterpret_cast<const uint32_t*>(s.query);
  const auto* keys = reinterpret_cast<const uint32_t*>(s.keys);
  int width = 0;
  for (; width < num_keys; width += kPanel) {
    gemm_panel<kGemmVecs, false>(query, key_pairs, keys + width * key_pairs, kPanel,
                                 s.score + width, kTileTokens, rows, key_pairs);
  }
  softmax_tile<BFloat16>(call, task, s, tile, num_keys, width, query_factor(call));
  const auto* v = static_cast<const BFloat16*>(task.v) + tile * task.v_stride;
  auto* values = reinterpret_cast<uint32_t*>(s.values);
  pack_value_pairs(v, task.v_stride, num_keys, value_dim, values);
  gemm_add(reinterpret_cast<const uint32_t*>(s.score), kTileTokens, values, value_dim, s.output,
           value_dim, rows, value_dim, (num_keys + 1) / 2);
}

#endif

}  // namespace
}  // namespace vtensor::kernels
