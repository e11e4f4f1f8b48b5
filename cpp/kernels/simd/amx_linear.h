// Linear layers with packed weights in bfloat16 on AMX's tiles: 32 rows times a panel at once.
//
// A panel is stored as the tiles want it: 16 pairs of inputs of 16 outputs a tile, the two tiles of
// a panel side by side. Rows of x are tiles where they stand.
#pragma once

#include <immintrin.h>

#include "kernels/simd/amx_tiles.h"
#include "kernels/simd/linear.h"

namespace vtensor::kernels {
namespace {

constexpr int kAmxRows = 16;
constexpr int64_t kAmxColumns = kPanelColumns<BFloat16>;
constexpr int64_t kPanelRowBytes = kStepBytes<BFloat16>;
// How far ahead of the products a panel is asked for: two steps of 32 inputs.
constexpr int64_t kAmxPrefetchBytes = 2 * kAmxRows * kPanelRowBytes;

VTENSOR_INLINE void prefetch_panel(const char* panel) {
#pragma GCC unroll 32
  for (int i = 0; i < kAmxRows * kPanelRowBytes; i += 64) {
    __builtin_prefetch(panel + kAmxPrefetchBytes + i);
  }
}

// Sums of up to 16 rows in tiles 0 1, with kBoth of up to 32 in tiles 0 1 / 2 3.
template <bool kBoth>
VTENSOR_INLINE void amx_multiply(const char* x, int64_t x_bytes, const char* panel, int64_t depth,
                                 bool is_first) {
  _tile_zero(0);
  _tile_zero(1);
  if constexpr (kBoth) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kAmxDepth) {
    const char* tiles = panel + k / 2 * kPanelRowBytes;
    if (is_first) prefetch_panel(tiles);
    _tile_loadd(6, tiles, kPanelRowBytes);
    _tile_loadd(7, tiles + 64, kPanelRowBytes);
    _tile_loadd(4, x + k * 2, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kBoth) {
      _tile_loadd(5, x + k * 2 + kAmxRows * x_bytes, x_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
}

// Rows [row, row + num_rows) times one panel; the tiles are set up for num_rows.
inline void amx_linear_tile(const LinearCall& call, int64_t row, int64_t num_rows, int64_t panel,
                            bool is_first) {
  const char* x = static_cast<const char*>(call.x) + row * call.x_stride * 2;
  const char* weight = static_cast<const char*>(call.panels) + panel * kAmxColumns * call.depth * 2;
  alignas(64) float sums[2 * kAmxRows * kAmxColumns];
  if (num_rows > kAmxRows) {
    amx_multiply<true>(x, call.x_stride * 2, weight, call.depth, is_first);
    amx_store(sums, kAmxColumns);
  } else {
    amx_multiply<false>(x, call.x_stride * 2, weight, call.depth, is_first);
    _tile_stored(0, sums, kAmxColumns * 4);
    _tile_stored(1, sums + 16, kAmxColumns * 4);
  }
  for (int64_t n = 0; n < kAmxColumns; n += kLanes) {
    const int64_t column = panel * kAmxColumns + n;
    if (column >= call.columns) break;
    for (int64_t m = 0; m < num_rows; ++m) {
      finish<BFloat16>(call, row + m, column, load(sums + m * kAmxColumns + n));
    }
  }
}

// First what fills 32 rows, then the rest with smaller tiles.
inline void amx_linear(const LinearCall& call, int64_t num_rows, int64_t begin, int64_t end) {
  const int64_t rest = num_rows % (2 * kAmxRows), full = num_rows - rest;
  if (full > 0) {
    const AmxTiles tiles;
    for (int64_t panel = begin; panel < end; ++panel) {
      for (int64_t row = 0; row < full; row += 2 * kAmxRows) {
        amx_linear_tile(call, row, 2 * kAmxRows, panel, row == 0);
      }
    }
  }
  if (rest > 0) {
    const AmxTiles tiles(static_cast<int>(rest));
    for (int64_t panel = begin; panel < end; ++panel) {
      amx_linear_tile(call, full, rest, panel, full == 0);
    }
  }
}

template <>
void linear<BFloat16>(const LinearCall& call, int64_t num_rows, int64_t begin, int64_t end) {
  amx_linear(call, num_rows, begin, end);
}

}  // namespace
}  // namespace vtensor::kernels
