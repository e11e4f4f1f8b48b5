// Tiles of bfloat16 tasks by products of pairs (simd/pairs.h): nothing is widened.
//
// Scores sum the products of queries and keys as they are, and are scaled afterwards; weights are
// rounded to bfloat16 before they meet the values, as FlashAttention does. Sums are float32. Keys
// of int8 are pairs of integers of 16 bits, and so are the queries that meet them: sums are exact.
#pragma once

#include "kernels/simd/few_rows.h"
#include "kernels/simd/integer_queries.h"
#include "kernels/simd/lane_products.h"
#include "kernels/simd/pairs.h"

namespace vtensor::kernels {
namespace {

#if defined(VTENSOR_HAS_PAIRS)

inline bool takes_pairs(const LayerCall& call) {
  return call.key_dim % kPairLanes == 0 && call.value_dim % kPairLanes == 0;
}

// [rows, key_dim], where float32 queries stand otherwise.
inline BFloat16* pair_query(const Scratch& s) { return reinterpret_cast<BFloat16*>(s.query); }

// A row's weights, where its scores stood.
inline const BFloat16* pair_weights(const Scratch& s, int row) {
  return reinterpret_cast<const BFloat16*>(s.score + row * kTileTokens);
}

inline void copy_queries(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  const BFloat16* query = static_cast<const BFloat16*>(call.query);
  BFloat16* out = pair_query(s);
  for (int i = 0; i < task.num_tokens; ++i) {
    for (int h = 0; h < task.num_heads; ++h) {
      const BFloat16* row = query + (task.first_head + h) * call.query_head_stride +
                            task.tokens[i] * call.query_token_stride;
      __builtin_memcpy(out, row, static_cast<size_t>(call.key_dim) * sizeof *row);
      out += call.key_dim;
    }
  }
}

// Rows j and j + 1 of the values; nothing where the second is not one of num_keys.
VTENSOR_INLINE void load_two(const BFloat16* v, int64_t stride, int j, int num_keys, UVec& even,
                             UVec& odd) {
  even = load_pairs(v + j * stride);
  odd = j + 1 < num_keys ? load_pairs(v + (j + 1) * stride) : UVec{};
}

// output[r] += sum over keys of weight[r][j] * value[j], for R rows and N vectors of pairs.
template <int R, int N>
VTENSOR_INLINE void add_pair_columns(const BFloat16* v, int64_t stride, const Scratch& s, int row,
                                     int column, int value_dim, int num_keys, LinesAhead& next) {
  Vec sums[R][2 * N] = {};
  for (int j = 0; j < num_keys; j += 2) {
    next.advance(2 * N * kPairLanes);
    UVec pairs[2 * N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      UVec even, odd;
      load_two(v + column + n * kPairLanes, stride, j, num_keys, even, odd);
      pairs[2 * n] = pair_up<false>(even, odd);
      pairs[2 * n + 1] = pair_up<true>(even, odd);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const uint32_t weights = load_pair(pair_weights(s, row + r) + j);
#pragma GCC unroll 4
      for (int n = 0; n < 2 * N; ++n) sums[r][n] = add_products(sums[r][n], weights, pairs[n]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* output = s.output + (row + r) * value_dim + column;
#pragma GCC unroll 4
    for (int n = 0; n < 2 * N; ++n) {
      store(output + n * kLanes, load(output + n * kLanes) + sums[r][n]);
    }
  }
}

inline void few_pair_rows_tile(const LayerCall& call, const AttendTask& task, const Scratch& s,
                               int64_t tile, int num_keys, NextTile& next) {
  LinesAhead nothing;
  const int rows = task.num_tokens * task.num_heads;
  const int key_dim = call.key_dim, value_dim = call.value_dim;
  in_row_groups(rows, [&]<int R>(int row) {
    dot_rows<BFloat16, R>(task, pair_query(s) + row * key_dim, key_dim, s.score + row * kTileTokens,
                          tile, num_keys, row == 0 ? next.keys : nothing);
  });
  const int width = (num_keys + kLanes - 1) / kLanes * kLanes;
  softmax_tile<BFloat16>(call, task, s, tile, num_keys, width, query_factor(call));
  const BFloat16* v = static_cast<const BFloat16*>(task.v) + tile * task.v_stride;
  in_row_groups(rows, [&]<int R>(int row) {
    LinesAhead& values = row == 0 ? next.values : nothing;
    int column = 0;
    for (; column + 2 * kPairLanes <= value_dim; column += 2 * kPairLanes) {
      add_pair_columns<R, 2>(v, task.v_stride, s, row, column, value_dim, num_keys, values);
    }
    if (column < value_dim) {
      add_pair_columns<R, 1>(v, task.v_stride, s, row, column, value_dim, num_keys, values);
    }
  });
}

// 32 numbers of a value, in their order.
template <class S>
VTENSOR_INLINE UVec load_numbers(const S* p, float scale) {
  return round_in_order(load(p) * scale, load(p + kLanes) * scale);
}
VTENSOR_INLINE UVec load_numbers(const BFloat16* p, float /*scale*/) { return load_pairs(p); }

// 32 numbers of a key, exactly. With a mask of all lanes, as in vec.h.
VTENSOR_INLINE UVec load_key_pairs(const BFloat16* p) { return load_pairs(p); }
VTENSOR_INLINE UVec load_key_pairs(const Float8* p) {
  return round_in_order(load(p), load(p + kLanes));
}
VTENSOR_INLINE UVec load_key_pairs(const Int8* p) {
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return reinterpret_cast<UVec>(_mm512_maskz_cvtepi8_epi16(0xffffffff, bytes));
}

// Products of keys whose every byte is 127 fit 32 bits.
constexpr float kPairUnits = INT32_MAX / (127 * kMaxHeadDim);

// Of many_rows.h, for KV stored as S. A word is a pair: values with scales become bfloat16 numbers,
// once for all rows of the task.
template <class S>
struct PairProducts {
  using Number = BFloat16;
  using Stored = S;
  static constexpr int kPairFloats = 1;
  static constexpr int kKeyStep = kKeysPerStep;
  static constexpr int64_t kWeightFloats = kScoreFloats;
  static constexpr bool kOverlaps = false;
  static constexpr bool kScalesScores = kHasScale<S>;
  static constexpr bool kRough = true;

  static Vec pack_queries(const BFloat16* const* rows, int num_rows, int key_dim, int vec,
                          float* queries) {
    if constexpr (kIsRotated<S>) {
      return pack_integers(rows, num_rows, key_dim, queries + vec * kLanes);
    } else {
      const auto load_words = [&](int j, int i) { return from_bits(load_pairs(rows[j] + 2 * i)); };
      pack_lanes(load_words, num_rows, key_dim / 2, queries + vec * kLanes);
      return splat(1);
    }
  }

  // packed: [keys, key_dim]
  static void pack_keys(const S* k, int64_t stride, int num_keys, int key_dim, float* packed) {
    for (int j = 0; j < num_keys; ++j) {
      for (int i = 0; i < key_dim; i += kPairLanes) {
        store(packed + (j * key_dim + i) / 2, from_bits(load_key_pairs(k + j * stride + i)));
      }
    }
  }

  // packed: [pairs of keys, value_dim]; keys up to the next multiple of kKeyStep are 0.
  static void pack_values(const S* v, int64_t stride, int num_keys, int value_dim, float* packed) {
    for (int j = 0; j < num_keys; j += 2, packed += value_dim) {
      const S* even_row = v + j * stride;
      const S* odd_row = j + 1 < num_keys ? even_row + stride : nullptr;
      const float even_scale = scale_of(even_row, value_dim);
      const float odd_scale = odd_row == nullptr ? 0 : scale_of(odd_row, value_dim);
      for (int i = 0; i < value_dim; i += kPairLanes) {
        const UVec even = load_numbers(even_row + i, even_scale);
        const UVec odd = odd_row == nullptr ? UVec{} : load_numbers(odd_row + i, odd_scale);
        store(packed + i, from_bits(pair_up<false>(even, odd)));
        store(packed + i + kLanes, from_bits(pair_up<true>(even, odd)));
      }
    }
    for (int j = (num_keys + 1) / 2 * 2; j % kKeyStep != 0; j += 2, packed += value_dim) {
      for (int i = 0; i < value_dim; i += kLanes) store(packed + i, Vec{});
    }
  }

  template <class Overlap>
  static void multiply_keys(const RowBlock& block, const float* queries, const float* keys,
                            int key_dim, float* scores, Overlap& /*nothing*/) {
    using Word = std::conditional_t<kIsRotated<S>, int32_t, uint32_t>;
    multiply_lanes_keys(block, reinterpret_cast<const Word*>(queries),
                        reinterpret_cast<const Word*>(keys), key_dim / 2, scores);
  }

  VTENSOR_INLINE static void store_weights(Vec even, Vec odd, int key, int vec, float* weights) {
    store(weights + key / 2 * kBlockRows + vec * kLanes, from_bits(round_to_pairs(even, odd)));
  }

  template <class Overlap>
  static void multiply_values(const RowBlock& block, const float* weights, const float* values,
                              int value_dim, float* output, Overlap& /*nothing*/) {
    multiply_lanes_values(block, (block.end - block.begin) / 2,
                          words(weights) + block.begin / 2 * kBlockRows,
                          words(values) + block.begin / 2 * value_dim, value_dim, output);
  }

 private:
  static const uint32_t* words(const float* p) { return reinterpret_cast<const uint32_t*>(p); }

  static Vec pack_integers(const BFloat16* const* rows, int num_rows, int key_dim, float* queries) {
    uint16_t integers[kLanes * kMaxHeadDim];
    Vec units = splat(1);
    for (int j = 0; j < num_rows; ++j) {
      units[j] = with_integers(rows[j], key_dim, 1, kPairUnits, [&](int i, IVec of) {
        const HVec numbers = __builtin_convertvector(of, HVec);
        __builtin_memcpy(integers + j * key_dim + i, &numbers, sizeof numbers);
      });
    }
    const auto load_words = [&](int j, int i) {
      return from_bits(load_pairs(integers + j * key_dim + 2 * i));
    };
    pack_lanes(load_words, num_rows, key_dim / 2, queries);
    return units;
  }
};

#endif

}  // namespace
}  // namespace vtensor::kernels
