// AMX's tiles: their configuration, and what all products on them do.
//
// A product of tiles sums over 32 bfloat16 numbers and keeps sums in float32. C is 2 x 2 tiles, so
// that a tile of A or B that is loaded is used twice. The configuration belongs to the thread and
// others (oneDNN) may have set it: AmxTiles puts it back.
// REQUIRES: the process may use AMX (isa/choice.cpp asks for it).
#pragma once

#include <immintrin.h>

#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

constexpr int kAmxDepth = 32;  // bfloat16 numbers that one instruction sums over
constexpr int kTileBytes = 1024;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileFloats = kTileBytes / 4;

// What was written before is in memory: the intrinsics that load tiles or their configuration do
// not tell gcc what they read, so that it may write that later, or never.
VTENSOR_INLINE void amx_written() { __asm__ volatile("" ::: "memory"); }

// All eight tiles, for as long as it lives: at their full size, or with fewer rows.
class AmxTiles {
 public:
  // For up to 32 rows: 0 1 4 have the first 16, 2 3 5 the others, if there are any.
  explicit AmxTiles(int num_rows = 32)
      : AmxTiles(num_rows < 16 ? num_rows : 16, num_rows > 16 ? num_rows - 16 : 16, 0x13, 0x2c) {}
  // Up to 16 rows: 0 to 4 have them.
  static AmxTiles of_few_rows(int num_rows) { return AmxTiles(num_rows, 16, 0x1f, 0); }
  ~AmxTiles() { _tile_loadconfig(&before_); }
  AmxTiles(const AmxTiles&) = delete;
  AmxTiles& operator=(const AmxTiles&) = delete;

 private:
  struct alignas(64) Config {
    uint8_t palette = 0;
    uint8_t start_row = 0;
    uint8_t reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  // Rows of the tiles that are bits of `first_tiles` and of `second_tiles`.
  AmxTiles(int first, int second, int first_tiles, int second_tiles) {
    Config config;
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      const int rows = (first_tiles >> i & 1) != 0    ? first
                       : (second_tiles >> i & 1) != 0 ? second
                                                      : 16;
      config.row_bytes[i] = 64;
      config.rows[i] = static_cast<uint8_t>(rows);
    }
    _tile_storeconfig(&before_);
    amx_written();
    _tile_loadconfig(&config);
  }

  Config before_;
};

VTENSOR_INLINE void amx_store(float* c, int64_t columns) {
  const int64_t bytes = columns * 4;
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + 16, bytes);
  _tile_stored(2, c + 16 * columns, bytes);
  _tile_stored(3, c + 16 * columns + 16, bytes);
}

VTENSOR_INLINE void amx_zero() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

}  // namespace
}  // namespace vtensor::kernels
