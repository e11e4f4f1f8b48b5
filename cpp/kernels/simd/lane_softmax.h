// Online softmax over transposed scores [keys, rows]: a lane is a query row, so that nothing is
// summed across lanes. The invariants are those of softmax.h, but for the maximum, which may stay
// up to kSlack below the largest score: rows are rescaled only where their weights would grow
// beyond 2^kSlack (as in FlashAttention-4).
//
// What weights are multiplied with, and in which numbers, is P's affair; see many_rows.h.
#pragma once

#include "kernels/simd/softmax.h"

namespace vtensor::kernels {
namespace {

constexpr int kBlockRows = 32;
constexpr int kBlockVecs = kBlockRows / kLanes;
constexpr int64_t kScoreFloats = int64_t{kTileTokens} * kBlockRows;
constexpr float kSlack = 8;

// A thread's memory for one task.
struct ManyScratch {
  float* queries;  // packed, a block of 32 rows behind the other
  float* output;   // [rows / 32, value_dim, 32]
  float* maximum;  // [rows]
  float* sum;      // [rows]
  float* units;    // [rows]; what 1 of a packed query is worth
  float* keys;     // packed
  float* values;   // packed
  float* scores;   // [kTileTokens, 32] of a block; if P overlaps, two, of blocks that follow
  float* weights;  // two of P::kWeightFloats if P overlaps; else they take their scores' place
};

template <class P>
inline ManyScratch lay_out_many(float* base, int key_dim, int value_dim) {
  constexpr int64_t kPairFloats = P::kPairFloats;
  ManyScratch s;
  s.queries = base;
  s.output = s.queries + kMaxRows * key_dim / 2 * kPairFloats;
  s.maximum = s.output + kMaxRows * value_dim;
  s.sum = s.maximum + kMaxRows;
  s.units = s.sum + kMaxRows;
  s.keys = s.units + kMaxRows;
  s.values = s.keys + kTileTokens * key_dim / 2 * kPairFloats;
  s.scores = s.values + kTileTokens * value_dim / 2 * kPairFloats;
  s.weights = P::kOverlaps ? s.scores + 2 * kScoreFloats : s.scores;
  return s;
}

// Which token and head of a task a row is.
struct RowPlace {
  int token;
  int head;
  int num_heads;

  RowPlace(int row, int num_heads)
      : token(row / num_heads), head(row % num_heads), num_heads(num_heads) {}
  VTENSOR_INLINE void advance() {
    head = head + 1 < num_heads ? head + 1 : 0;
    token += head == 0 ? 1 : 0;
  }
};

// Up to 32 query rows against the keys [begin, end) of a tile, multiples of P::kKeyStep.
struct RowBlock {
  int row = 0;
  int num_rows = 0;
  int begin = 0;
  int end = 0;
  int seen_begin =
      0;  // what lies outside of [seen_begin, seen_end) is hidden from some of the rows
  int seen_end = 0;
  bool is_first = true;  // nothing has been added to its output
  bool all_seen() const { return seen_begin <= begin && seen_end >= end; }
  int vecs() const { return (num_rows + kLanes - 1) / kLanes; }
};

// 2^x, 0 below -127 and for minus infinity; kRough: for bfloat16 weights, with a relative error of
// 1e-4, a twentieth of what their rounding costs.
template <bool kRough>
VTENSOR_INLINE Vec weight_of(Vec x) {
  const Vec bounded = max(splat(-127.0F), x);  // in this order a NaN stays one
  const Vec magic = splat(0x1.8p23F);
  const Vec shifted = bounded + magic;
  const Vec r = bounded - (shifted - magic);
  Vec p;
  if constexpr (kRough) {
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
  if (block.all_seen()) return;
  alignas(64) int32_t first[kBlockRows] = {}, last[kBlockRows] = {};
  RowPlace place(block.row, task.num_heads);
  for (int i = 0; i < block.num_rows; ++i, place.advance()) {
    const int32_t token = task.tokens[place.token];
    last[i] = static_cast<int32_t>(clip(call.positions[token] + 1 - tile, 0, num_keys));
    first[i] = static_cast<int32_t>(clip(call.firsts[token] - tile, 0, num_keys));
  }
  for (int vec = 0; vec < block.vecs(); ++vec) {
    IVec from, to;
    __builtin_memcpy(&from, first + vec * kLanes, sizeof from);
    __builtin_memcpy(&to, last + vec * kLanes, sizeof to);
    const auto mask_keys = [&](int key, int end) {
      for (; key < end; ++key) {
        float* p = scores + key * kBlockRows + vec * kLanes;
        const IVec visible = (from <= key) & (to > key);
        store(p, visible != 0 ? load(p) : splat(kMinusInfinity));
      }
    };
    const int seen_begin = block.seen_begin < block.end ? block.seen_begin : block.end;
    mask_keys(block.begin, seen_begin);
    mask_keys(block.seen_end > seen_begin ? block.seen_end : seen_begin, block.end);
  }
}

// Scores of keys and queries that were packed without their scales and units.
inline void scale_block(const RowBlock& block, const float* key_scales, const float* units,
                        float* scores) {
  for (int vec = 0; vec < block.vecs(); ++vec) {
    const Vec unit = load(units + vec * kLanes);
    for (int key = block.begin; key < block.end; ++key) {
      float* p = scores + key * kBlockRows + vec * kLanes;
      store(p, load(p) * (unit * key_scales[key]));
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

// Raises the maximum of those rows of a vector for whose scores it is too low, and shrinks what has
// been summed up for them: a row's result hangs on no other's. sum, output: of these rows; no
// output where nothing has been summed up.
inline void raise_maximum(Vec candidate, int value_dim, float* maximum, float* sum, float* output) {
  const Vec before = load(maximum);
  const Vec bound = before + kSlack;
  if (max_lane(candidate > bound ? splat(1) : Vec{}) == 0) return;
  const Vec raised = candidate > bound ? candidate : before;
  store(maximum, raised);
  if (output == nullptr) return;
  const Vec reference = raised == splat(kMinusInfinity) ? Vec{} : raised;
  const Vec shrink = exp2(before - reference);
  store(sum, load(sum) * shrink);
  for (int i = 0; i < value_dim; ++i) {
    store(output + i * kBlockRows, load(output + i * kBlockRows) * shrink);
  }
}

// Weights from scores, at once or a little at each step(), while P multiplies for other blocks.
template <class P>
class Weights {
 public:
  // Takes over the block's scores, which are complete, and readies maxima; `factor` is to be
  // applied to the scores. About `num_steps` calls of step() will follow.
  void start(const RowBlock& block, const ManyScratch& s, int which, int value_dim, float factor,
             int num_steps) {
    scores_ = s.scores + which * kScoreFloats;
    weights_ = s.weights + which * P::kWeightFloats;
    sum_ = s.sum + block.row;
    vecs_ = block.vecs();
    key_ = block.begin;
    end_ = block.end;
    factor_ = factor;
    keys_ = 2 * (((end_ - key_) / 2 + num_steps - 1) / num_steps);
    for (int vec = 0; vec < vecs_; ++vec) {
      const int row = vec * kLanes;
      float* maximum = s.maximum + block.row + row;
      float* output = block.is_first ? nullptr : s.output + block.row * value_dim + row;
      raise_maximum(largest(scores_ + row, key_, end_) * factor, value_dim, maximum, sum_ + row,
                    output);
      const Vec reference = load(maximum);
      reference_[vec] = reference == splat(kMinusInfinity) ? Vec{} : reference;
    }
  }

  VTENSOR_INLINE void step() { advance(key_ + keys_ < end_ ? key_ + keys_ : end_); }
  VTENSOR_INLINE void finish() { advance(end_); }

 private:
  VTENSOR_INLINE void advance(int end) {
    // Copies: what is stored might be a member, for all that the compiler knows.
    const float* scores = scores_;
    float* weights = weights_;
    const Vec factor = splat(factor_);
    for (int vec = 0; vec < vecs_; ++vec) {
      Vec sum = load(sum_ + vec * kLanes);
      const Vec reference = reference_[vec];
      for (int key = key_; key < end; key += 2) {
        const float* score = scores + key * kBlockRows + vec * kLanes;
        const Vec even = weight_of<P::kRough>(load(score) * factor - reference);
        const Vec odd = weight_of<P::kRough>(load(score + kBlockRows) * factor - reference);
        P::store_weights(even, odd, key, vec, weights);
        sum += even + odd;
      }
      store(sum_ + vec * kLanes, sum);
    }
    key_ = end;
  }

  const float* scores_ = nullptr;
  float* weights_ = nullptr;
  float* sum_ = nullptr;
  Vec reference_[kBlockVecs] = {};
  int vecs_ = 0;
  int key_ = 0;
  int end_ = 0;
  int keys_ = 0;  // a step
  float factor_ = 1;
};

}  // namespace
}  // namespace vtensor::kernels
