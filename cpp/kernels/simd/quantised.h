// Linear layers with quantised weights: a tile of rows times the outputs of a panel.
//
// An output is summed up in the same order whatever the tile, so that a row's bits do not hang on
// how many there are; integers are summed exactly.
#pragma once

#include "kernels/calls/quantised.h"
#include "kernels/simd/dot.h"
#include "kernels/simd/linear.h"

namespace vtensor::kernels {
namespace {

// 24 of 32 registers accumulate with AVX-512, 12 of 16 before. Tall tiles take a word apart for
// more rows at once.
constexpr int kFewRows = 6;
constexpr int kFewVecs = kLanes == 16 ? 4 : 2;
constexpr int kTallRows = kLanes == 16 ? 12 : 6;
constexpr int kTallVecs = 2;

// Where a tile is: rows [row, row + M), and outputs from `column` on in this panel.
struct TilePlace {
  int64_t row;
  int64_t panel;
  int64_t column;  // in the panel
  bool is_stream;  // the panel comes from memory: ask for it ahead
};

VTENSOR_INLINE const uint32_t* words_of(const QuantisedWeight& weight, const TilePlace& at) {
  return weight.words + at.panel * (weight.depth / weight.word_inputs()) * kQuantisedColumns +
         at.column;
}

VTENSOR_INLINE UVec load_words(const uint32_t* words) {
  UVec v;
  __builtin_memcpy(&v, words, sizeof v);
  return v;
}

template <int N>
VTENSOR_INLINE void ask_ahead(const uint32_t* words, const TilePlace& at) {
  if (!at.is_stream) return;
#pragma GCC unroll 4
  for (int n = 0; n < N; ++n) {
    __builtin_prefetch(reinterpret_cast<const char*>(words + n * kLanes) + kStreamBytes, 0, 2);
  }
}

// Scales or minimums: the n-th vector of `group`.
VTENSOR_INLINE Vec load_scale(const QuantisedWeight& weight, const void* scales, int64_t panel,
                              int64_t group, int64_t column) {
  const int64_t i = (panel * weight.num_groups() + group) * kQuantisedColumns + column;
  return weight.is_half ? load(static_cast<const Float16*>(scales) + i)
                        : load(static_cast<const float*>(scales) + i);
}

VTENSOR_INLINE void finish_sum(const QuantisedCall& call, DType dtype, int64_t row, int64_t column,
                               Vec sum) {
  if (column >= call.layer.columns) return;
  if (dtype == DType::kFloat32) {
    finish<float>(call.layer, row, column, sum);
  } else {
    finish<BFloat16>(call.layer, row, column, sum);
  }
}

// A vector of outputs whose inputs are integers: what makes numbers of their sums.
struct ByteOutputs {
  Vec scale = {};
  IVec offset = {};

  ByteOutputs() = default;
  // column: in the panel
  VTENSOR_INLINE ByteOutputs(const QuantisedWeight& weight, int64_t panel, int64_t column)
      : scale(load_scale(weight, weight.scales, panel, 0, column)),
        offset(reinterpret_cast<IVec>(load_words(reinterpret_cast<const uint32_t*>(weight.sums) +
                                                 panel * kQuantisedColumns + column))) {}
  VTENSOR_INLINE void finish(const QuantisedCall& call, DType dtype, int64_t row, int64_t column,
                             IVec sum) const {
    const Vec integers = __builtin_convertvector(sum - offset, Vec);
    finish_sum(call, dtype, row, column, integers * (scale * call.x_scales[row]));
  }
};

// Inputs as integers.
struct ByteTile {
  template <int M, int N>
  static void compute(const QuantisedCall& call, DType dtype, const TilePlace& at) {
    const QuantisedWeight& weight = call.weight;
    const RowPointers<uint32_t, M> rows(
        reinterpret_cast<const uint32_t*>(static_cast<const char*>(call.inputs) +
                                          at.row * call.input_stride),
        call.input_stride / 4);
    const uint32_t* words = words_of(weight, at);
    IVec sums[M][N] = {};
    for (int64_t k = 0; k < weight.depth; k += 4, words += kQuantisedColumns) {
      ask_ahead<N>(words, at);
      ByteWeights w[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) w[n] = ByteWeights(load_words(words + n * kLanes));
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const ByteInputs x(rows.at(m, k));
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) sums[m][n] = add_dot(sums[m][n], x, w[n]);
      }
    }
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) {
      const int64_t column = at.column + n * kLanes;
      const ByteOutputs outputs(weight, at.panel, column);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        outputs.finish(call, dtype, at.row + m, at.panel * kQuantisedColumns + column, sums[m][n]);
      }
    }
  }
};

// Inputs as they are. X is how those of a step are read: a float, or two bfloat16 in 32 bits.
template <class X, int kBits>
struct GroupTile {
  static constexpr bool kIsPair = static_cast<X>(0.5F) == 0;
  static constexpr int kSteps = 32 / kBits / (kIsPair ? 2 : 1);

  template <int M, int N>
  VTENSOR_INLINE static void add_word(const RowPointers<X, M>& rows, int64_t bytes,
                                      const uint32_t* words, Vec (&sums)[M][N]) {
    UVec w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) w[n] = load_words(words + n * kLanes);
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kIsPair) {
#if defined(__AVX512BF16__) && VTENSOR_LANES == 16
        UVec pairs[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) pairs[n] = pairs_of<kBits>(w[n], step);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const uint32_t x = rows.at(m, bytes + step * 4);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sums[m][n] = add_products(sums[m][n], x, pairs[n]);
        }
#endif
      } else {
        Vec factors[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) factors[n] = float_of<kBits>(w[n], step);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const float x = rows.at(m, bytes + step * 4);
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sums[m][n] += x * factors[n];
        }
      }
    }
  }

  template <int M, int N>
  static void compute(const QuantisedCall& call, DType dtype, const TilePlace& at) {
    const QuantisedWeight& weight = call.weight;
    const RowPointers<X, M> rows(reinterpret_cast<const X*>(static_cast<const char*>(call.inputs) +
                                                            at.row * call.input_stride),
                                 call.input_stride / 4);
    const uint32_t* words = words_of(weight, at);
    const int64_t num_groups = weight.num_groups();
    int64_t bytes = 0;
    Vec sums[M][N] = {};
    for (int64_t group = 0; group < num_groups; ++group) {
      Vec part[M][N] = {};
      for (int64_t k = 0; k < weight.group; k += weight.word_inputs()) {
        ask_ahead<N>(words, at);
        add_word<M, N>(rows, bytes, words, part);
        words += kQuantisedColumns;
        bytes += kSteps * 4;
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const int64_t column = at.column + n * kLanes;
        const Vec scale = load_scale(weight, weight.scales, at.panel, group, column);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) sums[m][n] += scale * part[m][n];
        if (weight.minimums == nullptr) continue;
        const Vec minimum = load_scale(weight, weight.minimums, at.panel, group, column);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          sums[m][n] += minimum * call.x_sums[(at.row + m) * num_groups + group];
        }
      }
    }
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const int64_t column = at.panel * kQuantisedColumns + at.column + n * kLanes;
        finish_sum(call, dtype, at.row + m, column, sums[m][n]);
      }
    }
  }
};

// All outputs of a panel, M rows at once.
template <class Tile, int M, int N>
VTENSOR_INLINE void panel_rows(const QuantisedCall& call, DType dtype, TilePlace at) {
  for (at.column = 0; at.column < kQuantisedColumns; at.column += N * kLanes) {
    Tile::template compute<M, N>(call, dtype, at);
  }
}

template <class Tile, int M = kFewRows>
VTENSOR_INLINE void last_rows(const QuantisedCall& call, DType dtype, int64_t num_rows,
                              const TilePlace& at) {
  if (num_rows == M) {
    panel_rows<Tile, M, kFewVecs>(call, dtype, at);
  } else if constexpr (M > 1) {
    last_rows<Tile, M - 1>(call, dtype, num_rows, at);
  }
}

template <class Tile>
void multiply_quantised(const QuantisedCall& call, DType dtype, const LinearBlock& block) {
  for (int64_t panel = block.begin; panel < block.end; ++panel) {
    int64_t row = block.row_begin;
    for (; block.row_end - row >= kTallRows; row += kTallRows) {
      const TilePlace at = {row, panel, 0, row == block.row_begin};
      panel_rows<Tile, kTallRows, kTallVecs>(call, dtype, at);
    }
    const int64_t rest = block.row_end - row, tiles = (rest + kFewRows - 1) / kFewRows;
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = row + rest * tile / tiles, last = row + rest * (tile + 1) / tiles;
      last_rows<Tile>(call, dtype, last - first, {first, panel, 0, first == block.row_begin});
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
