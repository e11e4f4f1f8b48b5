// Queries, keys and values as AMX tiles, in bfloat16 parts: one part of bfloat16 numbers, three of
// all others (split.h). Keys of int8 and e4m3 are bfloat16 numbers without their scales, which
// scores are then times of; the rotated queries of int8 keys are two parts, 16 bits.
//
// Attention is computed transposed, scores^T = K Q^T and output^T = V^T weights^T: A are the keys
// as they stand and the transposed values, B the queries and weights, pairs of numbers side by
// side.
//
//   queries  [rows / 16, key_dim / 32, part]   tiles of 16 pairs of dimensions x 16 rows
//   keys     [keys / 16, key_dim / 32, part]   tiles of 16 keys x 32 dimensions
//   values   [value_dim / 16, keys / 32, part]   tiles of 16 dimensions x 32 keys
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "kernels/calls/attention.h"
#include "kernels/simd/amx_tiles.h"
#include "kernels/simd/rotated_heads.h"
#include "kernels/simd/split.h"
#include "kernels/simd/stored_kv.h"

namespace vtensor::kernels {
namespace {

template <class T>
constexpr int kPartsOf = kParts;
template <>
constexpr int kPartsOf<BFloat16> = 1;

template <class T, class S>
constexpr bool kHasPlainKeys = kHasScale<S> && kPartsOf<T> == 1;
template <class T, class S>
constexpr int kQueryParts = kHasPlainKeys<T, S> && kIsRotated<S> ? 2 : kPartsOf<T>;

// Depths of 32 keys in a tile of keys: the layout of values and weights.
constexpr int kKeySteps = kTileTokens / kAmxDepth;

// 32 numbers in bfloat16 parts, in their order.
template <int kCount>
struct Parts {
  Vec part[kCount];
};
template <class T>
using Numbers = Parts<kPartsOf<T>>;

template <int kCount>
VTENSOR_INLINE Parts<kCount> parts_of(Vec low, Vec high) {
  const auto both = [](Vec first, Vec second) {
    return reinterpret_cast<Vec>(
        _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(second), reinterpret_cast<__m512>(first)));
  };
  if constexpr (kCount == 1) return {both(low, high)};
  Parts<kCount> numbers;
  const SplitVec low_parts = split(low), high_parts = split(high);
#pragma GCC unroll 3
  for (int i = 0; i < kCount; ++i) {
    numbers.part[i] = both(from_bits(low_parts.part[i]), from_bits(high_parts.part[i]));
  }
  return numbers;
}

// Of a row that is stored as S.
template <class T, class S>
VTENSOR_INLINE Numbers<T> load_numbers(const S* p, float scale) {
  if constexpr (std::is_same_v<S, BFloat16>) {
    Numbers<T> numbers;
    __builtin_memcpy(&numbers, p, sizeof numbers);
    return numbers;
  } else if constexpr (kHasScale<S>) {
    return parts_of<kPartsOf<T>>(load(p) * scale, load(p + kLanes) * scale);
  } else {
    return parts_of<kPartsOf<T>>(load(p), load(p + kLanes));
  }
}

// 16 numbers each of `even` and `odd`, side by side; bfloat16 ones rounded to nearest.
template <class T>
VTENSOR_INLINE Numbers<T> interleave(Vec even, Vec odd) {
  Numbers<T> numbers;
  if constexpr (kPartsOf<T> == 1) {
    const UVec low = (bits_of(even) + 0x8000) >> 16, high = (bits_of(odd) + 0x8000) & 0xffff0000;
    numbers.part[0] = from_bits(low | high);
  } else {
    const SplitVec low = split(even), high = split(odd);
#pragma GCC unroll 3
    for (int i = 0; i < kParts; ++i) {
      numbers.part[i] = from_bits(low.part[i] >> 16 | high.part[i]);
    }
  }
  return numbers;
}

// Of rows that are stored as S; numbers of T itself need no rounding.
template <class T, class S>
VTENSOR_INLINE Numbers<T> interleave_stored(Vec even, Vec odd, float even_scale, float odd_scale) {
  if constexpr (kHasScale<S>) return interleave<T>(even * even_scale, odd * odd_scale);
  if constexpr (kPartsOf<T> == 1) return {from_bits(bits_of(even) >> 16 | bits_of(odd))};
  return interleave<T>(even, odd);
}

// A tile as a square of pairs, row j of it at p + j * 16, in place.
inline void transpose_tile(float* p) {
  Vec square[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) square[j] = load(p + j * 16);
  transpose(square);
#pragma GCC unroll 16
  for (int j = 0; j < 16; ++j) store(p + j * 16, square[j]);
}

// Calls use(j, i, parts) for numbers [i, i + 32) of row j, of all rows.
template <class T, class S, class Use>
VTENSOR_INLINE void with_query_parts(const T* const* rows, int num_rows, int head_dim,
                                     const Use& use) {
  float rotated[kMaxHeadDim];
  for (int j = 0; j < num_rows; ++j) {
    if constexpr (kHasPlainKeys<T, S>) {
      const auto* row = query_numbers<S>(rows[j], head_dim, rotated);
      for (int i = 0; i < head_dim; i += kAmxDepth) {
        use(j, i, parts_of<kQueryParts<T, S>>(load(row + i), load(row + i + kLanes)));
      }
    } else {
      for (int i = 0; i < head_dim; i += kAmxDepth) use(j, i, load_numbers<T>(rows[j] + i, 1));
    }
  }
}

// Up to 16 queries that meet keys of type S, the others 0.
template <class T, class S>
inline void amx_pack_queries(const T* const* rows, int num_rows, int head_dim, float* tiles) {
  constexpr int kCount = kQueryParts<T, S>;
  const auto tile = [&](int i, int p) {
    return tiles + (i / kAmxDepth * kCount + p) * kTileFloats;
  };
  with_query_parts<T, S>(rows, num_rows, head_dim, [&](int j, int i, const Parts<kCount>& numbers) {
#pragma GCC unroll 3
    for (int p = 0; p < kCount; ++p) store(tile(i, p) + j * kLanes, numbers.part[p]);
  });
  for (int i = 0; i < head_dim; i += kAmxDepth) {
#pragma GCC unroll 3
    for (int p = 0; p < kCount; ++p) {
      for (int j = num_rows; j < kTileRows; ++j) store(tile(i, p) + j * kLanes, Vec{});
      transpose_tile(tile(i, p));
    }
  }
}

// Rows of a tile beyond num_keys stay what they are: their scores are hidden.
template <class T, class S>
inline void amx_pack_keys(const S* k, int64_t token_stride, int num_keys, int head_dim,
                          float* tiles) {
  const int64_t block = head_dim / kAmxDepth * kPartsOf<T> * kTileFloats;
  for (int key = 0; key < num_keys; ++key) {
    float* to = tiles + key / kTileRows * block + key % kTileRows * kLanes;
    const S* stored = k + key * token_stride;
    const auto pack = [&](const auto* row, float scale) {
      for (int i = 0; i < head_dim; i += kAmxDepth) {
        const Numbers<T> numbers = load_numbers<T>(row + i, scale);
#pragma GCC unroll 3
        for (int p = 0; p < kPartsOf<T>; ++p, to += kTileFloats) store(to, numbers.part[p]);
      }
    };
    if constexpr (kHasPlainKeys<T, S>) {
      pack(stored, 1);
    } else {
      with_key(stored, head_dim, pack);
    }
  }
}

// Keys beyond num_keys, up to the next multiple of 32, are 0.
template <class T, class S>
inline void amx_pack_values(const S* v, int64_t token_stride, int num_keys, int head_dim,
                            float* tiles) {
  constexpr int64_t kStep = kPartsOf<T> * kTileFloats;
  for (int first = 0; first < num_keys; first += kAmxDepth) {
    float* step = tiles + first / kAmxDepth * kStep;
    for (int j = 0; j < kTileRows; ++j) {
      const int key = first + 2 * j;
      const S* even = key < num_keys ? v + key * token_stride : nullptr;
      const S* odd = key + 1 < num_keys ? v + (key + 1) * token_stride : nullptr;
      const float even_scale = even == nullptr ? 0 : scale_of(even, head_dim);
      const float odd_scale = odd == nullptr ? 0 : scale_of(odd, head_dim);
      for (int i = 0; i < head_dim; i += kTileRows) {
        const Vec x = even == nullptr ? Vec{} : load(even + i);
        const Vec y = odd == nullptr ? Vec{} : load(odd + i);
        const Numbers<T> numbers = interleave_stored<T, S>(x, y, even_scale, odd_scale);
        float* to = step + i / kTileRows * kKeySteps * kStep + j * kLanes;
#pragma GCC unroll 3
        for (int p = 0; p < kPartsOf<T>; ++p) store(to + p * kTileFloats, numbers.part[p]);
      }
    }
    for (int i = 0; i < head_dim; i += kTileRows) {
      float* to = step + i / kTileRows * kKeySteps * kStep;
#pragma GCC unroll 3
      for (int p = 0; p < kPartsOf<T>; ++p) transpose_tile(to + p * kTileFloats);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
