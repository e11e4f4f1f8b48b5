// Tiles of tasks with few query rows over KV of int8, by products of bytes (VNNI): nothing is
// widened.
//
// Queries and weights become integers of 16 bits, a unit a row, in two bytes each:
//
//   q = unit (256 high + low)      signed, times keys plus 128, which are unsigned
//   w = unit (256 high + low)      unsigned, of 15 bits, times values, which are signed
//
// Sums of integers are exact, so what is lost is the rounding to 16 bits, less than that of
// bfloat16 to 8. Keys are multiplied as they stand, each by all rows at once; of values, four keys
// of a column are brought together in 32 bits.
#pragma once

#include "kernels/simd/few_rows.h"
#include "kernels/simd/integer_queries.h"

namespace vtensor::kernels {
namespace {

#if defined(__AVX512VNNI__) && VTENSOR_LANES == 16
#define VTENSOR_HAS_BYTES 1

// Numbers of a vector of bytes.
constexpr int kBytes = 4 * kLanes;
// Sums of wider keys, 255 * 32,512 each, would not fit 32 bits.
constexpr int kMaxByteDim = 256;
constexpr float kQueryUnits = 127 * 256;

inline bool takes_bytes(const LayerCall& call) {
  return call.key_dim % kBytes == 0 && call.value_dim % kBytes == 0 && call.key_dim <= kMaxByteDim;
}

VTENSOR_INLINE __m512i load_bytes(const void* p) { return _mm512_loadu_si512(p); }

VTENSOR_INLINE __m512i broadcast_word(const void* p) {
  int word;
  __builtin_memcpy(&word, p, sizeof word);
  return _mm512_set1_epi32(word);
}

// With a mask of all lanes, as in vec.h.
template <int kChoice>
VTENSOR_INLINE __m512i blocks_of(__m512i a, __m512i b) {
  return _mm512_maskz_shuffle_i32x4(0xffff, a, b, kChoice);
}

// Query rows that are multiplied together, R of them, where their float32 numbers stand otherwise.
// A key's bytes are loaded once for all of them, R times side by side:
//
//   | high: 64 / R of row 0 | ... | of row R - 1 | low: the same |   for each 64 / R numbers of a
//   key
template <int R>
struct ByteQueries {
  static constexpr int kPart = kBytes / R;
  uint8_t* bytes;
  float* units;      // [R]
  int32_t* offsets;  // [R], the part of a sum that comes of adding 128 to keys

  VTENSOR_INLINE ByteQueries(const Scratch& s, int row, int key_dim)
      : bytes(reinterpret_cast<uint8_t*>(s.query + row * key_dim)),
        units(reinterpret_cast<float*>(bytes + 2 * R * key_dim)),
        offsets(reinterpret_cast<int32_t*>(units + R)) {}

  // Number i of row r, 16 bytes; its low one is kBytes further on.
  VTENSOR_INLINE uint8_t* high(int r, int i) const {
    return bytes + i / kPart * 2 * kBytes + r * kPart + i % kPart;
  }
};

VTENSOR_INLINE void store_bytes(uint8_t* p, IVec integers) {
  const __m128i bytes = _mm512_maskz_cvtepi32_epi8(0xffff, reinterpret_cast<__m512i>(integers));
  __builtin_memcpy(p, &bytes, sizeof bytes);
}

template <class T, int R>
inline void load_byte_query(const T* query, int key_dim, float factor, const ByteQueries<R>& out,
                            int r) {
  IVec sum = {};
  const auto use = [&](int i, IVec integers) {
    const IVec high = (integers + 128) >> 8;
    store_bytes(out.high(r, i), high);
    store_bytes(out.high(r, i) + kBytes, integers - high * 256);
    sum += integers;
  };
  out.units[r] = with_integers(query, key_dim, factor, kQueryUnits, use);
  int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sum[i];
  out.offsets[r] = 128 * total;
}

template <class T>
inline void load_byte_queries(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  const T* query = static_cast<const T*>(call.query);
  const float factor = query_factor(call);
  in_row_groups(task.num_tokens * task.num_heads, [&]<int R>(int first) {
    const ByteQueries<R> out(s, first, call.key_dim);
    for (int r = 0; r < R; ++r) {
      const int token = task.tokens[(first + r) / task.num_heads];
      const int head = task.first_head + (first + r) % task.num_heads;
      const T* row = query + head * call.query_head_stride + token * call.query_token_stride;
      load_byte_query(row, call.key_dim, factor, out, r);
    }
  });
}

// The next 64 / R numbers of a key, R times, plus 128. With masks of all lanes, as in vec.h.
template <int R>
VTENSOR_INLINE __m512i load_key(const Int8* p) {
  __m512i x;
  if constexpr (R == 1) {
    x = load_bytes(p);
  } else if constexpr (R == 2) {
    x = _mm512_maskz_broadcast_i64x4(0xff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  } else {
    x = _mm512_maskz_broadcast_i32x4(0xffff, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
  return _mm512_xor_si512(x, _mm512_set1_epi8(static_cast<char>(0x80)));
}

// Blocks of four lanes of four vectors, transposed in place.
VTENSOR_INLINE void transpose_blocks(__m512i (&v)[4]) {
  const __m512i a = blocks_of<0x44>(v[0], v[1]);
  const __m512i b = blocks_of<0xee>(v[0], v[1]);
  const __m512i c = blocks_of<0x44>(v[2], v[3]);
  const __m512i d = blocks_of<0xee>(v[2], v[3]);
  v[0] = blocks_of<0x88>(a, c);
  v[1] = blocks_of<0xdd>(a, c);
  v[2] = blocks_of<0x88>(b, d);
  v[3] = blocks_of<0xdd>(b, d);
}

VTENSOR_INLINE __m512i joined(__m512i high, __m512i low) {
  return reinterpret_cast<__m512i>(reinterpret_cast<IVec>(high) * 256 +
                                   reinterpret_cast<IVec>(low));
}

// The sums of the blocks of four vectors: lane n of a block is that of v[n]. With masks of all
// lanes, as in vec.h.
VTENSOR_INLINE __m512i sums_of_blocks(const __m512i (&v)[4]) {
  const auto add_halves = [](__m512i a, __m512i b) {
    return _mm512_add_epi32(_mm512_maskz_unpacklo_epi32(0xffff, a, b),
                            _mm512_maskz_unpackhi_epi32(0xffff, a, b));
  };
  const __m512i a = add_halves(v[0], v[1]), b = add_halves(v[2], v[3]);
  return _mm512_add_epi32(_mm512_maskz_unpacklo_epi64(0xff, a, b),
                          _mm512_maskz_unpackhi_epi64(0xff, a, b));
}

// The sums of R rows times four keys: lane n of the 4 / R blocks of a row is a part of key n's.
template <int R>
VTENSOR_INLINE __m512i dot_four_keys(const uint8_t* query, const Int8* const (&keys)[4],
                                     int key_dim) {
  constexpr int kPart = kBytes / R;
  __m512i high[4] = {}, low[4] = {};
  for (int column = 0; column < key_dim; column += kPart, query += 2 * kBytes) {
    const __m512i high_part = load_bytes(query), low_part = load_bytes(query + kBytes);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const __m512i x = load_key<R>(keys[n] + column);
      high[n] = _mm512_dpbusd_epi32(high[n], x, high_part);
      low[n] = _mm512_dpbusd_epi32(low[n], x, low_part);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < 4; ++n) high[n] = joined(high[n], low[n]);
  return sums_of_blocks(high);
}

// score[r][j] for R rows and all keys, times scales[j]; keys beyond the last are the last one
// again.
template <int R>
inline void dot_bytes(const AttendTask& task, const Scratch& s, int row, int key_dim, int64_t tile,
                      int num_keys, const TileScales<Int8>& scales, LinesAhead& next) {
  const ByteQueries<R> query(s, row, key_dim);
  const Int8* key = static_cast<const Int8*>(task.k) + tile * task.k_stride;
  float* score = s.score + row * kTileTokens;
  for (int j = 0; j < num_keys; j += kLanes) {
    __m512i sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const Int8* keys[4];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) {
        keys[n] = key;
        if (j + 4 * i + n + 1 < num_keys) key += task.k_stride;
      }
      next.advance(4);
      sums[i] = dot_four_keys<R>(query.bytes, keys, key_dim);
    }
    transpose_blocks(sums);
    const Vec scale = load(scales.of + j);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      IVec sum = reinterpret_cast<IVec>(sums[r * 4 / R]) - query.offsets[r];
#pragma GCC unroll 4
      for (int i = 1; i < 4 / R; ++i) sum += reinterpret_cast<IVec>(sums[r * 4 / R + i]);
      store(score + r * kTileTokens + j,
            __builtin_convertvector(sum, Vec) * (scale * query.units[r]));
    }
  }
}

// By what weights become integers below 2^15, and what one is then worth, from the bits of the
// largest: powers of two, so that nothing is divided. Bits of what is not finite are above all
// others; its unit is not finite either.
struct WeightUnit {
  float factor;
  float unit;

  VTENSOR_INLINE explicit WeightUnit(uint32_t most) {
    constexpr uint32_t kBias = 127, kSmallest = kBias - 100, kOdd = 255;
    const uint32_t exponent = most >> 23;
    const bool counts = exponent >= kSmallest && exponent < kOdd;
    const uint32_t factor_bits = counts ? (2 * kBias + 14 - exponent) << 23 : 0;
    const uint32_t unit_bits = counts ? (exponent - 14) << 23 : exponent == kOdd ? most : 0;
    __builtin_memcpy(&factor, &factor_bits, sizeof factor);
    __builtin_memcpy(&unit, &unit_bits, sizeof unit);
  }
};

VTENSOR_INLINE UVec max_bits(UVec a, UVec b) {
  return reinterpret_cast<UVec>(
      _mm512_maskz_max_epu32(0xffff, reinterpret_cast<__m512i>(a), reinterpret_cast<__m512i>(b)));
}

template <int H = kLanes / 2>
VTENSOR_INLINE uint32_t max_lane_bits(UVec v) {
  const UVec other = bits_of(shuffle<SwapIndex<H>>(from_bits(v), from_bits(v), Lanes{}));
  const UVec most = max_bits(v, other);
  if constexpr (H == 1) {
    return most[0];
  } else {
    return max_lane_bits<H / 2>(most);
  }
}

// The weights of a row for one tile, in bytes.
struct ByteWeightRow {
  alignas(64) uint8_t high[kFewRowsTile<Int8>];
  alignas(64) uint8_t low[kFewRowsTile<Int8>];
  float unit;

  // From weights and the scales of the values, none of them negative.
  VTENSOR_INLINE void load_from(const float* weights, const float* scales, int width) {
    Vec products[kFewRowsTile<Int8> / kLanes];
    UVec most = {};
    for (int j = 0; j < width; j += kLanes) {
      const Vec w = load(weights + j) * load(scales + j);
      products[j / kLanes] = w;
      most = max_bits(bits_of(w), most);
    }
    const WeightUnit of(max_lane_bits(most));
    unit = of.unit;
    const Vec magic = splat(0x1.8p23F);  // adding it rounds to an integer, in the low bits
    for (int j = 0; j < width; j += kLanes) {
      const Vec w = of.factor == 0 ? Vec{} : products[j / kLanes] * of.factor;
      const IVec integers = reinterpret_cast<IVec>(bits_of(w + magic));
      store_bytes(low + j, integers);
      store_bytes(high + j, integers >> 8);
    }
  }
};

// N words of four keys each, of the columns [i, i + 64) of four values: word c of block b of
// words[a] is column 16 b + 4 (first + a) + c.
template <int N>
VTENSOR_INLINE void load_value_words(const Int8* v, int64_t stride, int num_keys, int j, int first,
                                     __m512i (&words)[N]) {
  const auto at = [&](int n) {
    const int64_t key = j + n < num_keys ? j + n : num_keys - 1;
    __m512i bytes = load_bytes(v + key * stride);
    __asm__("" : "+v"(bytes));  // loaded once: gcc would load it for each of its uses
    return bytes;
  };
  const __m512i a = at(0), b = at(1), c = at(2), d = at(3);
#pragma GCC unroll 2
  for (int n = 0; n < N; n += 2) {
    const bool is_low = first + n == 0;
    const __m512i ab = is_low ? _mm512_unpacklo_epi8(a, b) : _mm512_unpackhi_epi8(a, b);
    const __m512i cd = is_low ? _mm512_unpacklo_epi8(c, d) : _mm512_unpackhi_epi8(c, d);
    words[n] = _mm512_unpacklo_epi16(ab, cd);
    words[n + 1] = _mm512_unpackhi_epi16(ab, cd);
  }
}

// sums[r][first, first + N) = the sums over keys of weight[r][j] * words[n], for R rows.
template <int R, int N>
VTENSOR_INLINE void add_value_words(const Int8* v, int64_t stride, const ByteWeightRow* weights,
                                    int num_keys, int first, __m512i (&sums)[R][4],
                                    LinesAhead& next) {
  __m512i high[R][N] = {}, low[R][N] = {};
  for (int j = 0; j < num_keys; j += 4) {
    __m512i words[N];
    load_value_words(v, stride, num_keys, j, first, words);
    next.advance(N * kBytes);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m512i h = broadcast_word(weights[r].high + j), l = broadcast_word(weights[r].low + j);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) {
        high[r][n] = _mm512_dpbusd_epi32(high[r][n], h, words[n]);
        low[r][n] = _mm512_dpbusd_epi32(low[r][n], l, words[n]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) sums[r][first + n] = joined(high[r][n], low[r][n]);
  }
}

// output[r][i .. i + 64) += sum over keys of weight[r][j] * value[j], for R rows: as many words at
// once as registers hold sums.
template <int R>
VTENSOR_INLINE void add_byte_columns(const Int8* v, int64_t stride, const ByteWeightRow* weights,
                                     float* output, int value_dim, int num_keys, LinesAhead& next) {
  constexpr int kWords = R == 4 ? 2 : 4;
  __m512i sums[R][4];
#pragma GCC unroll 2
  for (int first = 0; first < 4; first += kWords) {
    add_value_words<R, kWords>(v, stride, weights, num_keys, first, sums, next);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    transpose_blocks(sums[r]);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      float* p = output + r * value_dim + n * kLanes;
      const Vec sum = __builtin_convertvector(reinterpret_cast<IVec>(sums[r][n]), Vec);
      store(p, load(p) + sum * weights[r].unit);
    }
  }
}

inline void few_byte_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s,
                               int64_t tile, int num_keys, NextTile& next) {
  LinesAhead nothing;
  const int rows = task.num_tokens * task.num_heads, value_dim = call.value_dim;
  const TileScales<Int8> key_scales(task.k, task.k_stride, call.key_dim, tile, num_keys);
  const TileScales<Int8> value_scales(task.v, task.v_stride, value_dim, tile, num_keys);
  in_row_groups(rows, [&]<int R>(int row) {
    dot_bytes<R>(task, s, row, call.key_dim, tile, num_keys, key_scales,
                 row == 0 ? next.keys : nothing);
  });
  const int width = (num_keys + kLanes - 1) / kLanes * kLanes;
  softmax_tile<float>(call, task, s, tile, num_keys, width, 1);
  ByteWeightRow weights[kMaxFewRows];
  for (int row = 0; row < rows; ++row) {
    weights[row].load_from(s.score + row * kTileTokens, value_scales.of, width);
  }
  const Int8* v = static_cast<const Int8*>(task.v) + tile * task.v_stride;
  in_row_groups(rows, [&]<int R>(int row) {
    for (int i = 0; i < value_dim; i += kBytes) {
      add_byte_columns<R>(v + i, task.v_stride, weights + row, s.output + row * value_dim + i,
                          value_dim, num_keys, row == 0 ? next.values : nothing);
    }
  });
}

#endif

}  // namespace
}  // namespace vtensor::kernels
