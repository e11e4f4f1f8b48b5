// Online softmax over transposed scores [keys, rows]: a lane is a query row, so that nothing is
// summed across lanes. The invariants are those of softmax.h, but for the maximum, which may stay
// up to kSlack below the largest score: rows are rescaled only where their weights would grow
// beyond 2^kSlack (as in FlashAttention-4).
#pragma once

#include "kernels/simd/amx_pack.h"
#include "kernels/simd/softmax.h"

namespace vtensor::kernels {
namespace {

constexpr int kBlockRows = 32;
constexpr float kSlack = 8;

// A thread's memory for one task on AMX.
struct AmxScratch {
  float* queries;  // tiles, see amx_pack.h
  float* output;   // [rows / 32, value_dim, 32]
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* keys;     // tiles
  float* values;   // tiles
  float* scores;   // two of [kTileTokens, 32], of blocks that follow each other
  float* weights;  // two of [32 / 16, keys / 32, part] tiles of 16 pairs of keys x 16 rows
};

template <class T>
constexpr int64_t kWeightFloats = kBlockRows / kTileRows * kKeySteps * kPartsOf<T> * kTileFloats;
constexpr int64_t kScoreFloats = int64_t{kTileTokens} * kBlockRows;

template <class T>
inline AmxScratch lay_out_amx(float* base, int key_dim, int value_dim) {
  constexpr int64_t kHalfParts = kPartsOf<T>;
  AmxScratch s;
  s.queries = base;
  s.output = s.queries + kMaxRows * key_dim / 2 * kHalfParts;
  s.maximum = s.output + kMaxRows * value_dim;
  s.sum = s.maximum + kMaxRows;
  s.keys = s.sum + kMaxRows;
  s.values = s.keys + kTileTokens * key_dim / 2 * kHalfParts;
  s.scores = s.values + kTileTokens * value_dim / 2 * kHalfParts;
  s.weights = s.scores + 2 * kScoreFloats;
  return s;
}

// Up to 32 query rows against the keys [begin, end) of a tile, multiples of 32.
struct RowBlock {
  int row = 0;
  int num_rows = 0;
  int begin = 0;
  int end = 0;
  bool masked = false;  // some of the scores are to be hidden
  int halves() const { return num_rows > kTileRows ? 2 : 1; }
};

// 2^x, 0 below -127 and for minus infinity; for bfloat16 weights with a relative error of 1e-4, a
// twentieth of what their rounding costs.
template <class T>
VTENSOR_INLINE Vec weight_of(Vec x) {
  const Vec bounded = max(splat(-127.0F), x);  // in this order a NaN stays one
  const Vec magic = splat(0x1.8p23F);
  const Vec shifted = bounded + magic;
  const Vec r = bounded - (shifted - magic);
  Vec p;
  if constexpr (kPartsOf<T> == 1) {
    p = splat(0.05500893294811249F);
    p = p * r + 0.2422109693288803F;
    p = p * r + 0.6932829022407532F;
  } else {
    p = splat(0.0013276472454890609F);
    p = p * r + 0.009675540961325169F;
    p = p * r + 0.05550713092088699F;
    p = p * r + 0.24022120237350464F;
    p = p * r + 0.6931469440460205F;
  }
  p = p * r + 1.0F;
  return from_bits(bits_of(p) + (bits_of(shifted) << 23));
}

// Scores that a row does not see become minus infinity.
inline void mask_block(const LayerCall& call, const AttendTask& task, const RowBlock& block,
                       int64_t tile, int num_keys, float* scores) {
  alignas(64) int32_t first[kBlockRows] = {}, last[kBlockRows] = {};
  for (int i = 0; i < block.num_rows; ++i) {
    const int32_t token = task.tokens[(block.row + i) / task.num_heads];
    last[i] = static_cast<int32_t>(clip(call.positions[token] + 1 - tile, 0, num_keys));
    first[i] = static_cast<int32_t>(clip(call.firsts[token] - tile, 0, num_keys));
  }
  for (int half = 0; half < block.halves(); ++half) {
    IVec from, to;
    __builtin_memcpy(&from, first + half * kLanes, sizeof from);
    __builtin_memcpy(&to, last + half * kLanes, sizeof to);
    for (int key = block.begin; key < block.end; ++key) {
      float* p = scores + key * kBlockRows + half * kLanes;
      const IVec visible = (from <= key) & (to > key);
      store(p, visible != 0 ? load(p) : splat(kMinusInfinity));
    }
  }
}

inline void cap_block(const RowBlock& block, float factor, float softcap, float* scores) {
  for (int i = block.begin * kBlockRows; i < block.end * kBlockRows; i += kLanes) {
    store(scores + i, tanh(load(scores + i) * factor) * (softcap * kLog2e));
  }
}

VTENSOR_INLINE Vec largest(const float* scores, int begin, int end) {
  Vec best[4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) best[i] = splat(kMinusInfinity);
  for (int key = begin; key < end; key += 4) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) best[i] = max(best[i], load(scores + (key + i) * kBlockRows));
  }
  return max(max(best[0], best[1]), max(best[2], best[3]));
}

// Raises the maximum of those of 16 rows for whose scores it is too low, and shrinks what has been
// summed up for them: a row's result hangs on no other's. sum, output: of these rows.
inline void raise_maximum(Vec candidate, int value_dim, float* maximum, float* sum, float* output) {
  const Vec before = load(maximum);
  const Vec bound = before + kSlack;
  if (_mm512_cmp_ps_mask(reinterpret_cast<__m512>(candidate), reinterpret_cast<__m512>(bound),
                         _CMP_GT_OQ) == 0) {
    return;
  }
  const Vec raised = candidate > bound ? candidate : before;
  const Vec reference = raised == splat(kMinusInfinity) ? Vec{} : raised;
  const Vec shrink = exp2(before - reference);
  store(maximum, raised);
  store(sum, load(sum) * shrink);
  for (int i = 0; i < value_dim; ++i) {
    store(output + i * kBlockRows, load(output + i * kBlockRows) * shrink);
  }
}

// Weights from scores, a little at each step(), while tiles multiply for other blocks.
template <class T>
class Weights {
 public:
  // Takes over the block's scores, which are complete, and readies maxima; `factor` is to be
  // applied to the scores. About `num_steps` calls of step() will follow.
  void start(const RowBlock& block, const AmxScratch& s, int which, int value_dim, float factor,
             int num_steps) {
    scores_ = s.scores + which * kScoreFloats;
    weights_ = s.weights + which * kWeightFloats<T>;
    sum_ = s.sum + block.row;
    halves_ = block.halves();
    key_ = block.begin;
    end_ = block.end;
    factor_ = factor;
    keys_ = 2 * (((end_ - key_) / 2 + num_steps - 1) / num_steps);
    for (int half = 0; half < halves_; ++half) {
      const int row = half * kLanes;
      float* maximum = s.maximum + block.row + row;
      raise_maximum(largest(scores_ + row, key_, end_) * factor, value_dim, maximum, sum_ + row,
                    s.output + block.row * value_dim + row);
      const Vec reference = load(maximum);
      reference_[half] = reference == splat(kMinusInfinity) ? Vec{} : reference;
    }
  }

  VTENSOR_INLINE void step() { advance(key_ + keys_ < end_ ? key_ + keys_ : end_); }
  void finish() { advance(end_); }

 private:
  VTENSOR_INLINE void advance(int end) {
    for (int half = 0; half < halves_; ++half) {
      Vec sum = load(sum_ + half * kLanes);
      const Vec reference = reference_[half];
      for (int key = key_; key < end; key += 2) sum += add_pair(key, half, reference);
      store(sum_ + half * kLanes, sum);
    }
    key_ = end;
  }

  VTENSOR_INLINE Vec add_pair(int key, int half, Vec reference) {
    const float* score = scores_ + key * kBlockRows + half * kLanes;
    const Vec even = weight_of<T>(load(score) * factor_ - reference);
    const Vec odd = weight_of<T>(load(score + kBlockRows) * factor_ - reference);
    const Numbers<T> numbers = interleave<T>(even, odd);
    float* to = weights_ + (half * kKeySteps + key / kAmxDepth) * kPartsOf<T> * kTileFloats +
                key % kAmxDepth / 2 * kLanes;
#pragma GCC unroll 3
    for (int p = 0; p < kPartsOf<T>; ++p) store(to + p * kTileFloats, numbers.part[p]);
    return even + odd;
  }

  const float* scores_ = nullptr;
  float* weights_ = nullptr;
  float* sum_ = nullptr;
  Vec reference_[2] = {};
  int halves_ = 0;
  int key_ = 0;
  int end_ = 0;
  int keys_ = 0;  // a step
  float factor_ = 1;
};

}  // namespace
}  // namespace vtensor::kernels
