// Linear layers with quantised weights: a tile of rows times the outputs of a panel.
//
// An output is summed up in the same order whatever the tile, so that a row's bits do not hang on
// how many there are; integers are summed exactly.
#pragma once

#include <type_traits>

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
// Bytes of a panel's words for the inputs of one.
constexpr int64_t kWordsBytes = kQuantisedColumns * 4;

// Where a tile is: rows [row, row + M), and outputs from `column` on in this panel.
struct TilePlace {
  int64_t row;
  int64_t panel;
  int64_t column;  // in the panel
  Prefetch ahead;  // what is asked for meanwhile
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

// Numbers as the weight's scales are, which may be those of its minimums: a vector of `group`.
VTENSOR_INLINE Vec load_numbers(const QuantisedWeight& weight, const void* numbers, int64_t panel,
                                int64_t group, int64_t column) {
  const int64_t num_groups = weight.num_groups();
  const int64_t i = (panel * num_groups + group) * kQuantisedColumns + column;
  switch (weight.scale_format) {
    case ScaleFormat::kFloat16:
      return load(static_cast<const Float16*>(numbers) + i);
    case ScaleFormat::kBlocks: {
      const int64_t num_blocks = weight.depth / kScaleBlock;
      const int64_t block = group * weight.group / kScaleBlock;
      const auto* factors = reinterpret_cast<const Float16*>(static_cast<const char*>(numbers) +
                                                             panel * kQuantisedColumns *
                                                                 (2 * num_blocks + num_groups));
      const auto* bytes = reinterpret_cast<const Int8*>(factors + num_blocks * kQuantisedColumns);
      return load(factors + block * kQuantisedColumns + column) *
             load(bytes + group * kQuantisedColumns + column);
    }
    default:
      return load(static_cast<const float*>(numbers) + i);
  }
}

VTENSOR_INLINE Vec load_scale(const QuantisedWeight& weight, int64_t panel, int64_t group,
                              int64_t column) {
  return load_numbers(weight, weight.scales, panel, group, column);
}

// REQUIRES: minimums. scale: that of the same place.
VTENSOR_INLINE Vec load_minimum(const QuantisedWeight& weight, int64_t panel, int64_t group,
                                int64_t column, Vec scale) {
  const Vec numbers = load_numbers(weight, weight.minimums, panel, group, column);
  const bool is_product = weight.scale_format == ScaleFormat::kBlocks;
  return is_product ? scale * static_cast<float>(weight.zero()) - numbers : numbers;
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
      : scale(load_scale(weight, panel, 0, column)),
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
  static constexpr int kRows = kTallRows;

  template <int M, int N>
  static void compute(const QuantisedCall& call, DType dtype, const TilePlace& at) {
    const QuantisedWeight& weight = call.weight;
    const RowPointers<uint32_t, M> rows(
        reinterpret_cast<const uint32_t*>(static_cast<const char*>(call.inputs) +
                                          at.row * call.input_stride),
        call.input_stride / 4);
    const uint32_t* words = words_of(weight, at);
    Prefetch ahead = at.ahead;
    IVec sums[M][N] = {};
    for (int64_t k = 0; k < weight.depth; k += 4, words += kQuantisedColumns) {
      ahead.step();
      SignedBytes w[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) w[n] = SignedBytes(load_words(words + n * kLanes));
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const UnsignedBytes x(UVec{} + rows.at(m, k));
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

// What 32 bits hold of a row's inputs, beside a float: two bfloat16, or four integers.
enum class TwoBFloat16s : uint32_t {};
enum class FourBytes : uint32_t {};

// Weights in groups. X is how inputs of a step are read; those of 6 bits stand in bytes.
template <class X, int kBits>
struct GroupTile {
  static constexpr bool kIsPair = std::is_same_v<X, TwoBFloat16s>;
  static constexpr bool kIsBytes = std::is_same_v<X, FourBytes>;
  static constexpr int kSteps = (kBits == 4 ? 8 : 4) / (kIsBytes ? 4 : kIsPair ? 2 : 1);
  // As many as leave registers for sums of a group and of the row: bytes are done too soon for
  // memory.
  static constexpr int kRows = kIsBytes ? kFewRows : kTallRows;
  using Part = std::conditional_t<kIsBytes, IVec, Vec>;  // of a sum: a group's

  template <int M, int N>
  VTENSOR_INLINE static void add_word(const RowPointers<X, M>& rows, int64_t bytes,
                                      const uint32_t* words, Part (&sums)[M][N]) {
    UVec w[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) w[n] = load_words(words + n * kLanes);
#pragma GCC unroll 8
    for (int step = 0; step < kSteps; ++step) {
      if constexpr (kIsBytes) {
        UnsignedBytes factors[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) factors[n] = UnsignedBytes(bytes_of<kBits>(w[n], step));
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const SignedBytes x(UVec{} + static_cast<uint32_t>(rows.at(m, bytes + step * 4)));
#pragma GCC unroll 4
          for (int n = 0; n < N; ++n) sums[m][n] = add_dot(sums[m][n], factors[n], x);
        }
      } else if constexpr (kIsPair) {
#if defined(__AVX512BF16__) && VTENSOR_LANES == 16
        UVec pairs[N];
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) pairs[n] = pairs_of<kBits>(w[n], step);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const auto x = static_cast<uint32_t>(rows.at(m, bytes + step * 4));
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
    Prefetch ahead = at.ahead;
    int64_t bytes = 0;
    Vec sums[M][N] = {};
    for (int64_t group = 0; group < num_groups; ++group) {
      Part part[M][N] = {};
      if constexpr (kIsBytes) start<M, N>(call, at, group, part);
      for (int64_t k = 0; k < weight.group; k += weight.word_inputs()) {
        ahead.step();
        add_word<M, N>(rows, bytes, words, part);
        words += kQuantisedColumns;
        bytes += kSteps * 4;
      }
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        const int64_t column = at.column + n * kLanes;
        const Vec scale = load_scale(weight, at.panel, group, column);
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) sums[m][n] += scale * in_floats(part[m][n]);
        if (weight.minimums == nullptr) continue;
        const Vec minimum = load_minimum(weight, at.panel, group, column, scale);
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
        const float x_scale = kIsBytes ? call.x_scales[at.row + m] : 1;
        finish_sum(call, dtype, at.row + m, column, sums[m][n] * x_scale);
      }
    }
  }

 private:
  VTENSOR_INLINE static Vec in_floats(Vec sum) { return sum; }
  VTENSOR_INLINE static Vec in_floats(IVec sum) { return __builtin_convertvector(sum, Vec); }

  template <int M, int N>
  VTENSOR_INLINE static void start(const QuantisedCall& call, const TilePlace& at, int64_t group,
                                   IVec (&part)[M][N]) {
    const int64_t num_groups = call.weight.num_groups();
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const int32_t offset = call.x_offsets[(at.row + m) * num_groups + group];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) part[m][n] = IVec{} + offset;
    }
  }
};

// What the tiles of a panel ask for: one tile alone for the panel itself, as it comes from memory;
// of several, the first ones for a share of the next panel each, so that its tiles find it in the
// cache.
class Ahead {
 public:
  Ahead(const QuantisedCall& call, const LinearBlock& block, int64_t panel, int64_t num_tiles)
      : is_stream_(num_tiles == 1 || panel == block.begin),
        share_(num_tiles < 4 ? kWordsBytes / 2 : kWordsBytes / 4),
        num_steps_(call.weight.depth / call.weight.word_inputs()),
        panel_(reinterpret_cast<const char*>(call.weight.words) +
               panel * num_steps_ * kWordsBytes) {}

  VTENSOR_INLINE Prefetch next_tile() {
    const int64_t tile = tile_++;
    if (tile == 0 && is_stream_) return {panel_ + kStreamBytes, kWordsBytes};
    const int64_t bytes = tile * share_ < kWordsBytes ? share_ : 0;
    return {panel_ + num_steps_ * (kWordsBytes + tile * share_), bytes};
  }

 private:
  bool is_stream_;
  int64_t share_;
  int64_t num_steps_;
  const char* panel_;
  int64_t tile_ = 0;
};

// All outputs of a panel, M rows at once.
template <class Tile, int M, int N>
VTENSOR_INLINE void panel_rows(const QuantisedCall& call, DType dtype, TilePlace at, Ahead& ahead) {
  for (at.column = 0; at.column < kQuantisedColumns; at.column += N * kLanes) {
    at.ahead = ahead.next_tile();
    Tile::template compute<M, N>(call, dtype, at);
  }
}

template <class Tile, int M = kFewRows>
VTENSOR_INLINE void last_rows(const QuantisedCall& call, DType dtype, int64_t num_rows,
                              const TilePlace& at, Ahead& ahead) {
  if (num_rows == M) {
    panel_rows<Tile, M, kFewVecs>(call, dtype, at, ahead);
  } else if constexpr (M > 1) {
    last_rows<Tile, M - 1>(call, dtype, num_rows, at, ahead);
  }
}

template <class Tile>
void multiply_quantised(const QuantisedCall& call, DType dtype, const LinearBlock& block) {
  constexpr int64_t kVecs = kQuantisedColumns / kLanes;
  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t tall = num_rows / Tile::kRows, rest = num_rows % Tile::kRows;
  const int64_t tiles = (rest + kFewRows - 1) / kFewRows;
  const int64_t num_tiles = tall * (kVecs / kTallVecs) + tiles * (kVecs / kFewVecs);
  for (int64_t panel = block.begin; panel < block.end; ++panel) {
    Ahead ahead(call, block, panel, num_tiles);
    int64_t row = block.row_begin;
    for (int64_t tile = 0; tile < tall; ++tile, row += Tile::kRows) {
      panel_rows<Tile, Tile::kRows, kTallVecs>(call, dtype, {row, panel, 0, {}}, ahead);
    }
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = row + rest * tile / tiles, last = row + rest * (tile + 1) / tiles;
      last_rows<Tile>(call, dtype, last - first, {first, panel, 0, {}}, ahead);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
