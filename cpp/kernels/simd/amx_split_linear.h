// Linear layers in float32 with many rows on AMX's tiles, which multiply bfloat16 alone.
//
// Each float32 number is three bfloat16 ones, each product six (split.h says how well, and what
// becomes of infinities).
//
// The depth is cut into blocks. Of each, the rows' parts and, panel by panel, the weight's lie in
// the second-level cache as whole tiles; its sums start at 0 and are added to the output.
#pragma once

#include <immintrin.h>

#include "kernels/simd/amx_tiles.h"
#include "kernels/simd/linear.h"
#include "kernels/simd/split.h"

namespace vtensor::kernels {
namespace {

constexpr int64_t kSplitColumns = kPanelColumns<float>;
// Of the tiles of one step of the depth, all parts.
constexpr int64_t kStepFloats = kParts * kTileFloats;
constexpr int64_t kBlockSteps = kSplitDepth / kAmxDepth;
// Of 16 rows or columns of a block.
constexpr int64_t kBlockFloats = kBlockSteps * kStepFloats;

VTENSOR_INLINE int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }

// Up to 16 rows of x, the inputs [0, depth): [step, part] tiles of 16 rows of 32 numbers. Rows of a
// tile beyond num_rows stay what they are: what is computed from them is never used.
inline void split_rows(const float* x, int64_t x_stride, int64_t num_rows, int64_t depth,
                       float* tiles) {
  for (int64_t row = 0; row < less(kTileRows, num_rows); ++row) {
    const float* from = x + row * x_stride;
    float* to = tiles + row * kLanes;
    for (int64_t k = 0; k < depth; k += kAmxDepth, to += kStepFloats) {
      const SplitVec low = split(load(from + k)), high = split(load(from + k + kLanes));
#pragma GCC unroll 3
      for (int i = 0; i < kParts; ++i) {
        const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high.part[i]),
                                                  reinterpret_cast<__m512>(low.part[i]));
        __builtin_memcpy(to + i * kTileFloats, &both, sizeof both);
      }
    }
  }
}

// The inputs k and k + 1 of a panel, to [column / 16, step, part] tiles of pairs of inputs. Asks
// for those that come next.
VTENSOR_INLINE void split_pair(const float* panel, int64_t k, float* tiles) {
  constexpr int64_t kAhead = 16;
  const float* from = panel + k * kSplitColumns;
  float* to = tiles + k / kAmxDepth * kStepFloats + k % kAmxDepth / 2 * kLanes;
#pragma GCC unroll 4
  for (int64_t n = 0; n < kSplitColumns; n += kLanes, to += kBlockFloats) {
    const SplitVec even = split(load(from + n)), odd = split(load(from + kSplitColumns + n));
    __builtin_prefetch(from + kAhead * kSplitColumns + n);
    __builtin_prefetch(from + (kAhead + 1) * kSplitColumns + n);
#pragma GCC unroll 3
    for (int i = 0; i < kParts; ++i) {
      store(to + i * kTileFloats, from_bits(even.part[i] >> 16 | odd.part[i]));
    }
  }
}

VTENSOR_INLINE void load_rows(const float* tiles) {
  _tile_loadd(4, tiles, 64);
  _tile_loadd(5, tiles + kBlockFloats, 64);
}

VTENSOR_INLINE void load_weight(const float* tiles) {
  _tile_loadd(6, tiles, 64);
  _tile_loadd(7, tiles + kBlockFloats, 64);
}

VTENSOR_INLINE void multiply_tiles() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(1, 4, 7);
  _tile_dpbf16ps(2, 5, 6);
  _tile_dpbf16ps(3, 5, 7);
}

// What vectors do while the tiles multiply, a little at each step of the depth: they add the sums
// of the tiles before to the output and split the next panel.
class Overlap {
 public:
  explicit Overlap(const LinearCall& call, bool is_first) : call_(call), is_first_(is_first) {}

  // The inputs [0, depth) of `panel`, in about `num_steps` steps.
  void split_next(const float* panel, int64_t depth, int64_t num_steps, float* tiles) {
    panel_ = panel;
    tiles_ = tiles;
    k_ = 0;
    depth_ = depth;
    inputs_ = 2 * ((depth / 2 + num_steps - 1) / num_steps);
  }
  void end_split() {
    for (; k_ < depth_; k_ += 2) split_pair(panel_, k_, tiles_);
  }

  // sums [32, 32], of which `num_rows` count, in about `num_steps` steps.
  void add_next(const float* sums, int64_t row, int64_t num_rows, int64_t column,
                int64_t num_steps) {
    sums_ = sums;
    row_ = row;
    column_ = column;
    last_row_ = row + num_rows;
    rows_ = (num_rows + num_steps - 1) / num_steps;
  }
  void end_add() {
    while (row_ < last_row_) add_row();
  }

  VTENSOR_INLINE void step() {
    for (int64_t i = 0; i < inputs_ && k_ < depth_; i += 2, k_ += 2) {
      split_pair(panel_, k_, tiles_);
    }
    for (int64_t i = 0; i < rows_ && row_ < last_row_; ++i) add_row();
  }

 private:
  // In the first block of the depth with bias and residual.
  VTENSOR_INLINE void add_row() {
    const int64_t width = less(2 * kLanes, call_.columns - column_);
    float* out = static_cast<float*>(call_.output) + row_ * call_.output_stride + column_;
    for (int64_t n = 0; n < width; n += kLanes) {
      if (is_first_) {
        finish<float>(call_, row_, column_ + n, load(sums_ + n));
      } else {
        store(out + n, load(out + n) + load(sums_ + n));
      }
    }
    sums_ += 2 * kLanes;
    ++row_;
  }

  const LinearCall& call_;
  const bool is_first_;
  const float* panel_ = nullptr;
  float* tiles_ = nullptr;
  int64_t k_ = 0;
  int64_t depth_ = 0;
  int64_t inputs_ = 0;  // a step
  const float* sums_ = nullptr;
  int64_t row_ = 0;
  int64_t last_row_ = 0;
  int64_t column_ = 0;
  int64_t rows_ = 0;  // a step
};

// C tiles 0 1 / 2 3 = two tiles of rows times two of columns, each product with one change of
// parts; the small ones first.
inline void split_multiply(const float* rows, const float* weight, int64_t depth,
                           Overlap& overlap) {
  amx_zero();
  for (int64_t k = 0; k < depth; k += kAmxDepth) {
    load_rows(rows);
    load_weight(weight + 2 * kTileFloats);
    multiply_tiles();  // x1 w3
    load_weight(weight + kTileFloats);
    multiply_tiles();  // x1 w2
    load_rows(rows + kTileFloats);
    multiply_tiles();  // x2 w2
    overlap.step();
    load_weight(weight);
    multiply_tiles();  // x2 w1
    load_rows(rows + 2 * kTileFloats);
    multiply_tiles();  // x3 w1
    load_rows(rows);
    multiply_tiles();  // x1 w1
    rows += kStepFloats;
    weight += kStepFloats;
  }
}

// One block of the depth: rows [row, row + num_rows) times the panels [begin, end).
inline void split_block(const LinearCall& call, int64_t row, int64_t num_rows, int64_t begin,
                        int64_t end, int64_t k, float* scratch) {
  const int64_t depth = less(kSplitDepth, call.depth - k), steps = depth / kAmxDepth;
  const int64_t tiles = 2 * ((num_rows + 2 * kTileRows - 1) / (2 * kTileRows));
  const float* x = static_cast<const float*>(call.x) + row * call.x_stride + k;
  for (int64_t m = 0; m < num_rows; m += kTileRows) {
    split_rows(x + m * call.x_stride, call.x_stride, num_rows - m, depth,
               scratch + m / kTileRows * kBlockFloats);
  }
  float* weight = scratch + kSplitRows / kTileRows * kBlockFloats;
  float* next_weight = weight + kSplitColumns / kTileRows * kBlockFloats;
  const auto inputs_of = [&](int64_t panel) {
    return static_cast<const float*>(call.panels) + (panel * call.depth + k) * kSplitColumns;
  };
  Overlap overlap(call, k == 0);
  overlap.split_next(inputs_of(begin), depth, 1, weight);
  overlap.end_split();
  alignas(64) float sums[2][4 * kTileRows * kTileRows];
  int which = 0;
  for (int64_t panel = begin; panel < end; ++panel) {
    if (panel + 1 < end)
      overlap.split_next(inputs_of(panel + 1), depth, tiles * steps, next_weight);
    for (int64_t n = 0; n < kSplitColumns; n += 2 * kTileRows) {
      const int64_t column = panel * kSplitColumns + n;
      if (column >= call.columns) break;
      for (int64_t m = 0; m < num_rows; m += 2 * kTileRows, which ^= 1) {
        split_multiply(scratch + m / kTileRows * kBlockFloats,
                       weight + n / kTileRows * kBlockFloats, depth, overlap);
        overlap.end_add();
        amx_store(sums[which], 2 * kTileRows);
        overlap.add_next(sums[which], row + m, less(2 * kTileRows, num_rows - m), column, steps);
      }
    }
    overlap.end_split();
    float* other = weight;
    weight = next_weight;
    next_weight = other;
  }
  overlap.end_add();
}

// Blocks of equal size, as few as there can be.
inline void amx_split_linear(const LinearCall& call, const LinearBlock& block, float* scratch) {
  const AmxTiles tiles;
  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t parts = (num_rows + kSplitRows - 1) / kSplitRows;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = num_rows * part / parts, last = num_rows * (part + 1) / parts;
    for (int64_t k = 0; k < call.depth; k += kSplitDepth) {
      split_block(call, block.row_begin + first, last - first, block.begin, block.end, k, scratch);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
