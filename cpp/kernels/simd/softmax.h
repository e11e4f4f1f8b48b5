// Online softmax over the tiles of a task (Milakov and Gimelshein, 2018; FlashAttention).
//
// Scores are kept in base 2: query rows are scaled by scaling * log2(e) beforehand, so that a
// weight is 2^(score - maximum). The sum of a row is kept a lane each and added up at the end.
//
// Invariants of a row between two tiles, over the keys so far:
//   1. maximum = the largest visible score, minus infinity if there was none;
//   2. sum = the sum of 2^(score - maximum), output = that of 2^(score - maximum) * value.
#pragma once

#include "kernels/calls/attention.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

constexpr float kLog2e = 1.4426950408889634F;

constexpr int kSideRows = kMaxSideBySide * kMaxFewRows;

// A thread's memory for tasks side by side; kLanes floats a row for the sum.
struct Scratch {
  float* query;    // [rows, key_dim], scaled
  float* output;   // [rows, value_dim]
  float* score;    // [rows, kTileTokens]; weights after the softmax
  float* maximum;  // [rows]
  float* sum;      // [rows, kLanes]
};

inline Scratch lay_out(float* base, int key_dim, int value_dim) {
  Scratch s;
  s.query = base;
  s.output = s.query + kSideRows * key_dim;
  s.score = s.output + kSideRows * value_dim;
  s.maximum = s.score + kSideRows * kTileTokens;
  s.sum = s.maximum + kSideRows * kHeadDimStep;
  return s;
}

// That of the rows from `row` on.
inline Scratch from_row(Scratch s, int row, int key_dim, int value_dim) {
  s.query += row * key_dim;
  s.output += row * value_dim;
  s.score += row * kTileTokens;
  s.maximum += row;
  s.sum += row * kLanes;
  return s;
}

// The factor of the query or of the scores, by which scores come out in base 2, or ready for the
// soft cap's tanh.
inline float query_factor(const LayerCall& call) {
  return call.softcap != 0 ? call.scaling / call.softcap : call.scaling * kLog2e;
}

inline void start_rows(const Scratch& s, int rows, int value_dim) {
  for (int row = 0; row < rows; ++row) s.maximum[row] = kMinusInfinity;
  for (int i = 0; i < rows * kLanes; ++i) s.sum[i] = 0;
  for (int i = 0; i < rows * value_dim; ++i) s.output[i] = 0;
}

inline void scale(float* p, int count, float factor) {
  for (int i = 0; i < count; i += kLanes) store(p + i, load(p + i) * factor);
}

// Hides the scores outside of [first, last), up to `width`.
inline void mask_row(float* score, int64_t first, int64_t last, int width) {
  for (int i = 0; i < first; ++i) score[i] = kMinusInfinity;
  for (int64_t i = last; i < width; ++i) score[i] = kMinusInfinity;
}

// One row: scores of a tile become weights; maximum, sum and output follow invariants 1 and 2.
// `factor`, positive, is still to be applied to the scores. Weights of type W go where the scores
// stood, from the row's beginning.
template <class W>
VTENSOR_INLINE void softmax_row(const Scratch& s, int row, int width, int value_dim, float softcap,
                                float factor) {
  float* score = s.score + row * kTileTokens;
  if (softcap != 0) {
    for (int i = 0; i < width; i += kLanes) {
      const Vec x = load(score + i);
      const Vec capped = tanh(x * factor) * (softcap * kLog2e);
      store(score + i, x == splat(kMinusInfinity) ? x : capped);
    }
    factor = 1;
  }
  Vec best = splat(kMinusInfinity);
  for (int i = 0; i < width; i += kLanes) best = max(best, load(score + i));
  const float before = s.maximum[row];
  const float tile_maximum = max_lane(best) * factor;
  const float maximum = tile_maximum > before ? tile_maximum : before;
  // No key so far: any finite reference makes all weights 0.
  const float reference = maximum == kMinusInfinity ? 0 : maximum;
  Vec sum = load(s.sum + row * kLanes);
  if (maximum > before) {
    const float shrink = exp2(before - reference);
    s.maximum[row] = maximum;
    sum *= shrink;
    scale(s.output + row * value_dim, value_dim, shrink);
  }
  for (int i = 0; i < width; i += kLanes) {
    const Vec weight = exp2(load(score + i) * factor - reference);
    sum += weight;
    store(reinterpret_cast<W*>(score) + i, weight);
  }
  store(s.sum + row * kLanes, sum);
}

inline int64_t clip(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

// All rows against the tile of keys [tile, tile + num_keys); weights up to `width`, a multiple of
// kLanes, are defined afterwards.
template <class W>
inline void softmax_tile(const LayerCall& call, const AttendTask& task, const Scratch& s,
                         int64_t tile, int num_keys, int width, float factor) {
  for (int i = 0; i < task.num_tokens; ++i) {
    const int32_t token = task.tokens[i];
    const int64_t last = clip(call.positions[token] + 1 - tile, 0, num_keys);
    const int64_t first = clip(call.firsts[token] - tile, 0, num_keys);
    for (int h = 0; h < task.num_heads; ++h) {
      const int row = i * task.num_heads + h;
      mask_row(s.score + row * kTileTokens, first, last, width);
      softmax_row<W>(s, row, width, call.value_dim, call.softcap, factor);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
