// Linear layers with packed weights, in vectors: a tile of rows times a panel of outputs.
//
// The accumulators of a tile fill the registers; the panel is read row by row, each of x's numbers
// is broadcast to it. Sums are float32 whatever the dtype.
#pragma once

#include "kernels/calls/linear.h"
#include "kernels/simd/ahead.h"
#include "kernels/simd/pairs.h"
#include "kernels/simd/row_pointers.h"
#include "kernels/simd/rows.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

constexpr int kLinearRows = 6;
// float32 products that are summed one after the other. The rounding error of a longer sum would
// grow with the depth; of sums of such blocks it grows with its square root.
constexpr int64_t kSumDepth = 128;
// How far ahead of the products memory is asked for.
constexpr int64_t kStreamBytes = 2048;

// Outputs of a panel: two tiles on AMX.
#if defined(__AMX_BF16__)
constexpr int kPairColumns = 32;
#else
constexpr int kPairColumns = 64;
#endif
template <class T>
constexpr int64_t kPanelColumns = sizeof(T) == 4 ? 64 : kPairColumns;
// Bytes of a panel for each step of its depth, a pair of inputs in bfloat16.
template <class T>
constexpr int64_t kStepBytes = kPanelColumns<T> * 4;
// Vectors of a tile of 6 rows: with AVX-512 6 x 4 of 32 registers accumulate, 6 x 2 of 16 before
// and where pairs are widened.
template <class T>
constexpr int kLinearVecs = kLanes == 16 && (sizeof(T) == 4 || kHasPairs) ? 4 : 2;
// Of fewer rows, a tile is wider: a sum waits for the one before it, so many are to be under way.
constexpr int kMaxVecs = 64 / kLanes < 8 ? 64 / kLanes : 8;

VTENSOR_INLINE Vec widen_low(UVec pairs) { return from_bits(pairs << 16); }
VTENSOR_INLINE Vec widen_high(UVec pairs) { return from_bits(pairs & 0xffff0000); }

VTENSOR_INLINE float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

template <int M, int N>
VTENSOR_INLINE void multiply(const float* x, int64_t x_stride, const float* panel, int64_t depth,
                             Prefetch& ahead, Vec (&acc)[M][N]) {
  const RowPointers<float, M> rows(x, x_stride);
  for (int64_t k = 0; k < depth; ++k, panel += kPanelColumns<float>) {
    Vec weight[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) weight[n] = load(panel + n * kLanes);
    ahead.step();
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const float value = rows.at(m, k * 4);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] += value * weight[n];
    }
  }
}

template <int M, int N>
VTENSOR_INLINE void multiply(const BFloat16* x, int64_t x_stride, const BFloat16* panel,
                             int64_t depth, Prefetch& ahead, Vec (&acc)[M][N]) {
  const RowPointers<BFloat16, M> rows(x, x_stride);
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * kPanelColumns<BFloat16>) {
    UVec pairs[N];
    __builtin_memcpy(&pairs, panel, sizeof pairs);
    ahead.step();
#if defined(VTENSOR_HAS_PAIRS)
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const uint32_t x_pair = rows.template at<uint32_t>(m, k * 2);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = add_products(acc[m][n], x_pair, pairs[n]);
    }
#else
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const float even = widen(rows.at(m, k * 2)), odd = widen(rows.at(m, k * 2 + 2));
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        acc[m][n] += even * widen_low(pairs[n]);
        acc[m][n] += odd * widen_high(pairs[n]);
      }
    }
#endif
  }
}

// One vector of outputs, from its sums.
template <class T>
VTENSOR_INLINE void finish(const LinearCall& call, int64_t row, int64_t column, Vec sum) {
  if (call.bias != nullptr) sum += load(static_cast<const T*>(call.bias) + column);
  if (call.residual != nullptr) {
    sum += load(static_cast<const T*>(call.residual) + row * call.residual_stride + column);
  }
  store(static_cast<T*>(call.output) + row * call.output_stride + column, sum);
}

// One vector of silu(gate) * factor, from the sums of both, as if these were stored between.
template <class T>
VTENSOR_INLINE void finish_gate(const LinearCall& call, int64_t row, int64_t column, Vec gate,
                                Vec factor) {
  if (call.bias != nullptr) {
    const T* bias = static_cast<const T*>(call.bias) + column;
    gate += load(bias);
    factor += load(bias + call.columns / 2);
  }
  const Vec gated = rounded<T>(silu(rounded<T>(gate))) * rounded<T>(factor);
  store(static_cast<T*>(call.output) + row * call.output_stride + column, gated);
}

// Where an output stands in its row: factors in the place of their gates.
VTENSOR_INLINE int64_t written_column(const LinearCall& call, int64_t column) {
  const int64_t first_factor = call.columns / 2;
  return call.gates && column >= first_factor ? column - first_factor : column;
}

// finish_gate of a gate that has been written already, by `finish`.
template <class T>
[[gnu::noinline]] void finish_factor(const LinearCall& call, int64_t row, int64_t column,
                                     Vec factor) {
  if (call.bias != nullptr) factor += load(static_cast<const T*>(call.bias) + column);
  T* gate = static_cast<T*>(call.output) + row * call.output_stride + written_column(call, column);
  store(gate, rounded<T>(silu(load(gate))) * rounded<T>(factor));
}

// sums = x panel, in float32 block by block.
template <class T, int M, int N>
VTENSOR_INLINE void multiply_blocks(const LinearCall& call, const T* x, const T* panel,
                                    Prefetch& ahead, Vec (&sums)[M][N]) {
  if constexpr (sizeof(T) == 2) {
    multiply(x, call.x_stride, panel, call.depth, ahead, sums);
  } else {
    for (int64_t k = 0; k < call.depth; k += kSumDepth) {
      const int64_t rest = call.depth - k;
      Vec block[M][N] = {};
      multiply(x + k, call.x_stride, panel + k * kPanelColumns<T>,
               rest < kSumDepth ? rest : kSumDepth, ahead, block);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[m][n] += block[m][n];
      }
    }
  }
}

// Rows [row, row + M) times the outputs from `column` on that fit in N registers a row.
template <class T, int M, int N>
void linear_tile(const LinearCall& call, int64_t row, int64_t column, const T* panel,
                 Prefetch ahead) {
  Vec acc[M][N] = {};
  multiply_blocks(call, static_cast<const T*>(call.x) + row * call.x_stride, panel, ahead, acc);
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
    for (int n = 0; n < N; ++n) {
      const int64_t at = column + n * kLanes;
      if (at < call.columns) finish<T>(call, row + m, at, acc[m][n]);
    }
  }
}

template <class T, int N, int M>
VTENSOR_INLINE void linear_rows(const LinearCall& call, int64_t row, int64_t num_rows,
                                int64_t column, const T* panel, Prefetch ahead) {
  if (num_rows == M) {
    linear_tile<T, M, N>(call, row, column, panel, ahead);
  } else if constexpr (M > 1) {
    linear_rows<T, N, M - 1>(call, row, num_rows, column, panel, ahead);
  }
}

// Tiles of equal height, as few as there can be of up to M rows.
template <class T, int N, int M>
void linear_tiles(const LinearCall& call, int64_t num_rows, int64_t begin, int64_t end) {
  constexpr int64_t kPair = sizeof(T) == 4 ? 1 : 2;
  constexpr int64_t kColumns = N * kLanes;
  const int64_t tiles = (num_rows + M - 1) / M;
  for (int64_t panel = begin; panel < end; ++panel) {
    const T* weight = static_cast<const T*>(call.panels) + panel * kPanelColumns<T> * call.depth;
    Ahead ahead({weight, call.depth / kPair, kStepBytes<T>}, tiles * (kPanelColumns<T> / kColumns),
                panel == begin, kStreamBytes);
    for (int64_t n = 0; n < kPanelColumns<T>; n += kColumns) {
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = num_rows * tile / tiles, last = num_rows * (tile + 1) / tiles;
        linear_rows<T, N, M>(call, first, last - first, panel * kPanelColumns<T> + n,
                             weight + n * kPair, ahead.next_tile());
      }
    }
  }
}

template <class T>
void linear(const LinearCall& call, int64_t num_rows, int64_t begin, int64_t end) {
  constexpr int kVecs = kLinearVecs<T>;
  if constexpr (kVecs == 2) {
    if (num_rows == 1) return linear_tiles<T, kMaxVecs, 1>(call, num_rows, begin, end);
    if (num_rows <= kLinearRows / 2) {
      return linear_tiles<T, 2 * kVecs, kLinearRows / 2>(call, num_rows, begin, end);
    }
  }
  linear_tiles<T, kVecs, kLinearRows>(call, num_rows, begin, end);
}

}  // namespace
}  // namespace vtensor::kernels
