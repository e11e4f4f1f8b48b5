// RowCall, RotaryCall: what the row operations of one instruction set are asked to compute.
//
// Plain values, as in kernels/calls/attention.h.
#pragma once

#include <cstdint>

namespace vtensor::kernels {

// Row operations: rows [begin, end) of the call, whatever the other rows' thread. Widths are
// multiples of kHeadDimStep; rows are dense.
struct RowCall {
  const void* x = nullptr;       // [rows, width]
  const void* second = nullptr;  // norm: weight [width]; gate: the factor [rows, width]
  void* output = nullptr;        // [rows, width]
  int64_t x_stride = 0;          // elements between two rows
  int64_t second_stride = 0;
  int64_t width = 0;
  float eps = 0;
  float alpha = 1;  // clamped_swiglu
  float limit = 0;
  bool has_wide_weight = false;  // norm: `second` is float32, and only outputs are rounded
  // Norm: [rows, width], dense, added to what is rounded before; none: nothing is.
  const void* residual = nullptr;
};

// Rotates pairs (j, j + width / 2) of each head of a token by that token's angles (RoFormer, Su et
// al., 2021, in the half-split order of GPT-NeoX and Llama).
struct RotaryCall {
  const void* x = nullptr;    // [num_heads, num_tokens, width]
  const void* cos = nullptr;  // [num_tokens, width], dense
  const void* sin = nullptr;
  void* output = nullptr;  // [num_heads, num_tokens, width]; may be x, with its strides
  int64_t head_stride = 0;
  int64_t token_stride = 0;
  int64_t output_head_stride = 0;
  int64_t output_token_stride = 0;
  int64_t num_heads = 0;
  int64_t width = 0;
};

}  // namespace vtensor::kernels
