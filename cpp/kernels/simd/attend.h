// The attention of one instruction set: a task from its queries to its output, and the merge of
// partial outputs.
#pragma once

#include <type_traits>

#if defined(__AMX_BF16__)
#include "kernels/simd/amx_rows.h"
#endif
#include "kernels/simd/byte_rows.h"
#include "kernels/simd/few_rows.h"
#include "kernels/simd/many_rows.h"
#include "kernels/simd/pair_rows.h"
#include "kernels/simd/rotated_heads.h"
#include "kernels/simd/wide_rows.h"

namespace vtensor::kernels {
namespace {

#if defined(__AMX_BF16__)
// From so many query rows on, AMX pays, which packs keys and values in parts. Few rows of bytes are
// multiplied as they stand.
template <class T, class S>
constexpr int kAmxRowsFrom = 48;
template <class S>
constexpr int kAmxRowsFrom<BFloat16, S> = kHasScale<S> ? kMaxFewRows + 1 : 8;
#endif

template <class T, class S>
inline void load_queries(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  const T* query = static_cast<const T*>(call.query);
  const float factor = query_factor(call);
  float* out = s.query;
  float rotated[kMaxHeadDim];
  for (int i = 0; i < task.num_tokens; ++i) {
    for (int h = 0; h < task.num_heads; ++h) {
      const T* row = query + (task.first_head + h) * call.query_head_stride +
                     task.tokens[i] * call.query_token_stride;
      const auto* x = query_numbers<S>(row, call.key_dim, rotated);
      for (int j = 0; j < call.key_dim; j += kLanes) store(out + j, load(x + j) * factor);
      out += call.key_dim;
    }
  }
}

template <class T>
VTENSOR_INLINE void write_scaled(const LayerCall& call, int token, int head,
                                 const float* accumulated, float factor) {
  T* out = static_cast<T*>(call.output) +
           (static_cast<int64_t>(token) * call.num_heads + head) * call.value_dim;
  for (int i = 0; i < call.value_dim; i += kLanes) store(out + i, load(accumulated + i) * factor);
}

// output = accumulated / sum, with the head's sink in the sum.
template <class T>
inline void write_output(const LayerCall& call, int token, int head, const float* accumulated,
                         float maximum, float sum) {
  if (call.sinks != nullptr) {
    const float sink = call.sinks[head] * kLog2e;
    // Where the sink is the largest score, all other weights shrink by the same factor.
    if (sink > maximum) {
      const float factor = exp2(maximum - sink);
      write_scaled<T>(call, token, head, accumulated, factor / (sum * factor + 1));
      return;
    }
    sum += exp2(sink - maximum);
  }
  write_scaled<T>(call, token, head, accumulated, 1 / sum);
}

// The output of row h of token i of the task, or its partial result.
template <class T>
VTENSOR_INLINE void write_row(const LayerCall& call, const AttendTask& task, int i, int h,
                              const float* accumulated, float maximum, float sum) {
  const int head = task.first_head + h;
  if (task.partial == nullptr) {
    write_output<T>(call, task.tokens[i], head, accumulated, maximum, sum);
    return;
  }
  float* out = task.partial +
               (static_cast<int64_t>(i) * call.num_heads + head) * (call.value_dim + kPartialTail);
  __builtin_memcpy(out, accumulated, static_cast<size_t>(call.value_dim) * sizeof(float));
  out[call.value_dim] = maximum;
  out[call.value_dim + 1] = sum;
}

template <class T>
inline void write_results(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  for (int i = 0; i < task.num_tokens; ++i) {
    for (int h = 0; h < task.num_heads; ++h) {
      const int row = i * task.num_heads + h;
      write_row<T>(call, task, i, h, s.output + row * call.value_dim, s.maximum[row],
                   sum_lanes(load(s.sum + row * kLanes)));
    }
  }
}

// What follows the tile [tile, tile + num_keys) of tasks side by side: their next one, or the first
// one of `later`.
template <class S>
inline NextTile next_tile(const LayerCall& call, const AttendTask* tasks, int num_tasks,
                          const AttendTask* later, int64_t tile, int num_keys) {
  constexpr int64_t kUnit = sizeof(S);
  const bool goes_on = tile + num_keys < tasks[0].end;
  if (!goes_on && later == nullptr) return {};
  const AttendTask& task = goes_on ? tasks[0] : *later;
  const int64_t begin = goes_on ? tile + num_keys : task.begin;
  const int64_t rows = clip(task.end - begin, 0, kFewRowsTile<S>);
  const int64_t steps = int64_t{num_tasks} * num_keys;
  const auto lines = [&](const void* base, int64_t stride, int head_dim, int64_t num_steps) {
    const int row_bytes = head_dim * static_cast<int>(kUnit) + (kHasScale<S> ? kScaleBytes : 0);
    return LinesAhead(static_cast<const char*>(base) + begin * stride * kUnit, stride * kUnit,
                      num_tasks * row_bytes, rows, num_steps);
  };
  return {lines(task.k, task.k_stride, call.key_dim, steps),
          lines(task.v, task.v_stride, call.value_dim, steps * call.value_dim)};
}

// Few rows. Of all tasks one tile, then the next: they read neighbouring memory.
template <class T, class S, class Load, class Tile>
VTENSOR_INLINE void attend_few(const LayerCall& call, const AttendTask* tasks, int num_tasks,
                               const AttendTask* later, float* scratch, const Load& load_rows,
                               const Tile& compute_tile) {
  Scratch s[kMaxSideBySide];
  const int rows = tasks[0].num_tokens * tasks[0].num_heads;
  for (int i = 0; i < num_tasks; ++i) {
    s[i] = from_row(lay_out(scratch, call.key_dim, call.value_dim), i * rows, call.key_dim,
                    call.value_dim);
    load_rows(call, tasks[i], s[i]);
    start_rows(s[i], rows, call.value_dim);
  }
  constexpr int kTile = kFewRowsTile<S>;
  for (int64_t tile = tasks[0].begin; tile < tasks[0].end; tile += kTile) {
    const int64_t left = tasks[0].end - tile;
    const int num_keys = left < kTile ? static_cast<int>(left) : kTile;
    NextTile next = next_tile<S>(call, tasks, num_tasks, later, tile, num_keys);
    for (int i = 0; i < num_tasks; ++i) compute_tile(call, tasks[i], s[i], tile, num_keys, next);
    next.keys.finish();
    next.values.finish();
  }
  for (int i = 0; i < num_tasks; ++i) write_results<T>(call, tasks[i], s[i]);
}

template <class T, class S>
inline void attend_few(const LayerCall& call, const AttendTask* tasks, int num_tasks,
                       const AttendTask* later, float* scratch) {
#if defined(VTENSOR_HAS_PAIRS)
  if constexpr (std::is_same_v<T, BFloat16> && !kHasScale<S>) {
    if (takes_pairs(call)) {
      attend_few<T, S>(call, tasks, num_tasks, later, scratch, copy_queries, few_pair_rows_tile);
      return;
    }
  }
#endif
#if defined(VTENSOR_HAS_BYTES)
  // Not for float32, which 16 bits would not do justice.
  if constexpr (!std::is_same_v<T, float> && std::is_same_v<S, Int8>) {
    if (takes_bytes(call)) {
      attend_few<T, S>(call, tasks, num_tasks, later, scratch, load_byte_queries<T>,
                       few_byte_rows_tile);
      return;
    }
  }
#endif
  attend_few<T, S>(call, tasks, num_tasks, later, scratch, load_queries<T, S>, few_rows_tile<S>);
}

template <class T, class S>
inline bool takes_amx([[maybe_unused]] const LayerCall& call,
                      [[maybe_unused]] const AttendTask& task) {
#if defined(__AMX_BF16__)
  return task.num_tokens * task.num_heads >= kAmxRowsFrom<T, S> && call.key_dim % kAmxDepth == 0 &&
         call.value_dim % kAmxDepth == 0;
#else
  return false;
#endif
}

// Few rows leave most lanes of a product empty.
template <class T, class S>
inline bool are_few(const LayerCall& call, const AttendTask& task) {
  return task.num_tokens * task.num_heads <= kMaxFewRows && !takes_amx<T, S>(call, task);
}

template <class P>
inline void attend_many(const LayerCall& call, const AttendTask& task, float* scratch) {
  ManyRows<P> rows(call, task, scratch);
  rows.attend();
  rows.end_rows([&](int i, int h, const float* accumulated, float maximum, float sum) {
    write_row<typename P::Number>(call, task, i, h, accumulated, maximum, sum);
  });
}

// One task, by the fastest products that this level has for it.
template <class T, class S>
inline void attend_many(const LayerCall& call, const AttendTask& task, float* scratch) {
#if defined(__AMX_BF16__)
  if (takes_amx<T, S>(call, task)) {
    const AmxTiles tiles;
    attend_many<AmxProducts<T, S>>(call, task, scratch);
    return;
  }
#elif defined(VTENSOR_HAS_PAIRS)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (takes_pairs(call)) {
      attend_many<PairProducts<S>>(call, task, scratch);
      return;
    }
  }
#endif
  attend_many<WideProducts<T, S>>(call, task, scratch);
}

// All tasks side by side if their rows are few, else one after the other.
template <class T, class S = T>
void attend(const LayerCall& call, const AttendTask* tasks, int num_tasks, const AttendTask* later,
            float* scratch) {
  if (are_few<T, S>(call, tasks[0])) {
    attend_few<T, S>(call, tasks, num_tasks, later, scratch);
    return;
  }
  for (int i = 0; i < num_tasks; ++i) attend_many<T, S>(call, tasks[i], scratch);
}

// Partial results with maxima m_i, sums l_i and outputs o_i are, with m = max m_i, together
// sum 2^(m_i - m) o_i and sum 2^(m_i - m) l_i (ChunkAttention, equation 2).
template <class T>
void merge(const LayerCall& call, const MergeTask& task) {
  const int64_t stride = call.value_dim + kPartialTail;
  alignas(64) float accumulated[kMaxHeadDim];
  for (int head = task.first_head; head < task.first_head + task.num_heads; ++head) {
    const auto partial_of = [&](int i) {
      return task.partials + (int64_t{task.rows[i]} * call.num_heads + head) * stride;
    };
    float maximum = kMinusInfinity;
    for (int i = 0; i < task.num_rows; ++i) {
      const float candidate = partial_of(i)[call.value_dim];
      if (candidate > maximum) maximum = candidate;
    }
    float sum = 0;
    for (int j = 0; j < call.value_dim; ++j) accumulated[j] = 0;
    for (int i = 0; i < task.num_rows; ++i) {
      const float* partial = partial_of(i);
      const float factor = exp2(partial[call.value_dim] - maximum);
      sum += factor * partial[call.value_dim + 1];
      for (int j = 0; j < call.value_dim; j += kLanes) {
        store(accumulated + j, load(accumulated + j) + load(partial + j) * factor);
      }
    }
    write_output<T>(call, task.token, head, accumulated, maximum, sum);
  }
}

}  // namespace
}  // namespace vtensor::kernels
