// Products whose columns are the 32 query rows of a block, a lane each: scores^T = K Q^T and
// output^T = V^T weights^T, in float32, in pairs of bfloat16 numbers (simd/pairs.h) or of integers.
//
// The inner kernel keeps the sums of a few rows of the first matrix, times two vectors of query
// rows, in registers: enough of them to hide the latency of a multiply-add, few enough for the
// register file. A word is a float32 number, a pair (uint32_t), or a pair of integers (int32_t).
#pragma once

#include <type_traits>

#include "kernels/simd/dot.h"
#include "kernels/simd/lane_softmax.h"
#include "kernels/simd/pairs.h"
#include "kernels/simd/row_pointers.h"

namespace vtensor::kernels {
namespace {

// 32 registers with AVX-512, 16 before. Divides kHeadDimStep and kKeysPerStep.
constexpr int kSumRows = kLanes == 16 ? 8 : 4;
// Keys of a block are a multiple of this.
constexpr int kKeysPerStep = 8;

VTENSOR_INLINE Vec add_products(Vec sum, float x, Vec w) { return sum + x * w; }

VTENSOR_INLINE IVec add_products(IVec sum, int32_t x, SVec w) {
  return add_int16s(sum, reinterpret_cast<SVec>(IVec{} + x), w);
}

VTENSOR_INLINE Vec load_columns(const float* p) { return load(p); }
#if defined(VTENSOR_HAS_PAIRS)
VTENSOR_INLINE UVec load_columns(const uint32_t* p) { return load_pairs(p); }
#endif
VTENSOR_INLINE SVec load_columns(const int32_t* p) {
  SVec v;
  __builtin_memcpy(&v, p, sizeof v);
  return v;
}

template <class W>
using SumOf = std::conditional_t<std::is_same_v<W, int32_t>, IVec, Vec>;

VTENSOR_INLINE Vec floats_of(Vec sum) { return sum; }
VTENSOR_INLINE Vec floats_of(IVec sum) { return __builtin_convertvector(sum, Vec); }

// sums [kSumRows, N vectors] (+)= a b; a(m, k) a word, b [depth, 32] words, c [kSumRows, 32].
template <int N, bool kAdd, class W, class A>
VTENSOR_INLINE void multiply_vecs(const A& a, const W* b, float* c, int depth) {
  SumOf<W> sums[kSumRows][N] = {};
  if constexpr (kAdd) {
#pragma GCC unroll 8
    for (int m = 0; m < kSumRows; ++m) {
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sums[m][n] = load(c + m * kBlockRows + n * kLanes);
    }
  }
  for (int k = 0; k < depth; ++k) {
    decltype(load_columns(b)) column[N];
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) column[n] = load_columns(b + k * kBlockRows + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < kSumRows; ++m) {
      const W x = a(m, k);
#pragma GCC unroll 2
      for (int n = 0; n < N; ++n) sums[m][n] = add_products(sums[m][n], x, column[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < kSumRows; ++m) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) store(c + m * kBlockRows + n * kLanes, floats_of(sums[m][n]));
  }
}

template <bool kAdd, class W, class A>
VTENSOR_INLINE void multiply_block(int vecs, const A& a, const W* b, float* c, int depth) {
  int vec = 0;
  for (; vec + 2 <= vecs; vec += 2) {
    multiply_vecs<2, kAdd>(a, b + vec * kLanes, c + vec * kLanes, depth);
  }
  if (vec < vecs) multiply_vecs<1, kAdd>(a, b + vec * kLanes, c + vec * kLanes, depth);
}

// scores [keys, 32] = keys times queries, of the block; key_words: those of a key.
template <class W>
void multiply_lanes_keys(const RowBlock& block, const W* queries, const W* keys, int key_words,
                         float* scores) {
  for (int key = block.begin; key < block.end; key += kSumRows) {
    const RowPointers<W, kSumRows> rows(keys + key * key_words, key_words);
    const auto word = [&](int m, int k) { return rows.at(m, k * 4); };
    multiply_block<false>(block.vecs(), word, queries, scores + key * kBlockRows, key_words);
  }
}

// output [value_dim, 32] = or += values times weights, of the block, from its first of num_steps
// words of weights and [value_dim] of values on.
template <class W>
void multiply_lanes_values(const RowBlock& block, int num_steps, const W* weights, const W* values,
                           int value_dim, float* output) {
  for (int dim = 0; dim < value_dim; dim += kSumRows, output += kSumRows * kBlockRows) {
    const auto word = [&](int m, int k) { return values[k * value_dim + dim + m]; };
    if (block.is_first) {
      multiply_block<false>(block.vecs(), word, weights, output, num_steps);
    } else {
      multiply_block<true>(block.vecs(), word, weights, output, num_steps);
    }
  }
}

// Up to kLanes rows of words, the others 0, as columns of [words, 32]; load_words(j, i) gives
// kLanes words of row j, from word i on.
template <class LoadWords>
VTENSOR_INLINE void pack_lanes(const LoadWords& load_words, int num_rows, int num_words,
                               float* to) {
  for (int i = 0; i < num_words; i += kLanes) {
    Vec square[kLanes];
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) square[j] = j < num_rows ? load_words(j, i) : Vec{};
    transpose(square);
#pragma GCC unroll 16
    for (int j = 0; j < kLanes; ++j) store(to + (i + j) * kBlockRows, square[j]);
  }
}

}  // namespace
}  // namespace vtensor::kernels
