// Tasks with many query rows (prefills, shared prefixes): two matrix products a tile of keys.
//
// Bound by arithmetic. All of it is transposed, scores^T = K Q^T and output^T = V^T weights^T, so
// that a lane is a query row: nothing is summed across lanes, and keys need no turning. A tile of
// keys and values is packed once for all rows of the task, which go in blocks of 32. A block leaves
// out keys that none of its rows sees.
//
// P multiplies: AmxProducts, PairProducts or WideProducts. It says how queries, keys and values are
// packed, and into which numbers weights turn:
//
//   Number, Stored                types of queries and of KV
//   kPairFloats                   floats that two packed numbers take
//   kKeyStep                      keys of a block are multiples of it; values beyond the last are 0
//   kScalesScores                 keys are packed without their scales, queries in units of a row
//   kRough                        weights are rounded to bfloat16 anyway
//   kOverlaps                     while it multiplies, vectors have time for overlap.step():
//                                 weights of one block are made beside the products of its
//                                 neighbours
//   pack_queries                  gives the units of the rows, a lane each
//   pack_keys / _values, multiply_keys / _values, store_weights
#pragma once

#include "kernels/simd/lane_softmax.h"
#include "kernels/simd/stored_kv.h"

namespace vtensor::kernels {
namespace {

constexpr int kMaxBlocks = kMaxRows / kBlockRows;

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
template <class P>
class ManyRows {
 public:
  using Stored = typename P::Stored;

  ManyRows(const LayerCall& call, const AttendTask& task, float* scratch)
      : call_(call),
        task_(task),
        s_(lay_out_many<P>(scratch, call.key_dim, call.value_dim)),
        key_dim_(call.key_dim),
        value_dim_(call.value_dim),
        num_rows_(task.num_tokens * task.num_heads) {
    for (int row = 0; row < num_rows_; row += kBlockRows, ++num_all_) {
      const int last = row + kBlockRows < num_rows_ ? row + kBlockRows : num_rows_;
      find_positions(task.tokens + row / task.num_heads, task.tokens + (last - 1) / task.num_heads);
    }
    start_rows();
  }

  void attend() {
    for (tile_ = task_.begin; tile_ < task_.end; tile_ += kTileTokens) {
      const int64_t left = task_.end - tile_;
      num_keys_ = left < kTileTokens ? static_cast<int>(left) : kTileTokens;
      find_blocks();
      if (num_blocks_ > 0) attend_tile();
    }
  }

  // Calls write(token, head, output, maximum, sum) for all rows of the task.
  template <class Write>
  void end_rows(const Write& write) {
    float* dense = s_.scores;  // [32, value_dim]
    RowPlace place(0, task_.num_heads);
    for (int first = 0; first < num_rows_; first += kBlockRows) {
      float* output = s_.output + first * value_dim_;
      if (!is_started_[first / kBlockRows]) {  // none of its rows has seen a key
        for (int i = 0; i < kBlockRows * value_dim_; i += kLanes) store(output + i, Vec{});
      }
      for (int lane = 0; lane < kBlockRows; lane += kLanes) {
        for (int i = 0; i < value_dim_; i += kLanes) {
          Vec square[kLanes];
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) square[j] = load(output + (i + j) * kBlockRows + lane);
          transpose(square);
#pragma GCC unroll 16
          for (int j = 0; j < kLanes; ++j) store(dense + (lane + j) * value_dim_ + i, square[j]);
        }
      }
      const int last = first + kBlockRows < num_rows_ ? first + kBlockRows : num_rows_;
      for (int row = first; row < last; ++row, place.advance()) {
        write(place.token, place.head, dense + (row - first) * value_dim_, s_.maximum[row],
              s_.sum[row]);
      }
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
    Weights<P> weights;
    NextRows<Stored>& next;
    VTENSOR_INLINE void step() {
      next.step();
      weights.step();
    }
  };

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

  void start_rows() {
    using Number = typename P::Number;
    const Number* query = static_cast<const Number*>(call_.query);
    RowPlace place(0, task_.num_heads);
    for (int row = 0; row < num_rows_; row += kLanes) {
      const Number* rows[kLanes];
      const int last = num_rows_ - row < kLanes ? num_rows_ - row : kLanes;
      for (int i = 0; i < last; ++i, place.advance()) {
        rows[i] = query + (task_.first_head + place.head) * call_.query_head_stride +
                  task_.tokens[place.token] * call_.query_token_stride;
      }
      const Vec units = P::pack_queries(rows, last, key_dim_, row % kBlockRows / kLanes,
                                        queries_of(row / kBlockRows * kBlockRows));
      store(s_.units + row, units);
      store(s_.maximum + row, splat(kMinusInfinity));
      store(s_.sum + row, Vec{});
    }
  }

  // Those of the block that begins with `row`.
  float* queries_of(int row) const { return s_.queries + row / 2 * key_dim_ * P::kPairFloats; }

  // Leaves out what no row of a block sees.
  void find_blocks() {
    constexpr int kStep = P::kKeyStep;
    num_blocks_ = 0;
    for (int i = 0; i < num_all_; ++i) {
      const int begin = key_in_tile(firsts_[i].least);
      const int end = key_in_tile(positions_[i].most + 1);
      if (begin >= end) continue;
      RowBlock& block = blocks_[num_blocks_++];
      block.row = i * kBlockRows;
      block.num_rows = num_rows_ - block.row < kBlockRows ? num_rows_ - block.row : kBlockRows;
      block.begin = begin / kStep * kStep;
      block.end = (end + kStep - 1) / kStep * kStep;
      block.seen_begin = key_in_tile(firsts_[i].most);
      block.seen_end = key_in_tile(positions_[i].least + 1);
      block.is_first = !is_started_[i];
      is_started_[i] = true;
    }
  }

  int key_in_tile(int64_t key) const { return static_cast<int>(clip(key - tile_, 0, num_keys_)); }

  void attend_tile() {
    const int64_t k_stride = task_.k_stride, v_stride = task_.v_stride;
    const Stored* keys = static_cast<const Stored*>(task_.k) + tile_ * k_stride;
    P::pack_keys(keys, k_stride, num_keys_, key_dim_, s_.keys);
    if constexpr (P::kScalesScores) {
      for (int i = 0; i < num_keys_; ++i) key_scales_[i] = scale_of(keys + i * k_stride, key_dim_);
    }
    P::pack_values(static_cast<const Stored*>(task_.v) + tile_ * v_stride, v_stride, num_keys_,
                   value_dim_, s_.values);
    NextRows<Stored> next(call_, task_, tile_ + kTileTokens);
    if constexpr (P::kOverlaps) {
      overlap_blocks(next);
    } else {
      next.spread(num_blocks_);
      Nothing nothing;
      for (int i = 0; i < num_blocks_; ++i) {
        next.step();
        compute_scores(i, nothing);
        Weights<P> weights;
        start(i, weights, 1);
        weights.finish();
        add_values(i, nothing);
      }
    }
  }

  void overlap_blocks(NextRows<Stored>& next) {
    Nothing nothing;
    compute_scores(0, nothing);
    for (int i = 0; i < num_blocks_; ++i) {
      Overlap overlap{Weights<P>(), next};
      start(i, overlap.weights, steps_of_overlap(i));
      next.spread((num_blocks_ - i) * steps_of_overlap(i));
      if (i > 0) add_values(i - 1, overlap);
      if (i + 1 < num_blocks_) compute_scores(i + 1, overlap);
      overlap.weights.finish();
    }
    add_values(num_blocks_ - 1, nothing);
  }

  // Of the products of the blocks before and behind; at least 1.
  int steps_of_overlap(int i) const {
    int steps = 0;
    if (i > 0) steps += P::steps_of(blocks_[i - 1], value_dim_);
    if (i + 1 < num_blocks_) steps += P::steps_of(blocks_[i + 1], key_dim_);
    return steps > 0 ? steps : 1;
  }

  // Which of the scores and weights are block i's.
  static int side_of(int i) { return P::kOverlaps ? i % 2 : 0; }

  template <class Overlap>
  void compute_scores(int i, Overlap& overlap) {
    const RowBlock& block = blocks_[i];
    P::multiply_keys(block, queries_of(block.row), s_.keys, key_dim_,
                     s_.scores + side_of(i) * kScoreFloats, overlap);
  }

  template <class Overlap>
  void add_values(int i, Overlap& overlap) {
    const RowBlock& block = blocks_[i];
    P::multiply_values(block, s_.weights + side_of(i) * P::kWeightFloats, s_.values, value_dim_,
                       s_.output + block.row * value_dim_, overlap);
  }

  void start(int i, Weights<P>& weights, int num_steps) {
    const RowBlock& block = blocks_[i];
    float* scores = s_.scores + side_of(i) * kScoreFloats;
    if constexpr (P::kScalesScores) {
      scale_block(block, key_scales_, s_.units + block.row, scores);
    }
    float factor = query_factor(call_);
    if (call_.softcap != 0) {
      cap_block(block, factor, call_.softcap, scores);
      factor = 1;
    }
    mask_block(call_, task_, block, tile_, num_keys_, scores);
    weights.start(block, s_, side_of(i), value_dim_, factor, num_steps);
  }

  const LayerCall& call_;
  const AttendTask& task_;
  const ManyScratch s_;
  const int key_dim_, value_dim_, num_rows_;
  int64_t tile_ = 0;
  int num_keys_ = 0;  // of the tile
  float key_scales_[P::kScalesScores ? kTileTokens : 1] = {};
  int num_all_ = 0;
  Span positions_[kMaxBlocks];  // of each block's rows
  Span firsts_[kMaxBlocks];     // that its rows see
  bool is_started_[kMaxBlocks] = {};
  int num_blocks_ = 0;  // that see keys of the tile
  RowBlock blocks_[kMaxBlocks];
};

}  // namespace
}  // namespace vtensor::kernels
