// Tiles of tasks with few query rows over KV of int8, by products of bytes (VNNI): nothing is
// widened.
//
// Queries and weights become integers of 16 bits, a unit a row, in two bytes each:
//
//   q = unit (256 high + low)      signed, times keys plus 128, which are unsigned
//   w = unit (256 high + low)      unsigned, times values, which are signed
//
// Sums of integers are exact, so what is lost is the rounding to 16 bits, less than that of
// bfloat16 to 8. Four numbers of a key or four keys of a column stand in 32 bits.
#pragma once

#include "kernels/simd/few_rows.h"

namespace vtensor::kernels {
namespace {

#if defined(__AVX512VNNI__) && VTENSOR_LANES == 16
#define VTENSOR_HAS_BYTES 1

// Numbers of a vector of bytes.
constexpr int kBytes = 4 * kLanes;
// Sums of wider keys, 255 * 32,512 each, would not fit 32 bits.
constexpr int kMaxByteDim = 256;
constexpr float kQueryUnits = 127 * 256;
constexpr float kWeightUnits = 255 * 256;

inline bool takes_bytes(const LayerCall& call) {
  return call.key_dim % kBytes == 0 && call.value_dim % kBytes == 0 && call.key_dim <= kMaxByteDim;
}

VTENSOR_INLINE __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }

VTENSOR_INLINE __m512i broadcast_word(const void* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// By what numbers up to `largest` become integers, and what one is then worth; `odd` is not 0 if
// one of them is not finite, and then the unit is none either.
struct Units {
  float factor;
  float unit;

  VTENSOR_INLINE Units(float largest, float odd, float count) {
    const bool counts = odd == 0 && largest >= kSmallestMaximum;
    factor = counts ? count / largest : 0;
    unit = counts ? largest / count : odd;
  }
};

// A query row where float32 numbers stand otherwise: high bytes, low bytes, and how to read sums.
struct ByteQuery {
  uint8_t* high;
  uint8_t* low;
  float* unit;
  int32_t* offset;  // the part of a sum that comes of adding 128 to keys

  VTENSOR_INLINE ByteQuery(const Scratch& s, int row, int key_dim) {
    high = reinterpret_cast<uint8_t*>(s.query + row * key_dim);
    low = high + key_dim;
    unit = reinterpret_cast<float*>(low + key_dim);
    offset = reinterpret_cast<int32_t*>(unit + 1);
  }
};

VTENSOR_INLINE void store_bytes(uint8_t* p, IVec integers) {
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(integers));
  __builtin_memcpy(p, &bytes, sizeof bytes);
}

template <class T>
inline void load_byte_query(const T* row, int key_dim, float factor, const ByteQuery& out) {
  Vec largest = {}, strange = {};
  for (int i = 0; i < key_dim; i += kLanes) {
    const Vec x = load(row + i) * factor;
    largest = max(from_bits(bits_of(x) & 0x7fffffff), largest);
    strange += x * 0.0F;
  }
  const Units units(max_lane(largest), sum_lanes(strange), kQueryUnits);
  IVec sum = {};
  for (int i = 0; i < key_dim; i += kLanes) {
    const Vec x = load(row + i) * factor;
    const IVec integers = nearest_integers(units.factor == 0 ? Vec{} : x * units.factor);
    const IVec high = (integers + 128) >> 8;
    store_bytes(out.high + i, high);
    store_bytes(out.low + i, integers - high * 256);
    sum += integers;
  }
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sum[i];
  *out.unit = units.unit;
  *out.offset = 128 * total;
}

template <class T>
inline void load_byte_queries(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  const T* query = static_cast<const T*>(call.query);
  const float factor = query_factor(call);
  for (int i = 0; i < task.num_tokens; ++i) {
    for (int h = 0; h < task.num_heads; ++h) {
      const T* row = query + (task.first_head + h) * call.query_head_stride +
                     task.tokens[i] * call.query_token_stride;
      load_byte_query(row, call.key_dim, factor,
                      ByteQuery(s, i * task.num_heads + h, call.key_dim));
    }
  }
}

// Numbers [column, column + 64) of kLanes keys, plus 128, as words of four: v[i] has word i of each
// key.
VTENSOR_INLINE void load_key_words(const Int8* const (&keys)[kLanes], int column,
                                   Vec (&v)[kLanes]) {
#pragma GCC unroll 16
  for (int n = 0; n < kLanes; ++n) {
    v[n] = reinterpret_cast<Vec>(
        _mm512_xor_si512(load_bytes(keys[n] + column), _mm512_set1_epi8(static_cast<char>(0x80))));
  }
  transpose(v);
}

// score[r][j .. j + kLanes) for R rows.
template <int R>
VTENSOR_INLINE void dot_bytes(const Int8* const (&keys)[kLanes], const Scratch& s, int row,
                              int key_dim, int j) {
  IVec sums[R][2] = {};
  for (int column = 0; column < key_dim; column += kBytes) {
    Vec words[kLanes];
    load_key_words(keys, column, words);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        const ByteQuery query(s, row + r, key_dim);
        const uint8_t* parts[] = {query.high, query.low};
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part) {
          sums[r][part] = reinterpret_cast<IVec>(_mm512_dpbusd_epi32(
              reinterpret_cast<__m512i>(sums[r][part]), reinterpret_cast<__m512i>(words[i]),
              broadcast_word(parts[part] + column + 4 * i)));
        }
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const ByteQuery query(s, row + r, key_dim);
    const IVec sum = sums[r][0] * 256 + sums[r][1] - *query.offset;
    store(s.score + (row + r) * kTileTokens + j, __builtin_convertvector(sum, Vec) * *query.unit);
  }
}

inline void dot_byte_rows(const AttendTask& task, const Scratch& s, int key_dim, int64_t tile,
                          int num_keys) {
  const Int8* k = static_cast<const Int8*>(task.k) + tile * task.k_stride;
  const int64_t to_next = rows_to_next(task, tile, 0, task.k_stride);
  for (int j = 0; j < num_keys; j += kLanes) {
    const Int8* keys[kLanes];
    for (int n = 0; n < kLanes; ++n) {
      const int64_t token = j + n < num_keys ? j + n : num_keys - 1;
      keys[n] = k + token * task.k_stride;
      if (to_next != 0) prefetch_row(keys[n] + to_next, key_dim);
    }
    in_row_groups(task.num_tokens * task.num_heads,
                  [&]<int R>(int row) { dot_bytes<R>(keys, s, row, key_dim, j); });
  }
}

// The weights of a row for one tile, in bytes.
struct ByteWeightRow {
  alignas(64) uint8_t high[kFewRowsTile];
  alignas(64) uint8_t low[kFewRowsTile];
  float unit;

  inline void load_from(const float* weights, int width) {
    Vec largest = {}, strange = {};
    for (int j = 0; j < width; j += kLanes) {
      const Vec w = load(weights + j);
      largest = max(w, largest);
      strange += w * 0.0F;
    }
    const Units units(max_lane(largest), sum_lanes(strange), kWeightUnits);
    unit = units.unit;
    for (int j = 0; j < width; j += kLanes) {
      const Vec w = units.factor == 0 ? Vec{} : load(weights + j) * units.factor;
      const IVec integers = nearest_integers(w);
      store_bytes(high + j, integers >> 8);
      store_bytes(low + j, integers & 255);
    }
  }
};

// Columns [i, i + 64) of four values as words of four keys: word c of block b of words[a] is column
// 16 b + 4 a + c.
VTENSOR_INLINE void load_value_words(const Int8* v, int64_t stride, int num_keys, int j,
                                     __m512i (&words)[4]) {
  const auto at = [&](int n) {
    const int64_t key = j + n < num_keys ? j + n : num_keys - 1;
    return load_bytes(v + key * stride);
  };
  const __m512i a = at(0), b = at(1), c = at(2), d = at(3);
  const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
  const __m512i ab_high = _mm512_unpackhi_epi8(a, b), cd_high = _mm512_unpackhi_epi8(c, d);
  words[0] = _mm512_unpacklo_epi16(ab, cd);
  words[1] = _mm512_unpackhi_epi16(ab, cd);
  words[2] = _mm512_unpacklo_epi16(ab_high, cd_high);
  words[3] = _mm512_unpackhi_epi16(ab_high, cd_high);
}

// With a mask of all lanes, as in vec.h.
template <int kChoice>
VTENSOR_INLINE __m512i blocks_of(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(0xffff, a, b, kChoice);
}

// Blocks of four lanes of four vectors, transposed in place: columns in their order.
VTENSOR_INLINE void order_columns(__m512i (&v)[4]) {
  const __m512i a = blocks_of<0x44>(v[0], v[1]);
  const __m512i b = blocks_of<0xee>(v[0], v[1]);
  const __m512i c = blocks_of<0x44>(v[2], v[3]);
  const __m512i d = blocks_of<0xee>(v[2], v[3]);
  v[0] = blocks_of<0x88>(a, c);
  v[1] = blocks_of<0xdd>(a, c);
  v[2] = blocks_of<0x88>(b, d);
  v[3] = blocks_of<0xdd>(b, d);
}

// output[r][i .. i + 64) += sum over keys of weight[r][j] * value[j], for R rows.
template <int R>
VTENSOR_INLINE void add_byte_columns(const Int8* v, int64_t stride, const ByteWeightRow* weights,
                                     float* output, int value_dim, int num_keys, int64_t to_next) {
  __m512i high[R][4] = {}, low[R][4] = {};
  for (int j = 0; j < num_keys; j += 4) {
    __m512i words[4];
    load_value_words(v, stride, num_keys, j, words);
    for (int n = 0; n < 4 && to_next != 0; ++n)
      prefetch_row(v + (j + n) * stride + to_next, kBytes);
#pragma GCC unroll 2
    for (int r = 0; r < R; ++r) {
      const __m512i h = broadcast_word(weights[r].high + j), l = broadcast_word(weights[r].low + j);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        high[r][n] = _mm512_dpbusd_epi32(high[r][n], h, words[n]);
        low[r][n] = _mm512_dpbusd_epi32(low[r][n], l, words[n]);
      }
    }
  }
#pragma GCC unroll 2
  for (int r = 0; r < R; ++r) {
    __m512i sums[4];
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      sums[n] = reinterpret_cast<__m512i>(reinterpret_cast<IVec>(high[r][n]) * 256 +
                                          reinterpret_cast<IVec>(low[r][n]));
    }
    order_columns(sums);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      float* p = output + r * value_dim + n * kLanes;
      const Vec sum = __builtin_convertvector(reinterpret_cast<IVec>(sums[n]), Vec);
      store(p, load(p) + sum * weights[r].unit);
    }
  }
}

inline void few_byte_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s,
                               int64_t tile, int num_keys) {
  const int rows = task.num_tokens * task.num_heads, value_dim = call.value_dim;
  dot_byte_rows(task, s, call.key_dim, tile, num_keys);
  const int width = (num_keys + kLanes - 1) / kLanes * kLanes;
  scale_rows<Int8>(task.k, task.k_stride, call.key_dim, tile, num_keys, s.score, rows);
  softmax_tile<float>(call, task, s, tile, num_keys, width, 1);
  scale_rows<Int8>(task.v, task.v_stride, value_dim, tile, num_keys, s.score, rows);
  const Int8* v = static_cast<const Int8*>(task.v) + tile * task.v_stride;
  for (int row = 0; row < rows; row += 2) {
    ByteWeightRow weights[2];
    const int count = rows - row < 2 ? 1 : 2;
    for (int r = 0; r < count; ++r) {
      weights[r].load_from(s.score + (row + r) * kTileTokens, width);
    }
    const int64_t to_next = rows_to_next(task, tile, row, task.v_stride);
    for (int i = 0; i < value_dim; i += kBytes) {
      float* output = s.output + row * value_dim + i;
      if (count == 2) {
        add_byte_columns<2>(v + i, task.v_stride, weights, output, value_dim, num_keys, to_next);
      } else {
        add_byte_columns<1>(v + i, task.v_stride, weights, output, value_dim, num_keys, to_next);
      }
    }
  }
}

#endif

}  // namespace
}  // namespace vtensor::kernels
