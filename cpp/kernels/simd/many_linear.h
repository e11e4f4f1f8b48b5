// Linear layers with many rows in products of float32, however weight and rows are stored.
//
// Tiles of 6 rows times the 64 outputs of a panel, of whose depth a block stays in the first-level
// cache, as float32, while row after row is multiplied with it. So bfloat16 is widened once for all
// rows of a thread's part, and is as fast as float32 where the CPU has no products of it.
//
// Sums are those of linear.h, in its order: a row's outputs are the same bits among whatever rows
// it stands, here and there.
#pragma once

#include "kernels/simd/linear.h"

namespace vtensor::kernels {
namespace {

constexpr int64_t kManyColumns = 64;
constexpr int64_t kHalfColumns = kManyColumns / 2;
// Inputs between two requests for memory.
constexpr int64_t kPrefetchStep = 8;

// The outputs of a tile: half of them from each of two places, which are neighbours in one panel
// or, with gates, in one of the gates' and one of the factors'.
template <class T>
struct TileOutputs {
  // The next input is kManyColumns numbers on; of pairs, the next pair twice as many.
  const T* left = nullptr;
  const T* right = nullptr;
  int64_t column = 0;  // of the call's output
};

template <class T>
inline TileOutputs<T> tile_outputs(const LinearCall& call, int64_t unit) {
  constexpr int64_t kHalf = kHalfColumns * (sizeof(T) == 4 ? 1 : 2);
  const T* panels = static_cast<const T*>(call.panels);
  const int64_t panel_size = call.depth * kManyColumns;
  if (!call.gates) {
    const T* panel = panels + unit * panel_size;
    return {panel, panel + kHalf, unit * kManyColumns};
  }
  const T* gates = panels + unit / 2 * panel_size + unit % 2 * kHalf;
  return {gates, gates + call.columns / 2 / kManyColumns * panel_size, unit * kHalfColumns};
}

#if !defined(__AMX_BF16__)

// Of a thread: what kManyFloats holds.
struct LinearScratch {
  float* weight;  // [kSumDepth, kManyColumns]
  float* x;       // [kLinearRows, kSumDepth]
  float* sums;    // [rows of the part, kManyColumns]
};
static_assert(kManyFloats == kManyColumns * (kSumDepth + kManyRows) + kLinearRows * kSumDepth);

VTENSOR_INLINE void widen_half(const float* panel, int64_t depth, float* weight) {
  for (int64_t k = 0; k < depth; ++k, panel += kManyColumns, weight += kManyColumns) {
    for (int64_t n = 0; n < kHalfColumns; n += kLanes) store(weight + n, load(panel + n));
  }
}

VTENSOR_INLINE void widen_half(const BFloat16* panel, int64_t depth, float* weight) {
  for (int64_t k = 0; k < depth; k += 2, panel += 2 * kManyColumns, weight += 2 * kManyColumns) {
    for (int64_t n = 0; n < kHalfColumns; n += kLanes) {
      UVec pairs;
      __builtin_memcpy(&pairs, panel + 2 * n, sizeof pairs);
      store(weight + n, widen_low(pairs));
      store(weight + kManyColumns + n, widen_high(pairs));
    }
  }
}

// Inputs [k, k + depth) of the outputs' weight: [depth, kManyColumns].
template <bool kGates, class T>
VTENSOR_INLINE const float* widen_weight(const TileOutputs<T>& outputs, int64_t k, int64_t depth,
                                         float* weight) {
  const T* left = outputs.left + k * kManyColumns;
  if constexpr (sizeof(T) == 4 && !kGates) return left;
  widen_half(left, depth, weight);
  widen_half(outputs.right + k * kManyColumns, depth, weight + kHalfColumns);
  return weight;
}

// sums [M, kManyColumns] += x weight: product by product, or the sum of the products.
template <int M, bool kOwnSums>
VTENSOR_INLINE void many_tile(const float* x, int64_t x_stride, const float* weight, int64_t depth,
                              Prefetch ahead, float* sums) {
  constexpr int kVecs = kLinearVecs<float>;
  const RowPointers<float, M> rows(x, x_stride);
  for (int64_t column = 0; column < kManyColumns; column += kVecs * kLanes) {
    Vec acc[M][kVecs];
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < kVecs; ++n) {
        acc[m][n] = kOwnSums ? Vec{} : load(sums + m * kManyColumns + column + n * kLanes);
      }
    }
    const float* from = weight + column;
    for (int64_t k = 0; k < depth; ++k, from += kManyColumns) {
      Vec w[kVecs];
#pragma GCC unroll 4
      for (int n = 0; n < kVecs; ++n) w[n] = load(from + n * kLanes);
      if (k % kPrefetchStep == 0) ahead.step();
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const float value = rows.at(m, k * 4);
#pragma GCC unroll 4
        for (int n = 0; n < kVecs; ++n) acc[m][n] += value * w[n];
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < kVecs; ++n) {
        float* sum = sums + m * kManyColumns + column + n * kLanes;
        store(sum, kOwnSums ? load(sum) + acc[m][n] : acc[m][n]);
      }
    }
  }
}

// The rows [row, row + num_rows), no more than a tile has.
template <class T, int M = kLinearRows>
VTENSOR_INLINE void multiply_rows(const LinearCall& call, int64_t row, int64_t num_rows, int64_t k,
                                  const float* weight, int64_t depth, Prefetch ahead,
                                  const LinearScratch& scratch, float* sums) {
  if (num_rows < M) {
    if constexpr (M > 1) {
      multiply_rows<T, M - 1>(call, row, num_rows, k, weight, depth, ahead, scratch, sums);
    }
    return;
  }
  const T* x = static_cast<const T*>(call.x) + row * call.x_stride + k;
  if constexpr (sizeof(T) == 4) {
    many_tile<M, true>(x, call.x_stride, weight, depth, ahead, sums);
  } else {
    for (int m = 0; m < M; ++m) {
      for (int64_t i = 0; i < depth; i += kLanes) {
        store(scratch.x + m * kSumDepth + i, load(x + m * call.x_stride + i));
      }
    }
    many_tile<M, false>(scratch.x, kSumDepth, weight, depth, ahead, sums);
  }
}

template <class T, bool kGates>
inline void write_outputs(const LinearCall& call, int64_t row, int64_t column, const float* sums) {
  constexpr int64_t kWidth = kGates ? kHalfColumns : kManyColumns;
  for (int64_t n = 0; n < kWidth && (kGates || column + n < call.columns); n += kLanes) {
    if constexpr (kGates) {
      finish_gate<T>(call, row, column + n, load(sums + n), load(sums + kHalfColumns + n));
    } else {
      finish<T>(call, row, column + n, load(sums + n));
    }
  }
}

template <class T, bool kGates>
void many_block(const LinearCall& call, const LinearBlock& block, float* floats) {
  const LinearScratch scratch = {floats, floats + kManyColumns * kSumDepth,
                                 floats + (kManyColumns + kLinearRows) * kSumDepth};
  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t tiles = (num_rows + kLinearRows - 1) / kLinearRows;
  for (int64_t unit = block.begin; unit < block.end; ++unit) {
    const TileOutputs<T> outputs = tile_outputs<T>(call, unit);
    __builtin_memset(scratch.sums, 0, static_cast<size_t>(num_rows * kManyColumns) * sizeof(float));
    for (int64_t k = 0; k < call.depth; k += kSumDepth) {
      const int64_t depth = call.depth - k < kSumDepth ? call.depth - k : kSumDepth;
      const float* weight = widen_weight<kGates>(outputs, k, depth, scratch.weight);
      const char* next = reinterpret_cast<const char*>(outputs.left + (k + depth) * kManyColumns);
      constexpr int64_t kSteps = kSumDepth / kPrefetchStep;
      constexpr int64_t kBlockBytes = kManyColumns * kSumDepth * static_cast<int64_t>(sizeof(T));
      const int64_t share = (kBlockBytes / kSteps / tiles + 63) / 64 * 64;
      for (int64_t tile = 0; tile < tiles; ++tile) {
        const int64_t first = num_rows * tile / tiles, last = num_rows * (tile + 1) / tiles;
        const Prefetch ahead = {next + tile * share * kSteps, share};
        multiply_rows<T>(call, block.row_begin + first, last - first, k, weight, depth, ahead,
                         scratch, scratch.sums + first * kManyColumns);
        if (k + depth < call.depth) continue;
        // Beside the next tile's products, which do not wait for memory to take them.
        for (int64_t row = first; row < last; ++row) {
          write_outputs<T, kGates>(call, block.row_begin + row, outputs.column,
                                   scratch.sums + row * kManyColumns);
        }
      }
    }
  }
}

template <class T>
void many_linear(const LinearCall& call, const LinearBlock& block, float* scratch) {
  return call.gates ? many_block<T, true>(call, block, scratch)
                    : many_block<T, false>(call, block, scratch);
}

#endif

}  // namespace
}  // namespace vtensor::kernels
