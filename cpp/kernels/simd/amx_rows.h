// Tasks with many query rows on AMX's tiles, which multiply bfloat16 matrices 16 times as fast as
// AVX-512 multiplies float32 ones; float32 goes there in three parts (split.h).
//
// A tile of keys and values is packed once for all rows of the task. These go in blocks of 32:
// while the tiles multiply queries and keys of the next block, and weights and values of the one
// before, vectors turn the scores of this one into weights.
//
// REQUIRES: key_dim and value_dim multiples of 32; see amx_tiles.h.
#pragma once

#include <immintrin.h>

#include "kernels/simd/amx_softmax.h"

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

constexpr int kMaxBlocks = kMaxRows / kBlockRows;
// Calls of step() for a depth of 32: products of parts.
template <class T>
constexpr int kOverlapSteps = kPartsOf<T> == 1 ? 1 : 6;

template <class T, bool kBoth, class Overlap>
VTENSOR_INLINE void multiply_depth(const float* a, int64_t a_next, const float* b, int64_t b_next,
                                   Overlap& overlap) {
  load_a(a, a_next);
  if constexpr (kPartsOf<T> == 1) {
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
template <class T, bool kBoth, class Overlap>
VTENSOR_INLINE void multiply_keys(const RowBlock& block, const float* queries, const float* keys,
                                  int key_dim, float* scores, Overlap& overlap) {
  constexpr int64_t kStep = kPartsOf<T> * kTileFloats;
  const int64_t next = key_dim / kAmxDepth * kStep;
  for (int key = block.begin; key < block.end; key += 32) {
    amx_zero();
    const float* a = keys + key / kTileRows * next;
    for (int64_t i = 0; i < next; i += kStep) {
      multiply_depth<T, kBoth>(a + i, next, queries + i, next, overlap);
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

// output += values times weights, of the block.
template <class T, bool kBoth, class Overlap>
VTENSOR_INLINE void multiply_values(const RowBlock& block, const float* weights,
                                    const float* values, int value_dim, float* output,
                                    Overlap& overlap) {
  constexpr int64_t kStep = kPartsOf<T> * kTileFloats, kNext = kKeySteps * kStep;
  for (int dim = 0; dim < value_dim; dim += 32) {
    float* c = output + dim * kBlockRows;
    _tile_loadd(0, c, kBlockRows * 4);
    _tile_loadd(2, c + kTileRows * kBlockRows, kBlockRows * 4);
    if constexpr (kBoth) {
      _tile_loadd(1, c + kTileRows, kBlockRows * 4);
      _tile_loadd(3, c + kTileRows * kBlockRows + kTileRows, kBlockRows * 4);
    }
    const float* a = values + dim / kTileRows * kNext;
    for (int64_t i = block.begin / kAmxDepth * kStep; i < block.end / kAmxDepth * kStep;
         i += kStep) {
      multiply_depth<T, kBoth>(a + i, kNext, weights + i, kNext, overlap);
    }
    _tile_stored(0, c, kBlockRows * 4);
    _tile_stored(2, c + kTileRows * kBlockRows, kBlockRows * 4);
    if constexpr (kBoth) {
      _tile_stored(1, c + kTileRows, kBlockRows * 4);
      _tile_stored(3, c + kTileRows * kBlockRows + kTileRows, kBlockRows * 4);
    }
  }
}

// Asks for the next tile's keys and values, a few at each step(): the first-level cache can wait
// for 16 lines at once, and packing them needs more.
template <class T>
class NextRows {
 public:
  NextRows(const LayerCall& call, const AttendTask& task, int64_t tile)
      : k_(static_cast<const T*>(task.k) + tile * task.k_stride),
        v_(static_cast<const T*>(task.v) + tile * task.v_stride),
        k_stride_(task.k_stride),
        v_stride_(task.v_stride),
        key_dim_(call.key_dim),
        value_dim_(call.value_dim),
        left_(static_cast<int>(clip(task.end - tile, 0, kTileTokens))) {}

  // About num_steps calls of step() will follow.
  void spread(int num_steps) { rows_ = (left_ + num_steps - 1) / num_steps; }

  VTENSOR_INLINE void step() {
    constexpr int kLine = 64 / static_cast<int>(sizeof(T));
    for (int i = 0; i < rows_ && left_ > 0; ++i, --left_, k_ += k_stride_, v_ += v_stride_) {
      for (int d = 0; d < key_dim_; d += kLine) __builtin_prefetch(k_ + d, 0, 2);
      for (int d = 0; d < value_dim_; d += kLine) __builtin_prefetch(v_ + d, 0, 2);
    }
  }

 private:
  const T* k_;
  const T* v_;
  const int64_t k_stride_, v_stride_;
  const int key_dim_, value_dim_;
  int left_;
  int rows_ = 0;  // a step
};

// One task's way through its keys, tile by tile.
template <class T>
class AmxTask {
 public:
  AmxTask(const LayerCall& call, const AttendTask& task, const AmxScratch& s)
      : call_(call), task_(task), s_(s), key_dim_(call.key_dim), value_dim_(call.value_dim) {
    const int rows = task.num_tokens * task.num_heads;
    for (int row = 0; row < rows; row += kBlockRows, ++num_all_) {
      const int last = row + kBlockRows < rows ? row + kBlockRows : rows;
      num_rows_[num_all_] = last - row;
      find_positions(task.tokens + row / task.num_heads, task.tokens + (last - 1) / task.num_heads);
    }
  }

  void attend() {
    for (tile_ = task_.begin; tile_ < task_.end; tile_ += kTileTokens) {
      const int64_t left = task_.end - tile_;
      num_keys_ = left < kTileTokens ? static_cast<int>(left) : kTileTokens;
      find_blocks();
      if (num_blocks_ > 0) attend_tile();
    }
  }

 private:
  struct Span {
    int64_t least = INT64_MAX, most = 0;
    void add(int64_t value) {
      least = value < least ? value : least;
      most = value > most ? value : most;
    }
  };
  struct Nothing {
    void step() {}
  };
  // What vectors do while tiles multiply.
  struct Overlap {
    Weights<T> weights;
    NextRows<T>& next;
    VTENSOR_INLINE void step() {
      next.step();
      weights.step();
    }
  };

  void attend_tile() {
    const int64_t k_stride = task_.k_stride, v_stride = task_.v_stride;
    amx_pack_keys(static_cast<const T*>(task_.k) + tile_ * k_stride, k_stride, num_keys_, key_dim_,
                  s_.keys);
    amx_pack_values(static_cast<const T*>(task_.v) + tile_ * v_stride, v_stride, num_keys_,
                    value_dim_, s_.values);
    Nothing nothing;
    compute_scores(0, nothing);
    NextRows<T> next(call_, task_, tile_ + kTileTokens);
    for (int i = 0; i < num_blocks_; ++i) {
      Overlap overlap{Weights<T>(), next};
      start(i, overlap.weights);
      next.spread((num_blocks_ - i) * steps_of_overlap(i));
      if (i > 0) add_values(i - 1, overlap);
      if (i + 1 < num_blocks_) compute_scores(i + 1, overlap);
      overlap.weights.finish();
    }
    add_values(num_blocks_ - 1, nothing);
  }

  // Of the tokens [first, last], whose rows are a block.
  void find_positions(const int32_t* first, const int32_t* last) {
    Span position, visible;
    for (; first <= last; ++first) {
      position.add(call_.positions[*first]);
      visible.add(call_.firsts[*first]);
    }
    positions_[num_all_] = position;
    firsts_[num_all_] = visible;
  }

  // Leaves out what no row of a block sees.
  void find_blocks() {
    num_blocks_ = 0;
    for (int i = 0; i < num_all_; ++i) {
      const int64_t begin = clip(firsts_[i].least - tile_, 0, num_keys_);
      const int64_t end = clip(positions_[i].most + 1 - tile_, 0, num_keys_);
      if (begin >= end) continue;
      RowBlock& block = blocks_[num_blocks_++];
      block.row = i * kBlockRows;
      block.num_rows = num_rows_[i];
      block.begin = static_cast<int>(begin) / kAmxDepth * kAmxDepth;
      block.end = (static_cast<int>(end) + kAmxDepth - 1) / kAmxDepth * kAmxDepth;
      block.masked = clip(positions_[i].least + 1 - tile_, 0, num_keys_) < block.end ||
                     clip(firsts_[i].most - tile_, 0, num_keys_) > block.begin;
    }
  }

  template <class Overlap>
  void compute_scores(int i, Overlap& overlap) {
    const RowBlock& block = blocks_[i];
    const float* queries = s_.queries + block.row / 2 * key_dim_ * kPartsOf<T>;
    float* scores = s_.scores + i % 2 * kScoreFloats;
    if (block.halves() == 2) {
      multiply_keys<T, true>(block, queries, s_.keys, key_dim_, scores, overlap);
    } else {
      multiply_keys<T, false>(block, queries, s_.keys, key_dim_, scores, overlap);
    }
  }

  template <class Overlap>
  void add_values(int i, Overlap& overlap) {
    const RowBlock& block = blocks_[i];
    const float* weights = s_.weights + i % 2 * kWeightFloats<T>;
    float* output = s_.output + block.row * value_dim_;
    if (block.halves() == 2) {
      multiply_values<T, true>(block, weights, s_.values, value_dim_, output, overlap);
    } else {
      multiply_values<T, false>(block, weights, s_.values, value_dim_, output, overlap);
    }
  }

  void start(int i, Weights<T>& weights) {
    const RowBlock& block = blocks_[i];
    float* scores = s_.scores + i % 2 * kScoreFloats;
    float factor = query_factor(call_);
    if (call_.softcap != 0) {
      cap_block(block, factor, call_.softcap, scores);
      factor = 1;
    }
    if (block.masked) mask_block(call_, task_, block, tile_, num_keys_, scores);
    weights.start(block, s_, i % 2, value_dim_, factor, steps_of_overlap(i));
  }

  // Of the products of the blocks before and behind; at least 1.
  int steps_of_overlap(int i) const {
    int products = 0;
    if (i > 0) products += products_of(blocks_[i - 1], value_dim_);
    if (i + 1 < num_blocks_) products += products_of(blocks_[i + 1], key_dim_);
    const int steps = products * kOverlapSteps<T>;
    return steps > 0 ? steps : 1;
  }

  static int products_of(const RowBlock& block, int width) {
    return (block.end - block.begin) / kAmxDepth * (width / kAmxDepth);
  }

  const LayerCall& call_;
  const AttendTask& task_;
  const AmxScratch& s_;
  const int key_dim_, value_dim_;
  int64_t tile_ = 0;
  int num_keys_ = 0;  // of the tile
  int num_all_ = 0;
  int num_rows_[kMaxBlocks];    // of each block
  Span positions_[kMaxBlocks];  // of its rows
  Span firsts_[kMaxBlocks];     // that its rows see
  int num_blocks_ = 0;          // that see keys of the tile
  RowBlock blocks_[kMaxBlocks];
};

template <class T>
inline void amx_start_rows(const LayerCall& call, const AttendTask& task, const AmxScratch& s) {
  const int rows = task.num_tokens * task.num_heads;
  const T* query = static_cast<const T*>(call.query);
  for (int row = 0; row < rows; row += static_cast<int>(kTileRows)) {
    const auto address = [&](int i) {
      return query + (task.first_head + (row + i) % task.num_heads) * call.query_head_stride +
             task.tokens[(row + i) / task.num_heads] * call.query_token_stride;
    };
    pack_queries<T>(address, rows - row, call.key_dim,
                    s.queries + row / 2 * call.key_dim * kPartsOf<T>);
    store(s.maximum + row, splat(kMinusInfinity));
    store(s.sum + row, Vec{});
  }
  const int blocks = (rows + kBlockRows - 1) / kBlockRows;
  for (int i = 0; i < blocks * kBlockRows * call.value_dim; i += kLanes) store(s.output + i, Vec{});
}

// Calls write(row, output, maximum, sum) for all rows of the task.
template <class Write>
inline void amx_end_rows(int rows, int value_dim, const AmxScratch& s, const Write& write) {
  float* dense = s.scores;  // [32, value_dim]
  for (int first = 0; first < rows; first += kBlockRows) {
    const float* output = s.output + first * value_dim;
    for (int half = 0; half < kBlockRows; half += kLanes) {
      for (int i = 0; i < value_dim; i += kLanes) {
        Vec square[kLanes];
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) square[j] = load(output + (i + j) * kBlockRows + half);
        transpose(square);
#pragma GCC unroll 16
        for (int j = 0; j < kLanes; ++j) store(dense + (half + j) * value_dim + i, square[j]);
      }
    }
    for (int row = first; row < first + kBlockRows && row < rows; ++row) {
      write(row, dense + (row - first) * value_dim, s.maximum[row], s.sum[row]);
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
