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

// All eight tiles, for as long as it lives: at their full size, or A and C for fewer than 32 rows.
class AmxTiles {
 public:
  explicit AmxTiles(int num_rows = 32) {
    const int first = num_rows < 16 ? num_rows : 16;
    const int second = num_rows > 16 ? num_rows - 16 : 16;  // unused if there are no more
    Config config;
    config.palette = 1;
    for (int i = 0; i < 8; ++i) {
      config.row_bytes[i] = 64;
      config.rows[i] = 16;
    }
    for (const int i : {0, 1, 4}) config.rows[i] = static_cast<uint8_t>(first);
    for (const int i : {2, 3, 5}) config.rows[i] = static_cast<uint8_t>(second);
    _tile_storeconfig(&before_);
    _tile_loadconfig(&config);
  }
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
