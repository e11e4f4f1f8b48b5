// Tiles of tasks with many query rows (prefills, shared prefixes): two matrix products.
//
// Bound by arithmetic: the keys of a tile are transposed, keys and values widened to float32, once
// for all rows; then scores = Q K^T and output += weights V come from the cache.
#pragma once

#include "kernels/simd/gemm.h"
#include "kernels/simd/softmax.h"
#include "kernels/simd/stored_kv.h"

namespace vtensor::kernels {
namespace {

// Keys [first, first + kLanes) of a tile, transposed: packed[i][j] = key[first + j][i].
template <class T>
VTENSOR_INLINE void pack_keys_square(const T* k, int64_t token_stride, int first, int num_keys,
                                     int head_dim, float* packed) {
  float scales[kLanes] = {};
  if constexpr (kHasScale<T>) {
    for (int j = 0; j < kLanes && first + j < num_keys; ++j) {
      scales[j] = scale_of(k + (first + j) * token_stride, head_dim);
    }
  }
  for (int i = 0; i < head_dim; i += kLanes) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) {
      square[j] = first + j < num_keys ? load(k + (first + j) * token_stride + i) : Vec{};
      if constexpr (kHasScale<T>) square[j] *= scales[j];
    }
    transpose(square);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) store(packed + (i + j) * kPanel, square[j]);
  }
}

// packed: [panels, head_dim, kPanel]; columns beyond the last key are 0.
template <class T>
inline void pack_keys(const T* k, int64_t token_stride, int num_keys, int head_dim, float* packed) {
  for (int panel = 0; panel < num_keys; panel += kPanel) {
    float* base = packed + panel * head_dim;
    for (int j = 0; j < kPanel; j += kLanes) {
      pack_keys_square(k, token_stride, panel + j, num_keys, head_dim, base + j);
    }
  }
}

template <class T>
inline void pack_values(const T* v, int64_t token_stride, int num_keys, int head_dim,
                        float* packed) {
  for (int j = 0; j < num_keys; ++j) {
    const T* row = v + j * token_stride;
    const float scale = scale_of(row, head_dim);
    for (int i = 0; i < head_dim; i += kLanes) {
      const Vec x = load(row + i);
      store(packed + j * head_dim + i, kHasScale<T> ? x * scale : x);
    }
  }
}

template <class T>
void many_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s, int64_t tile,
                    int num_keys) {
  const int rows = task.num_tokens * task.num_heads;
  const int key_dim = call.key_dim, value_dim = call.value_dim;
  pack_keys(static_cast<const T*>(task.k) + tile * task.k_stride, task.k_stride, num_keys, key_dim,
            s.keys);
  int width = 0;
  for (; width < num_keys; width += kPanel) {
    gemm_panel<kGemmVecs, false>(s.query, key_dim, s.keys + width * key_dim, kPanel,
                                 s.score + width, kTileTokens, rows, key_dim);
  }
  softmax_tile<float>(call, task, s, tile, num_keys, width, 1);
  pack_values(static_cast<const T*>(task.v) + tile * task.v_stride, task.v_stride, num_keys,
              value_dim, s.values);
  gemm_add(s.score, kTileTokens, s.values, value_dim, s.output, value_dim, rows, value_dim,
           num_keys);
}

}  // namespace
}  // namespace vtensor::kernels
