// Linear layers with weights and inputs of 8 bits on AMX's tiles.
//
// One instruction multiplies 64 inputs of 16 rows (unsigned) with those of 16 outputs (signed) and
// adds them to sums of 32 bits, exactly: so these are the sums of every other level, whatever the
// tiles. Rows are tiles where they stand, as are outputs in their panel: 16 words of 16 outputs.
//
//   rows up to kFewRows    vectors (quantised.h), which wait for memory as well
//   up to 16               strips of 64 outputs: a tile of rows times the four of a panel
//   more                   strips of 32 outputs, half of a panel: two tiles times two, as in
//                          amx_many_linear.h, whose way to overlap and to ask ahead this is
//
// Rows that fill no two tiles are computed with those before them.
#pragma once

#include <immintrin.h>

#include "kernels/simd/amx_tiles.h"
#include "kernels/simd/quantised.h"

namespace vtensor::kernels {
namespace {

constexpr int64_t kByteDepth = 64;  // inputs that one instruction sums over
constexpr int64_t kWordRowBytes = kQuantisedColumns * 4;
constexpr int64_t kByteStepBytes = kTileRows * kWordRowBytes;
// Of rows that are multiplied with strip after strip: half of the second-level cache.
constexpr int64_t kByteBlockBytes = 1 << 20;

// Tiles are 0 1 2 3 = sums, 4 5 = rows, 6 7 = outputs; of one tile of rows 5 is outputs too.
template <int kVecs>
constexpr int64_t kStripRows = kVecs == 4 ? 16 : 32;
template <int kVecs>
constexpr int64_t kStripColumns = kVecs * 16;

// Sums += 64 inputs of the rows from x on times those of a strip's outputs.
template <int kVecs>
VTENSOR_INLINE void strip_step(const char* x, int64_t x_bytes, const char* words) {
  _tile_loadd(6, words, kWordRowBytes);
  _tile_loadd(4, x, x_bytes);
  _tile_dpbusd(0, 4, 6);
  _tile_loadd(7, words + 64, kWordRowBytes);
  _tile_dpbusd(1, 4, 7);
  if constexpr (kVecs == 4) {
    _tile_loadd(5, words + 128, kWordRowBytes);
    _tile_dpbusd(2, 4, 5);
    _tile_loadd(6, words + 192, kWordRowBytes);
    _tile_dpbusd(3, 4, 6);
  } else {
    _tile_loadd(5, x + kTileRows * x_bytes, x_bytes);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
  }
}

// The inputs beyond the last whole step, filled up with zeros: nothing is read beyond the end of
// the rows or of the weight.
template <int kVecs>
inline void last_step(const char* x, int64_t x_bytes, const char* words, int64_t num_rows,
                      int64_t num_inputs) {
  alignas(64) char rows[kStripRows<kVecs> * kByteDepth] = {};
  alignas(64) char panel[kByteStepBytes] = {};
  for (int64_t row = 0; row < num_rows; ++row) {
    __builtin_memcpy(rows + row * kByteDepth, x + row * x_bytes, static_cast<size_t>(num_inputs));
  }
  for (int64_t k = 0; k < num_inputs / 4; ++k) {
    __builtin_memcpy(panel + k * kWordRowBytes, words + k * kWordRowBytes,
                     kStripColumns<kVecs> * 4);
  }
  amx_written();
  strip_step<kVecs>(rows, kByteDepth, panel);
}

template <int kVecs>
VTENSOR_INLINE void store_sums(int32_t* sums) {
  constexpr int64_t kColumns = kStripColumns<kVecs>, kBytes = kColumns * 4;
  _tile_stored(0, sums, kBytes);
  _tile_stored(1, sums + 16, kBytes);
  if constexpr (kVecs == 4) {
    _tile_stored(2, sums + 32, kBytes);
    _tile_stored(3, sums + 48, kBytes);
  } else {
    _tile_stored(2, sums + kTileRows * kColumns, kBytes);
    _tile_stored(3, sums + kTileRows * kColumns + 16, kBytes);
  }
}

// Writes the outputs of some rows and a strip from their sums, a few rows at each step of the
// depth of the next ones.
template <int kVecs>
class StripWriter {
 public:
  StripWriter(const QuantisedCall& call, DType dtype) : call_(call), dtype_(dtype) {}

  // sums: of rows [row, last_row), in about `num_steps` steps.
  void start(const int32_t* sums, int64_t row, int64_t last_row, int64_t column,
             int64_t num_steps) {
    sums_ = sums;
    row_ = row;
    last_row_ = last_row;
    column_ = column;
    rows_ = (last_row - row + num_steps - 1) / num_steps;
    const int64_t panel = column / kQuantisedColumns, at = column % kQuantisedColumns;
    for (int n = 0; n < kVecs; ++n) {
      outputs_[n] = ByteOutputs(call_.weight, panel, at + n * kLanes);
    }
  }
  VTENSOR_INLINE void step() {
    for (int64_t i = 0; i < rows_ && row_ < last_row_; ++i) write_row();
  }
  void end() {
    while (row_ < last_row_) write_row();
  }

 private:
  VTENSOR_INLINE void write_row() {
#pragma GCC unroll 4
    for (int n = 0; n < kVecs; ++n) {
      IVec sum;
      __builtin_memcpy(&sum, sums_ + n * kLanes, sizeof sum);
      outputs_[n].finish(call_, dtype_, row_, column_ + n * kLanes, sum);
    }
    sums_ += kStripColumns<kVecs>;
    ++row_;
  }

  const QuantisedCall& call_;
  DType dtype_;
  ByteOutputs outputs_[kVecs];
  const int32_t* sums_ = nullptr;
  int64_t row_ = 0;
  int64_t last_row_ = 0;
  int64_t column_ = 0;
  int64_t rows_ = 0;  // a step
};

// What is asked for during the products: a share of the next strip, and the lines that the outputs
// will be written to and their residual read from.
template <int kVecs>
struct StripPrefetch {
  const char* words;
  int64_t word_rows;  // a step
  const char* output;
  int64_t output_bytes;
  const char* residual;
  int64_t residual_bytes;
  int64_t rows;  // a step

  VTENSOR_INLINE void step() {
    for (int64_t i = 0; i < word_rows; ++i, words += kWordRowBytes) {
      for (int n = 0; n < kVecs; ++n) __builtin_prefetch(words + n * 64, 0, 2);
    }
    for (int64_t i = 0; i < rows; ++i) {
      __builtin_prefetch(output, 1);
      __builtin_prefetch(residual);
      output += output_bytes;
      residual += residual_bytes;
    }
  }
};

template <int kVecs>
StripPrefetch<kVecs> rows_ahead(const LinearCall& layer, DType dtype, int64_t row, int64_t column,
                                int64_t num_steps) {
  const auto bytes = static_cast<int64_t>(element_bytes(dtype));
  const bool has_residual = layer.residual != nullptr;
  const int64_t stride = has_residual ? layer.residual_stride : layer.output_stride;
  const void* residual = has_residual ? layer.residual : layer.output;
  column = written_column(layer, column);
  return {nullptr,
          0,
          static_cast<const char*>(layer.output) + (row * layer.output_stride + column) * bytes,
          layer.output_stride * bytes,
          static_cast<const char*>(residual) + (row * stride + column) * bytes,
          stride * bytes,
          (kStripRows<kVecs> + num_steps - 1) / num_steps};
}

// Rows [row, row_end) times the panels [begin, end). num_rows: of the tiles; so many rows end at
// row_end, if some of them before `row`.
template <int kVecs>
void multiply_strips(const QuantisedCall& call, DType dtype, int64_t num_rows, int64_t row,
                     int64_t row_end, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = kStripColumns<kVecs>, kStrips = kQuantisedColumns / kColumns;
  const int64_t depth = call.weight.depth, steps = depth / kByteDepth, num_steps = steps + 1;
  const int64_t num_tiles = (row_end - row + num_rows - 1) / num_rows;
  const int64_t share = (kTileRows + num_tiles - 1) / num_tiles;
  const auto strip_words = [&](int64_t strip) {
    return reinterpret_cast<const char*>(call.weight.words) +
           strip / kStrips * depth * kQuantisedColumns + strip % kStrips * kColumns * 4;
  };
  const int64_t num_strips = (call.layer.columns + kColumns - 1) / kColumns;
  const int64_t last = end * kStrips < num_strips ? end * kStrips : num_strips;
  alignas(64) int32_t sums[2][kStripRows<kVecs> * kColumns];
  StripWriter<kVecs> writer(call, dtype);
  int which = 0;
  for (int64_t strip = begin * kStrips; strip < last; ++strip) {
    const char* next = strip_words(strip + 1 < last ? strip + 1 : begin * kStrips);
    for (int64_t tile = 0; tile < num_tiles; ++tile, which ^= 1) {
      const int64_t first = row + tile * num_rows;
      const int64_t at = first + num_rows <= row_end ? first : row_end - num_rows;
      const char* x = static_cast<const char*>(call.inputs) + at * call.input_stride;
      const char* words = strip_words(strip);
      auto ahead = rows_ahead<kVecs>(call.layer, dtype, first, strip * kColumns, num_steps);
      ahead.words = next + tile * steps * share * kWordRowBytes;
      ahead.word_rows = share;
      amx_zero();
      for (int64_t i = 0; i < steps; ++i, x += kByteDepth, words += kByteStepBytes) {
        strip_step<kVecs>(x, call.input_stride, words);
        ahead.step();
        writer.step();
      }
      if (depth % kByteDepth != 0) {
        last_step<kVecs>(x, call.input_stride, words, num_rows, depth % kByteDepth);
      }
      writer.end();
      store_sums<kVecs>(sums[which]);
      writer.start(sums[which] + (first - at) * kColumns, first, at + num_rows, strip * kColumns,
                   num_steps);
    }
  }
  writer.end();
}

// Blocks of equal size, as few as there can be.
inline void multiply_bytes(const QuantisedCall& call, DType dtype, const LinearBlock& block) {
  const int64_t rows = block.row_end - block.row_begin;
  if (rows <= kFewRows) {
    multiply_quantised<ByteTile>(call, dtype, block);
    return;
  }
  if (rows <= kTileRows) {
    const AmxTiles tiles = AmxTiles::of_few_rows(static_cast<int>(rows));
    multiply_strips<4>(call, dtype, rows, block.row_begin, block.row_end, block.begin, block.end);
    return;
  }
  const int64_t num_rows = rows < kStripRows<2> ? rows : kStripRows<2>;
  const AmxTiles tiles(static_cast<int>(num_rows));
  const int64_t squares = (rows + num_rows - 1) / num_rows;
  int64_t most = kByteBlockBytes / call.weight.depth / num_rows;
  most = most < 1 ? 1 : most;
  const int64_t parts = (squares + most - 1) / most;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = block.row_begin + squares * part / parts * num_rows;
    const int64_t last = block.row_begin + squares * (part + 1) / parts * num_rows;
    multiply_strips<2>(call, dtype, num_rows, first, last < block.row_end ? last : block.row_end,
                       block.begin, block.end);
  }
}

}  // namespace
}  // namespace vtensor::kernels
