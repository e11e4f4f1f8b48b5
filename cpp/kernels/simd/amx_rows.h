// Products of AMX's tiles for tasks with many query rows (many_rows.h): they multiply bfloat16
// matrices 16 times as fast as AVX-512 multiplies float32 ones; float32 goes there in three parts
// (split.h).
//
// REQUIRES: key_dim and value_dim multiples of 32; see amx_tiles.h.
#pragma once

#include <immintrin.h>

#include "kernels/simd/amx_pack.h"
#include "kernels/simd/lane_softmax.h"

namespace vtensor::kernels {
namespace {

// C tiles 0 1 / 2 3 += two A tiles times two B tiles, over a depth of 32, parts of a tile one
// behind the other. Without kBoth the second B tile, C tiles 1 and 3, are left out.
template <bool kBoth>
VTENSOR_INLINE void load_b(const float* b, int64_t next) {
  _tile_loadd(6, b, 64);
  if constexpr (kBoth) _tile_loadd(7, b + next, 64);
}

VTENSOR_INLINE void load_a(const float* a, int64_t next) {
  _tile_loadd(4, a, 64);
  _tile_loadd(5, a + next, 64);
}

template <bool kBoth>
VTENSOR_INLINE void multiply_loaded() {
  _tile_dpbf16ps(0, 4, 6);
  _tile_dpbf16ps(2, 5, 6);
  if constexpr (kBoth) {
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
  }
}

// Calls of step() for a depth of 32: products of parts.
template <class T>
constexpr int kOverlapSteps = kPartsOf<T> == 1 ? 1 : 6;

// Of one part of A and one or two of B, or of three of both.
template <int kBParts, bool kBoth, class Overlap>
VTENSOR_INLINE void multiply_depth(const float* a, int64_t a_next, const float* b, int64_t b_next,
                                   Overlap& overlap) {
  load_a(a, a_next);
  if constexpr (kBParts < kParts) {
    if constexpr (kBParts == 2) {
      load_b<kBoth>(b + kTileFloats, b_next);
      multiply_loaded<kBoth>();
    }
    load_b<kBoth>(b, b_next);
    multiply_loaded<kBoth>();
    overlap.step();
  } else {
    load_b<kBoth>(b + 2 * kTileFloats, b_next);
    multiply_loaded<kBoth>();  // a1 b3
    overlap.step();
    load_b<kBoth>(b + kTileFloats, b_next);
    multiply_loaded<kBoth>();  // a1 b2
    overlap.step();
    load_a(a + kTileFloats, a_next);
    multiply_loaded<kBoth>();  // a2 b2
    overlap.step();
    load_b<kBoth>(b, b_next);
    multiply_loaded<kBoth>();  // a2 b1
    overlap.step();
    load_a(a + 2 * kTileFloats, a_next);
    multiply_loaded<kBoth>();  // a3 b1
    overlap.step();
    load_a(a, a_next);
    multiply_loaded<kBoth>();  // a1 b1
    overlap.step();
  }
}

// scores = keys times queries, of the block.
template <class T, class S, bool kBoth, class Overlap>
VTENSOR_INLINE void amx_multiply_keys(const RowBlock& block, const float* queries,
                                      const float* keys, int key_dim, float* scores,
                                      Overlap& overlap) {
  constexpr int kBParts = kQueryParts<T, S>;
  constexpr int64_t kAStep = kPartsOf<T> * kTileFloats, kBStep = kBParts * kTileFloats;
  const int64_t depths = key_dim / kAmxDepth;
  for (int key = block.begin; key < block.end; key += 32) {
    amx_zero();
    const float* a = keys + key / kTileRows * depths * kAStep;
    for (int64_t i = 0; i < depths; ++i) {
      multiply_depth<kBParts, kBoth>(a + i * kAStep, depths * kAStep, queries + i * kBStep,
                                     depths * kBStep, overlap);
    }
    float* c = scores + key * kBlockRows;
    _tile_stored(0, c, kBlockRows * 4);
    _tile_stored(2, c + kTileRows * kBlockRows, kBlockRows * 4);
    if constexpr (kBoth) {
      _tile_stored(1, c + kTileRows, kBlockRows * 4);
      _tile_stored(3, c + kTileRows * kBlockRows + kTileRows, kBlockRows * 4);
    }
  }
}

// output = or += values times weights, of the block.
template <class T, bool kBoth, class Overlap>
VTENSOR_INLINE void amx_multiply_values(const RowBlock& block, const float* weights,
                                        const float* values, int value_dim, float* output,
                                        Overlap& overlap) {
  constexpr int64_t kStep = kPartsOf<T> * kTileFloats, kNext = kKeySteps * kStep;
  for (int dim = 0; dim < value_dim; dim += 32) {
    float* c = output + dim * kBlockRows;
    if (block.is_first) {
      amx_zero();
    } else {
      _tile_loadd(0, c, kBlockRows * 4);
      _tile_loadd(2, c + kTileRows * kBlockRows, kBlockRows * 4);
      if constexpr (kBoth) {
        _tile_loadd(1, c + kTileRows, kBlockRows * 4);
        _tile_loadd(3, c + kTileRows * kBlockRows + kTileRows, kBlockRows * 4);
      }
    }
    const float* a = values + dim / kTileRows * kNext;
    for (int64_t i = block.begin / kAmxDepth * kStep; i < block.end / kAmxDepth * kStep;
         i += kStep) {
      multiply_depth<kPartsOf<T>, kBoth>(a + i, kNext, weights + i, kNext, overlap);
    }
    _tile_stored(0, c, kBlockRows * 4);
    _tile_stored(2, c + kTileRows * kBlockRows, kBlockRows * 4);
    if constexpr (kBoth) {
      _tile_stored(1, c + kTileRows, kBlockRows * 4);
      _tile_stored(3, c + kTileRows * kBlockRows + kTileRows, kBlockRows * 4);
    }
  }
}

// Of many_rows.h, for queries of type T, KV stored as S: values with scales become T's parts once
// for all rows of the task.
template <class T, class S>
struct AmxProducts {
  using Number = T;
  using Stored = S;
  static constexpr int kPairFloats = kQueryParts<T, S>;
  static constexpr int kKeyStep = kAmxDepth;
  static constexpr int64_t kWeightFloats = kBlockVecs * kKeySteps * kPartsOf<T> * kTileFloats;
  static constexpr bool kOverlaps = true;
  static constexpr bool kScalesScores = kHasPlainKeys<T, S>;
  static constexpr bool kRough = kPartsOf<T> == 1;

  static Vec pack_queries(const T* const* rows, int num_rows, int key_dim, int vec,
                          float* queries) {
    amx_pack_queries<T, S>(rows, num_rows, key_dim,
                           queries + vec * key_dim / kAmxDepth * kQueryParts<T, S> * kTileFloats);
    return splat(1);
  }

  static void pack_keys(const S* k, int64_t stride, int num_keys, int key_dim, float* packed) {
    amx_pack_keys<T>(k, stride, num_keys, key_dim, packed);
  }

  static void pack_values(const S* v, int64_t stride, int num_keys, int value_dim, float* packed) {
    amx_pack_values<T>(v, stride, num_keys, value_dim, packed);
  }

  template <class Overlap>
  VTENSOR_INLINE static void multiply_keys(const RowBlock& block, const float* queries,
                                           const float* keys, int key_dim, float* scores,
                                           Overlap& overlap) {
    if (block.vecs() == 2) {
      amx_multiply_keys<T, S, true>(block, queries, keys, key_dim, scores, overlap);
    } else {
      amx_multiply_keys<T, S, false>(block, queries, keys, key_dim, scores, overlap);
    }
  }

  VTENSOR_INLINE static void store_weights(Vec even, Vec odd, int key, int vec, float* weights) {
    const Numbers<T> numbers = interleave<T>(even, odd);
    float* to = weights + (vec * kKeySteps + key / kAmxDepth) * kPartsOf<T> * kTileFloats +
                key % kAmxDepth / 2 * kLanes;
#pragma GCC unroll 3
    for (int p = 0; p < kPartsOf<T>; ++p) store(to + p * kTileFloats, numbers.part[p]);
  }

  template <class Overlap>
  VTENSOR_INLINE static void multiply_values(const RowBlock& block, const float* weights,
                                             const float* values, int value_dim, float* output,
                                             Overlap& overlap) {
    if (block.vecs() == 2) {
      amx_multiply_values<T, true>(block, weights, values, value_dim, output, overlap);
    } else {
      amx_multiply_values<T, false>(block, weights, values, value_dim, output, overlap);
    }
  }

  // Calls of step() while a block's keys or values of so many dimensions are multiplied.
  static int steps_of(const RowBlock& block, int width) {
    return (block.end - block.begin) / kAmxDepth * (width / kAmxDepth) * kOverlapSteps<T>;
  }
};

}  // namespace
}  // namespace vtensor::kernels
