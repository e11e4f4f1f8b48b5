// Queries, keys and values as AMX tiles, in bfloat16 parts: one part of bfloat16 numbers, three of
// all others (split.h).
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

#include "kernels/calls/attention.h"
#include "kernels/simd/amx_tiles.h"
#include "kernels/simd/split.h"

namespace vtensor::kernels {
namespace {

template <class T>
constexpr int kPartsOf = kParts;
template <>
constexpr int kPartsOf<BFloat16> = 1;

// Depths of 32 keys in a tile of keys: the layout of values and weights.
constexpr int kKeySteps = kTileTokens / kAmxDepth;

// 32 numbers in bfloat16 parts, in their order.
template <class T>
struct Numbers {
  Vec part[kPartsOf<T>];
};

template <class T>
VTENSOR_INLINE Numbers<T> load_numbers(const T* p) {
  Numbers<T> numbers;
  const SplitVec low = split(load(p)), high = split(load(p + kLanes));
#pragma GCC unroll 3
  for (int i = 0; i < kParts; ++i) {
    const __m512bh both = _mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(high.part[i]),
                                              reinterpret_cast<__m512>(low.part[i]));
    __builtin_memcpy(&numbers.part[i], &both, sizeof both);
  }
  return numbers;
}

VTENSOR_INLINE Numbers<BFloat16> load_numbers(const BFloat16* p) {
  Numbers<BFloat16> numbers;
  __builtin_memcpy(&numbers, p, sizeof numbers);
  return numbers;
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

// Of numbers that T holds, which need no rounding.
template <class T>
VTENSOR_INLINE Numbers<T> interleave_exactly(Vec even, Vec odd) {
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

// Up to 16 queries, the others 0.
template <class T>
inline void amx_pack_queries(const T* const* rows, int num_rows, int head_dim, float* tiles) {
  for (int i = 0; i < head_dim; i += kAmxDepth, tiles += kPartsOf<T> * kTileFloats) {
    for (int j = 0; j < kTileRows; ++j) {
      Numbers<T> numbers = {};
      if (j < num_rows) numbers = load_numbers(rows[j] + i);
#pragma GCC unroll 3
      for (int p = 0; p < kPartsOf<T>; ++p) {
        store(tiles + p * kTileFloats + j * kLanes, numbers.part[p]);
      }
    }
#pragma GCC unroll 3
    for (int p = 0; p < kPartsOf<T>; ++p) transpose_tile(tiles + p * kTileFloats);
  }
}

// Rows of a tile beyond num_keys stay what they are: their scores are hidden.
template <class T>
inline void amx_pack_keys(const T* k, int64_t token_stride, int num_keys, int head_dim,
                          float* tiles) {
  const int64_t block = head_dim / kAmxDepth * kPartsOf<T> * kTileFloats;
  for (int key = 0; key < num_keys; ++key) {
    float* to = tiles + key / kTileRows * block + key % kTileRows * kLanes;
    for (int i = 0; i < head_dim; i += kAmxDepth) {
      const Numbers<T> numbers = load_numbers(k + key * token_stride + i);
#pragma GCC unroll 3
      for (int p = 0; p < kPartsOf<T>; ++p, to += kTileFloats) store(to, numbers.part[p]);
    }
  }
}

// Keys beyond num_keys, up to the next multiple of 32, are 0.
template <class T>
inline void amx_pack_values(const T* v, int64_t token_stride, int num_keys, int head_dim,
                            float* tiles) {
  constexpr int64_t kStep = kPartsOf<T> * kTileFloats;
  for (int first = 0; first < num_keys; first += kAmxDepth) {
    float* step = tiles + first / kAmxDepth * kStep;
    for (int j = 0; j < kTileRows; ++j) {
      const int key = first + 2 * j;
      const T* row = v + key * token_stride;
      for (int i = 0; i < head_dim; i += kTileRows) {
        const Vec even = key < num_keys ? load(row + i) : Vec{};
        const Vec odd = key + 1 < num_keys ? load(row + token_stride + i) : Vec{};
        const Numbers<T> numbers = interleave_exactly<T>(even, odd);
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
