// Linear layers with quantised weights: a tile of rows times the outputs of a panel.
//
// An output is summed up in the same order whatever the tile, so that a row's bits do not hang on
// how many there are; integers are summed exactly.
#pragma once

#include <type_traits>

#include "kernels/calls/quantised.h"
#include "kernels/simd/dot.h"
#include "kernels/simd/group_numbers.h"
#include "kernels/simd/input_products.h"
#include "kernels/simd/linear.h"
#include "kernels/simd/step_words.h"

namespace vtensor::kernels {
namespace {

// 24 of 32 registers accumulate with AVX-512, 12 of 16 before.
constexpr int kFewRows = 6;
// Vectors of a tile of so many rows. One row, as memory is what it waits for, takes a panel from
// end to end.
constexpr int tile_vecs(int rows) {
  if (kLanes == 16) return 4;
  return rows == 1 ? kMaxVecs : rows <= kFewRows / 2 ? 4 : 2;
}
// How far ahead memory is asked for. Before AVX-512, 2,048 bytes made 6 bits half as slow again;
// with it, no distance was better (measured on Zen 4).
constexpr int64_t kPanelStreamBytes = kLanes == 16 ? kStreamBytes : 6144;
// Bytes of one word of all outputs of a panel.
constexpr int64_t kWordsBytes = kQuantisedColumns * 4;

// Where a tile is: rows [row, row + M), and outputs from `column` on in this panel.
struct TilePlace {
  int64_t row;
  int64_t panel;
  int64_t column;  // in the panel
  Prefetch ahead;  // what is asked for meanwhile
};

VTENSOR_INLINE const uint32_t* words_of(const QuantisedWeight& weight, const TilePlace& at) {
  return weight.words + at.panel * weight.num_words() * kQuantisedColumns + at.column;
}

template <class T>
VTENSOR_INLINE void finish_output(const LinearCall& layer, int64_t row, int64_t column, Vec sum) {
  if (written_column(layer, column) == column) {
    finish<T>(layer, row, column, sum);
  } else {
    finish_factor<T>(layer, row, column, sum);
  }
}

VTENSOR_INLINE void finish_sum(const QuantisedCall& call, DType dtype, int64_t row, int64_t column,
                               Vec sum) {
  if (column >= call.layer.columns) return;
  if (dtype == DType::kFloat32) {
    finish_output<float>(call.layer, row, column, sum);
  } else {
    finish_output<BFloat16>(call.layer, row, column, sum);
  }
}

// A vector of outputs whose inputs are integers: what makes numbers of their sums.
struct ByteOutputs {
  Vec scale = {};
  IVec offset = {};

  ByteOutputs() = default;
  // column: in the panel
  VTENSOR_INLINE ByteOutputs(const QuantisedWeight& weight, int64_t panel, int64_t column)
      : offset(reinterpret_cast<IVec>(load_words(reinterpret_cast<const uint32_t*>(weight.sums) +
                                                 panel * kQuantisedColumns + column))) {
    Vec scales[1];
    GroupNumbers<1>(weight, weight.scales, panel, column).next(scales);
    scale = scales[0];
  }
  VTENSOR_INLINE void finish(const QuantisedCall& call, DType dtype, int64_t row, int64_t column,
                             IVec sum) const {
    const Vec integers = __builtin_convertvector(sum - offset, Vec);
    finish_sum(call, dtype, row, column, integers * (scale * call.x_scales[row]));
  }
};

// Inputs as integers. A tile is a function of its own: gcc would hand out its registers by what it
// is inlined into, and keep sums on the stack.
struct ByteTile {
  template <int M>
  static constexpr int kVecs = tile_vecs(M);

  template <int M, int N>
  [[gnu::noinline]] static void compute(const QuantisedCall& call, DType dtype,
                                        const TilePlace& at) {
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
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) w[n] = SignedBytes(load_words(words + n * kLanes));
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const UnsignedBytes x(UVec{} + rows.at(m, k));
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[m][n] = add_dot(sums[m][n], x, w[n]);
      }
    }
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) {
      const int64_t column = at.column + n * kLanes;
      const ByteOutputs outputs(weight, at.panel, column);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        outputs.finish(call, dtype, at.row + m, at.panel * kQuantisedColumns + column, sums[m][n]);
      }
    }
  }
};

// Weights in groups, a function of its own, too. X is how inputs of a step are read, Words how
// weights stand there.
template <class X, class Words>
struct GroupTile {
  using Product = InputProduct<X, Words>;
  using Part = typename Product::Sum;  // of a sum: a piece's
  static constexpr bool kIsInt16s = std::is_same_v<X, TwoInt16s>;
  static constexpr bool kIsBytes = std::is_same_v<X, FourBytes>;
  static constexpr bool kHasUnits = kIsInt16s || kIsBytes;
  static constexpr int kBits = Words::kBits;
  // Numbers of a row for a step.
  static constexpr int kNumbers = step_inputs(kBits) / Product::kInputs;
  // As many as leave registers for sums of a group and of the row: bytes are done too soon for
  // memory.
  template <int M>
  static constexpr int kVecs = kIsBytes && M > kFewRows / 2 ? 2 : tile_vecs(M);

  template <int M, int N>
  VTENSOR_INLINE static void add_step(const RowPointers<X, M>& rows, int64_t bytes,
                                      const uint32_t* words, const StoredLookUp& stored,
                                      Part (&sums)[M][N]) {
    Words step[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) step[n] = Words(words + n * kLanes);
#pragma GCC unroll 16
    for (int i = 0; i < kNumbers; ++i) {
      const LookUp& look_up = at_hand<!Words::kIsEven>(&stored);
      typename Product::Factor factors[N];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) factors[n] = Product::factor(step[n], look_up, i);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const typename Product::Input x(rows.at(m, bytes + i * 4));
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sums[m][n] = Product::add(sums[m][n], x, factors[n]);
      }
    }
  }

  template <int M, int N>
  [[gnu::noinline]] static void compute(const QuantisedCall& call, DType dtype,
                                        const TilePlace& at) {
    const QuantisedWeight& weight = call.weight;
    const RowPointers<X, M> rows(reinterpret_cast<const X*>(static_cast<const char*>(call.inputs) +
                                                            at.row * call.input_stride),
                                 call.input_stride / 4);
    const uint32_t* words = words_of(weight, at);
    const StoredLookUp look_up(weight.codebook);
    const int64_t num_groups = weight.num_groups();
    GroupNumbers<N> scales(weight, weight.scales, at.panel, at.column);
    GroupNumbers<N> minimums(weight, weight.minimums, at.panel, at.column);
    const bool is_product = weight.scale_format == ScaleFormat::kBlocks;
    const bool has_row_scales = kIsBytes && weight.rotates_inputs;
    Prefetch ahead = at.ahead;
    int64_t bytes = 0;
    Vec sums[M][N] = {};
    const int64_t length = kIsInt16s ? call.piece : weight.group;
    const int64_t group_pieces = kIsInt16s ? weight.group / length : 1;
    int64_t piece = 0;
    for (int64_t group = 0; group < num_groups; ++group) {
      Vec scale[N] = {}, minimum[N] = {};
      for (int64_t i = 0; i < group_pieces; ++i, ++piece) {
        Part part[M][N] = {};
        start<M, N>(call, at, piece, part);
        for (int64_t k = 0; k < length; k += step_inputs(kBits)) {
          ahead.step();
          add_step<M, N>(rows, bytes, words, look_up, part);
          words += step_words(kBits) * kQuantisedColumns;
          bytes += kNumbers * 4;
        }
        if (i == 0) scales.next(scale);
        const float* x_sums = nullptr;
        if (weight.minimums != nullptr && i + 1 == group_pieces) {
          x_sums = call.x_sums + at.row * num_groups + group;
          minimums.next(minimum);
#pragma GCC unroll 8
          for (int n = 0; n < N; ++n) {
            if (is_product) minimum[n] = scale[n] * static_cast<float>(weight.zero()) - minimum[n];
          }
        }
        if (has_row_scales) {
          add_part<false>(call, at.row, piece, part, scale, minimum, x_sums, sums);
        } else {
          add_part<kHasUnits>(call, at.row, piece, part, scale, minimum, x_sums, sums);
        }
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        const int64_t column = at.panel * kQuantisedColumns + at.column + n * kLanes;
        const float unit = has_row_scales ? call.x_scales[at.row + m] : 1;
        finish_sum(call, dtype, at.row + m, column, sums[m][n] * unit);
      }
    }
  }

 private:
  VTENSOR_INLINE static Vec in_floats(Vec sum) { return sum; }
  VTENSOR_INLINE static Vec in_floats(IVec sum) { return __builtin_convertvector(sum, Vec); }

  // sums += scale * part and, with units, times that of the piece; + minimum * the sum of a group's
  // inputs, x_sums: of the first row; none where a group has more pieces or no minimums. Registers
  // do not hold all sums: each is read and written once.
  template <bool kByUnits, int M, int N>
  VTENSOR_INLINE static void add_part(const QuantisedCall& call, int64_t row, int64_t piece,
                                      const Part (&part)[M][N], const Vec (&scale)[N],
                                      const Vec (&minimum)[N], const float* x_sums,
                                      Vec (&sums)[M][N]) {
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      Vec sum[N];
      const float unit = kByUnits ? call.x_scales[(row + m) * call.num_pieces + piece] : 1;
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) {
        sum[n] = sums[m][n] + scale[n] * unit * in_floats(part[m][n]);
      }
      if (x_sums != nullptr) {
        const float x_sum = x_sums[m * call.weight.num_groups()];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) sum[n] += minimum[n] * x_sum;
      }
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) sums[m][n] = sum[n];
    }
  }

  template <int M, int N>
  VTENSOR_INLINE static void start(const QuantisedCall& call, const TilePlace& at, int64_t piece,
                                   Part (&part)[M][N]) {
    if constexpr (kIsBytes || (kIsInt16s && kBits < 8)) {
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const int32_t offset = call.x_offsets[(at.row + m) * call.num_pieces + piece];
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) part[m][n] = IVec{} + offset;
      }
    }
  }
};

// All outputs of a panel, M rows at once.
template <class Tile, int M>
VTENSOR_INLINE void panel_rows(const QuantisedCall& call, DType dtype, TilePlace at, Ahead& ahead) {
  constexpr int kVecs = Tile::template kVecs<M>;
  for (at.column = 0; at.column < kQuantisedColumns; at.column += kVecs * kLanes) {
    at.ahead = ahead.next_tile();
    Tile::template compute<M, kVecs>(call, dtype, at);
  }
}

// The same of num_rows.
template <class Tile, int M = kFewRows>
VTENSOR_INLINE void few_rows(const QuantisedCall& call, DType dtype, int64_t num_rows,
                             const TilePlace& at, Ahead& ahead) {
  if (num_rows == M) {
    panel_rows<Tile, M>(call, dtype, at, ahead);
  } else if constexpr (M > 1) {
    few_rows<Tile, M - 1>(call, dtype, num_rows, at, ahead);
  }
}

// How many tiles that is.
template <class Tile, int M = kFewRows>
constexpr int64_t tiles_of(int64_t num_rows) {
  if (num_rows == M) return kQuantisedColumns / (Tile::template kVecs<M> * kLanes);
  if constexpr (M > 1) return tiles_of<Tile, M - 1>(num_rows);
  return 0;
}

template <class Tile>
void multiply_quantised(const QuantisedCall& call, DType dtype, const LinearBlock& block) {
  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t parts = (num_rows + kFewRows - 1) / kFewRows;
  // No more than there are, where parts differ by a row.
  const int64_t num_tiles = parts * tiles_of<Tile>(num_rows / parts);
  PanelSteps steps = {nullptr, call.weight.depth / step_inputs(call.weight.bits),
                      step_words(call.weight.bits) * kWordsBytes};
  for (int64_t panel = block.begin; panel < block.end; ++panel) {
    steps.begin = call.weight.words + panel * call.weight.num_words() * kQuantisedColumns;
    Ahead ahead(steps, num_tiles, panel == block.begin, kPanelStreamBytes);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t first = num_rows * part / parts, last = num_rows * (part + 1) / parts;
      few_rows<Tile>(call, dtype, last - first, {block.row_begin + first, panel, 0, {}}, ahead);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
