// Tiles of tasks with many query rows in bfloat16: the two products of many_rows.h on AMX's tiles.
//
// A tile register holds 16 rows of 64 bytes. One instruction adds to a [16, 16] float32 tile the
// product of 16 rows of 32 bfloat16 and a tile of 32 x 16 that is stored in pairs: row i holds
// (b[2i][0], b[2i + 1][0]), (b[2i][1], b[2i + 1][1]), ... Sums are float32; weights are rounded to
// bfloat16, as torch's kernel does.
//
// The tile configuration belongs to the thread and others (oneDNN) may have set it: AmxTiles puts
// it back. REQUIRES: head_dim a multiple of 32; the process may use AMX (level.cpp asks for it).
#pragma once

#include <immintrin.h>

#include "vtensor/kernels/simd/softmax.h"

namespace vtensor::kernels {
namespace {

constexpr int kAmxDepth = 32;  // bfloat16 numbers that one instruction sums over
constexpr int kTileBytes = 1024;

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

// C tiles 0 1 / 2 3 += A tiles 4 / 5 times B tiles 6 7, over `steps` depths of 32.
// a: rows of a_bytes, two blocks of 16 rows; b: packed tiles, the next depth b_step bytes on.
VTENSOR_INLINE void amx_accumulate(const char* a, int64_t a_bytes, const char* b_left,
                                   const char* b_right, int64_t b_step, int steps) {
  for (int i = 0; i < steps; ++i) {
    const char* rows = a + i * kAmxDepth * 2;
    _tile_loadd(4, rows, a_bytes);
    _tile_loadd(5, rows + 16 * a_bytes, a_bytes);
    _tile_loadd(6, b_left + i * b_step, 64);
    _tile_loadd(7, b_right + i * b_step, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
}

VTENSOR_INLINE void amx_store(float* c, int64_t columns) {
  const int64_t bytes = columns * 4;
  _tile_stored(0, c, bytes);
  _tile_stored(1, c + 16, bytes);
  _tile_stored(2, c + 16 * columns, bytes);
  _tile_stored(3, c + 16 * columns + 16, bytes);
}

VTENSOR_INLINE void amx_load(const float* c, int64_t columns) {
  const int64_t bytes = columns * 4;
  _tile_loadd(0, c, bytes);
  _tile_loadd(1, c + 16, bytes);
  _tile_loadd(2, c + 16 * columns, bytes);
  _tile_loadd(3, c + 16 * columns + 16, bytes);
}

// 16 keys a tile, one tile for each 32 numbers of them: the transposition of 16 x 16 pairs.
inline void amx_pack_keys(const BFloat16* k, int64_t token_stride, int num_keys, int width,
                          int head_dim, float* packed) {
  for (int first = 0; first < width; first += 16) {
    for (int i = 0; i < head_dim; i += kAmxDepth, packed += kTileBytes / 4) {
      Vec square[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) {
        square[j] = Vec{};
        if (first + j < num_keys) {
          __builtin_memcpy(&square[j], k + (first + j) * token_stride + i, sizeof(Vec));
        }
      }
      transpose(square);
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) store(packed + j * 16, square[j]);
    }
  }
}

// 32 keys a row of tiles, one tile for each 16 columns: pairs of keys side by side.
inline void amx_pack_values(const BFloat16* v, int64_t token_stride, int num_keys, int width,
                            int head_dim, float* packed) {
  for (int first = 0; first < width; first += kAmxDepth) {
    for (int i = 0; i < head_dim; i += 16, packed += kTileBytes / 4) {
      for (int j = 0; j < 16; ++j) {
        const int key = first + 2 * j;
        const BFloat16* row = v + key * token_stride + i;
        UVec pair = {};
        if (key < num_keys) pair = load_halves(row);
        if (key + 1 < num_keys) pair |= load_halves(row + token_stride) << 16;
        store(packed + j * 16, from_bits(pair));
      }
    }
  }
}

// The queries as they are; the scores are scaled instead.
inline void amx_load_queries(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  const auto* query = static_cast<const BFloat16*>(call.query);
  char* out = reinterpret_cast<char*>(s.query);
  const size_t row_bytes = static_cast<size_t>(call.head_dim) * sizeof(BFloat16);
  for (int i = 0; i < task.num_tokens; ++i) {
    for (int h = 0; h < task.num_heads; ++h, out += row_bytes) {
      __builtin_memcpy(out,
                       query + (task.first_head + h) * call.query_head_stride +
                           task.tokens[i] * call.query_token_stride,
                       row_bytes);
    }
  }
}

// Rows up to the next multiple of 32 are computed too, from whatever stands there, and never used.
inline void amx_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s,
                          int64_t tile, int num_keys) {
  const int rows = task.num_tokens * task.num_heads, dim = call.head_dim;
  const int width = (num_keys + kAmxDepth - 1) / kAmxDepth * kAmxDepth;
  const int64_t offset = tile * task.token_stride;
  const int dim_steps = dim / kAmxDepth, key_steps = width / kAmxDepth;
  const char* query = reinterpret_cast<const char*>(s.query);
  const char* keys = reinterpret_cast<const char*>(s.keys);
  const char* weights = reinterpret_cast<const char*>(s.score);
  const char* values = reinterpret_cast<const char*>(s.values);

  amx_pack_keys(static_cast<const BFloat16*>(task.k) + offset, task.token_stride, num_keys, width,
                dim, s.keys);
  for (int key = 0; key < width; key += 32) {
    const char* left = keys + key / 16 * dim_steps * kTileBytes;
    for (int row = 0; row < rows; row += 32) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      amx_accumulate(query + row * dim * 2, dim * 2, left, left + dim_steps * kTileBytes,
                     kTileBytes, dim_steps);
      amx_store(s.score + row * kTileTokens + key, kTileTokens);
    }
  }
  softmax_tile<BFloat16>(call, task, s, tile, num_keys, width, query_factor(call));
  amx_pack_values(static_cast<const BFloat16*>(task.v) + offset, task.token_stride, num_keys, width,
                  dim, s.values);
  const int64_t step = dim / 16 * kTileBytes;
  for (int column = 0; column < dim; column += 32) {
    const char* left = values + column / 16 * kTileBytes;
    for (int row = 0; row < rows; row += 32) {
      float* output = s.output + row * dim + column;
      amx_load(output, dim);
      amx_accumulate(weights + row * kTileTokens * 4, kTileTokens * 4, left, left + kTileBytes,
                     step, key_steps);
      amx_store(output, dim);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
