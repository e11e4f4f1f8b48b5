// SampleCall: what sampling is asked to do; WeighCall: what one instruction set does of it.
//
// Plain values, as in kernels/calls/attention.h.
#pragma once

#include <cstdint>

namespace vtensor::kernels {

// Tokens of a row whose maximum and whose sum of weights are kept.
inline constexpr int64_t kSampleBlock = 128;

// One token for each row of the logits. What is not finite in the pointers' values is refused by
// the caller; arrays have an entry per row.
struct SampleCall {
  const void* logits = nullptr;  // [rows, vocab_size], the last dimension dense
  int64_t row_stride = 0;        // elements
  int64_t vocab_size = 0;
  const float* temperature = nullptr;  // 0: the first of the largest logits
  const int64_t* top_k = nullptr;      // < 1: all
  const float* top_p = nullptr;        // 1: all
  const float* min_p = nullptr;        // 0: all
  const double* uniform = nullptr;     // [0, 1)
  int64_t* token_id = nullptr;         // out; -1: a NaN, or no largest finite logit
};

// weight = value < threshold ? 0 : 2^((value - maximum) scale), for each value.
struct WeighCall {
  const float* values = nullptr;     // [num_values]
  const float* block_max = nullptr;  // [blocks]; blocks below the threshold are passed over
  float* weights = nullptr;          // [blocks, kSampleBlock], undefined where passed over; or none
  float* block_sums = nullptr;       // [blocks]; 0 where passed over
  int64_t num_values = 0;
  float maximum = 0;
  float scale = 0;
  float threshold = 0;  // above minus infinity
};

}  // namespace vtensor::kernels
