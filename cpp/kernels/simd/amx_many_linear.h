// Linear layers in bfloat16 with many rows on AMX's tiles.
//
// Squares of 32 rows times 32 outputs, as two tiles of each: rows are tiles where they stand in x,
// outputs where they stand in their panel. The rows of a block stay in the second-level cache while
// panel after panel is multiplied with them. Overlap the tiles' products vectors write the outputs
// of the square before, and what comes next is asked for.
//
// Sums are float32 over the whole depth, in its order, rounded once: a row's outputs are the same
// bits among whatever rows it stands, here and in amx_linear.h. Rows that fill no square are
// computed with those before them. REQUIRES: block.row_end >= 32.
#pragma once

#include <immintrin.h>

#include "kernels/simd/amx_linear.h"

namespace vtensor::kernels {
namespace {

constexpr int64_t kSquare = 32;
// Of x's rows in a block: half of the second-level cache.
constexpr int64_t kRowBlockBytes = 1 << 20;
constexpr int64_t kMaxBlockRows = 256;

// The outputs of a square, in one panel or, with gates, in one of the gates' and one of the
// factors'.
struct SquareOutputs {
  const char* left = nullptr;  // tiles, the next 32 inputs kAmxRows * kPanelRowBytes on
  const char* right = nullptr;
  int64_t column = 0;  // of the call's output
};

inline SquareOutputs square_outputs(const LinearCall& call, int64_t square) {
  const char* panels = static_cast<const char*>(call.panels);
  const int64_t panel_bytes = call.depth * kAmxColumns * 2;
  if (!call.gates) {
    const char* panel = panels + square * panel_bytes;
    return {panel, panel + 64, square * kSquare};
  }
  const char* gates = panels + square / 2 * panel_bytes + square % 2 * 64;
  return {gates, gates + call.columns / 2 / kAmxColumns * panel_bytes, square * kSquare / 2};
}

// Writes the outputs of a square from its sums, a few rows at each step of the next one's depth.
class SquareWriter {
 public:
  explicit SquareWriter(const LinearCall& call) : call_(call) {}

  // sums [num_rows, 32], in about `num_steps` steps.
  void start(const float* sums, int64_t row, int64_t num_rows, int64_t column, int64_t num_steps) {
    sums_ = sums;
    row_ = row;
    last_row_ = row + num_rows;
    column_ = column;
    rows_ = (num_rows + num_steps - 1) / num_steps;
  }
  VTENSOR_INLINE void step() {
    for (int64_t i = 0; i < rows_ && row_ < last_row_; ++i) write_row();
  }
  void end() {
    while (row_ < last_row_) write_row();
  }

 private:
  VTENSOR_INLINE void write_row() {
    const Vec left = load(sums_), right = load(sums_ + kLanes);
    if (call_.gates) {
      finish_gate<BFloat16>(call_, row_, column_, left, right);
    } else {
      finish<BFloat16>(call_, row_, column_, left);
      if (column_ + kLanes < call_.columns) {
        finish<BFloat16>(call_, row_, column_ + kLanes, right);
      }
    }
    sums_ += kSquare;
    ++row_;
  }

  const LinearCall& call_;
  const float* sums_ = nullptr;
  int64_t row_ = 0;
  int64_t last_row_ = 0;
  int64_t column_ = 0;
  int64_t rows_ = 0;  // a step
};

// What is asked for during the products: a share of the panels that come next, and the lines that
// the square's outputs will be written to and its residual read from.
class SquarePrefetch {
 public:
  // Of the next outputs' panels the share of one of `num_tiles`.
  void start_panels(const SquareOutputs& next, int64_t tile, int64_t num_tiles, int64_t num_steps) {
    lines_ = (kAmxRows + num_tiles - 1) / num_tiles;
    const int64_t offset = tile * num_steps * lines_ * kPanelRowBytes;
    left_ = next.left + offset;
    right_ = next.right + offset;
  }
  void start_rows(const LinearCall& call, int64_t row, int64_t column, int64_t num_steps) {
    const auto at = [=](const void* base, int64_t stride) {
      return static_cast<const char*>(base) + (row * stride + column) * 2;
    };
    rows_ = (kSquare + num_steps - 1) / num_steps;
    output_bytes_ = call.output_stride * 2;
    output_ = at(call.output, call.output_stride);
    residual_bytes_ = call.residual == nullptr ? output_bytes_ : call.residual_stride * 2;
    residual_ = call.residual == nullptr ? output_ : at(call.residual, call.residual_stride);
  }
  VTENSOR_INLINE void step() {
    for (int64_t i = 0; i < lines_; ++i) {
      __builtin_prefetch(left_ + i * kPanelRowBytes, 0, 2);
      __builtin_prefetch(right_ + i * kPanelRowBytes, 0, 2);
    }
    left_ += lines_ * kPanelRowBytes;
    right_ += lines_ * kPanelRowBytes;
    for (int64_t i = 0; i < rows_; ++i) {
      __builtin_prefetch(output_, 1);
      __builtin_prefetch(residual_);
      output_ += output_bytes_;
      residual_ += residual_bytes_;
    }
  }

 private:
  const char* left_ = nullptr;
  const char* right_ = nullptr;
  int64_t lines_ = 0;  // of each, a step
  const char* output_ = nullptr;
  const char* residual_ = nullptr;
  int64_t output_bytes_ = 0;
  int64_t residual_bytes_ = 0;
  int64_t rows_ = 0;  // a step
};

// C tiles 0 1 / 2 3 = 32 rows from x on times the outputs.
VTENSOR_INLINE void square_multiply(const char* x, int64_t x_bytes, const SquareOutputs& outputs,
                                    int64_t num_steps, SquarePrefetch ahead,
                                    SquareWriter& overlap) {
  constexpr int64_t kXStep = kAmxDepth * 2, kStep = kAmxRows * kPanelRowBytes;
  const char* left = outputs.left;
  const char* right = outputs.right;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < num_steps; ++i) {
    _tile_loadd(6, left, kPanelRowBytes);
    _tile_loadd(4, x, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, right, kPanelRowBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + kAmxRows * x_bytes, x_bytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    x += kXStep;
    left += kStep;
    right += kStep;
    ahead.step();
    overlap.step();
  }
}

// Rows [row, row_end), which fit in the second-level cache, times the squares [begin, end).
inline void amx_row_block(const LinearCall& call, int64_t row, int64_t row_end, int64_t begin,
                          int64_t end) {
  const int64_t x_bytes = call.x_stride * 2, num_steps = call.depth / kAmxDepth;
  const int64_t num_tiles = (row_end - row + kSquare - 1) / kSquare;
  alignas(64) float sums[2][kSquare * kSquare];
  SquareWriter writer(call);
  int which = 0;
  for (int64_t square = begin; square < end; ++square) {
    const SquareOutputs outputs = square_outputs(call, square);
    const SquareOutputs next = square_outputs(call, square + 1 < end ? square + 1 : begin);
    for (int64_t tile = 0; tile < num_tiles; ++tile, which ^= 1) {
      const int64_t first = row + tile * kSquare;
      const int64_t at = first + kSquare <= row_end ? first : row_end - kSquare;
      SquarePrefetch ahead;
      ahead.start_panels(next, tile, num_tiles, num_steps);
      ahead.start_rows(call, first, outputs.column, num_steps);
      square_multiply(static_cast<const char*>(call.x) + at * x_bytes, x_bytes, outputs, num_steps,
                      ahead, writer);
      writer.end();
      amx_store(sums[which], kSquare);
      writer.start(sums[which] + (first - at) * kSquare, first, at + kSquare - first,
                   outputs.column, num_steps);
    }
  }
  writer.end();
}

// Blocks of equal size, as few as there can be.
inline void amx_many_linear(const LinearCall& call, const LinearBlock& block, float* /*scratch*/) {
  const AmxTiles tiles;
  const int64_t squares = (block.row_end - block.row_begin + kSquare - 1) / kSquare;
  int64_t most = kRowBlockBytes / (call.depth * 2) / kSquare;
  most = most < 1 ? 1 : most > kMaxBlockRows / kSquare ? kMaxBlockRows / kSquare : most;
  const int64_t parts = (squares + most - 1) / most;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = block.row_begin + squares * part / parts * kSquare;
    const int64_t last = block.row_begin + squares * (part + 1) / parts * kSquare;
    amx_row_block(call, first, last < block.row_end ? last : block.row_end, block.begin, block.end);
  }
}

}  // namespace
}  // namespace vtensor::kernels
