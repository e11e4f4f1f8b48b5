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

namespace vtensor::kernels {
namespace {

// From so many query rows on, transposing the keys pays.
constexpr int kManyRows = 8;
#if defined(__AMX_BF16__)
// From so many on, AMX does, which packs keys and values in parts.
template <class T>
constexpr int kAmxRowsFrom = 48;
template <>
constexpr int kAmxRowsFrom<BFloat16> = kManyRows;
#endif

template <class T>
inline void load_queries(const LayerCall& call, const AttendTask& task, const Scratch& s) {
  const T* query = static_cast<const T*>(call.query);
  const float factor = query_factor(call);
  float* out = s.query;
  for (int i = 0; i < task.num_tokens; ++i) {
    for (int h = 0; h < task.num_heads; ++h) {
      const T* row = query + (task.first_head + h) * call.query_head_stride +
                     task.tokens[i] * call.query_token_stride;
      for (int j = 0; j < call.key_dim; j += kLanes) store(out + j, load(row + j) * factor);
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

// Of all tasks one tile, then the next: they read neighbouring memory.
template <class T, int kTokens, class Load, class Tile>
VTENSOR_INLINE void attend_tiles(const LayerCall& call, const AttendTask* tasks, int num_tasks,
                                 const Scratch& scratch, const Load& load_rows,
                                 const Tile& compute_tile) {
  Scratch s[kMaxSideBySide];
  const int rows = tasks[0].num_tokens * tasks[0].num_heads;
  for (int i = 0; i < num_tasks; ++i) {
    s[i] = from_row(scratch, i * rows, call.key_dim, call.value_dim);
    load_rows(call, tasks[i], s[i]);
    start_rows(s[i], rows, call.value_dim);
  }
  for (int64_t tile = tasks[0].begin; tile < tasks[0].end; tile += kTokens) {
    const int64_t left = tasks[0].end - tile;
    const int num_keys = left < kTokens ? static_cast<int>(left) : kTokens;
    for (int i = 0; i < num_tasks; ++i) compute_tile(call, tasks[i], s[i], tile, num_keys);
  }
  for (int i = 0; i < num_tasks; ++i) write_results<T>(call, tasks[i], s[i]);
}

// All tasks side by side if their rows are few, else one after the other.
template <class T, class Load, class Few, class Many>
VTENSOR_INLINE void attend_rows(const LayerCall& call, const AttendTask* tasks, int num_tasks,
                                const Scratch& s, const Load& load_rows, const Few& few_tile,
                                const Many& many_tile) {
  if (tasks[0].num_tokens * tasks[0].num_heads < kManyRows) {
    attend_tiles<T, kFewRowsTile>(call, tasks, num_tasks, s, load_rows, few_tile);
    return;
  }
  for (int i = 0; i < num_tasks; ++i) {
    attend_tiles<T, kTileTokens>(call, tasks + i, 1, s, load_rows, many_tile);
  }
}

// Up to num_tokens tokens of a task, from `first` on, and the keys that they see.
inline AttendTask part_of(const LayerCall& call, const AttendTask& task, int first,
                          int num_tokens) {
  AttendTask part = task;
  part.tokens += first;
  part.num_tokens = task.num_tokens - first < num_tokens ? task.num_tokens - first : num_tokens;
  if (part.partial != nullptr) {
    part.partial += static_cast<int64_t>(first) * call.num_heads * (call.value_dim + kPartialTail);
  }
  int64_t begin = task.end, end = task.begin;
  for (int i = 0; i < part.num_tokens; ++i) {
    const int64_t position = call.positions[part.tokens[i]];
    const int64_t visible = call.firsts[part.tokens[i]];
    begin = visible < begin ? visible : begin;
    end = position + 1 > end ? position + 1 : end;
  }
  part.begin = begin > task.begin ? begin : task.begin;
  part.end = end < task.end ? end : task.end;
  return part;
}

// Tasks with more rows than fit the first-level cache go part by part. KV stands as S.
template <class T, class S>
inline void attend_in_cache(const LayerCall& call, const AttendTask* tasks, int num_tasks,
                            float* scratch) {
  const Scratch s = lay_out(scratch, call.key_dim, call.value_dim);
  const int part_tokens = kPartRows > tasks[0].num_heads ? kPartRows / tasks[0].num_heads : 1;
  for (int first = 0; first < tasks[0].num_tokens; first += part_tokens) {
    AttendTask parts[kMaxSideBySide];
    for (int i = 0; i < num_tasks; ++i) parts[i] = part_of(call, tasks[i], first, part_tokens);
#if defined(VTENSOR_HAS_PAIRS)
    if constexpr (std::is_same_v<T, BFloat16> && !kHasScale<S>) {
      if (takes_pairs(call, parts[0])) {
        attend_rows<T>(call, parts, num_tasks, s, copy_queries, few_pair_rows_tile,
                       many_pair_rows_tile);
        continue;
      }
    }
#endif
#if defined(VTENSOR_HAS_BYTES)
    // Not for float32, which 16 bits would not do justice.
    if constexpr (!std::is_same_v<T, float> && std::is_same_v<S, Int8>) {
      if (parts[0].num_tokens * parts[0].num_heads < kManyRows && takes_bytes(call)) {
        attend_tiles<T, kFewRowsTile>(call, parts, num_tasks, s, load_byte_queries<T>,
                                      few_byte_rows_tile);
        continue;
      }
    }
#endif
    attend_rows<T>(call, parts, num_tasks, s, load_queries<T>, few_rows_tile<S>, many_rows_tile<S>);
  }
}

#if defined(__AMX_BF16__)
template <class T>
inline void attend_amx(const LayerCall& call, const AttendTask& task, float* scratch) {
  const AmxScratch s = lay_out_amx<T>(scratch, call.key_dim, call.value_dim);
  const AmxTiles tiles;
  amx_start_rows<T>(call, task, s);
  AmxTask<T>(call, task, s).attend();
  amx_end_rows(task.num_tokens * task.num_heads, call.value_dim, s,
               [&](int row, const float* accumulated, float maximum, float sum) {
                 write_row<T>(call, task, row / task.num_heads, row % task.num_heads, accumulated,
                              maximum, sum);
               });
}
#endif

template <class T, class S = T>
void attend(const LayerCall& call, const AttendTask* tasks, int num_tasks, float* scratch) {
#if defined(__AMX_BF16__)
  if constexpr (!kHasScale<S>) {  // quantised KV has no tiles yet: nothing here could run them
    if (tasks[0].num_tokens * tasks[0].num_heads >= kAmxRowsFrom<T> &&
        call.key_dim % kAmxDepth == 0 && call.value_dim % kAmxDepth == 0) {
      for (int i = 0; i < num_tasks; ++i) attend_amx<T>(call, tasks[i], scratch);
      return;
    }
  }
#endif
  attend_in_cache<T, S>(call, tasks, num_tasks, scratch);
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
