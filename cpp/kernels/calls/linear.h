// LinearCall, LinearBlock: what the linear layers of one instruction set are asked to compute.
//
// Plain values, as in kernels/calls/attention.h.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"

namespace vtensor::kernels {

// A packed bfloat16 weight holds pairs of inputs, and AMX sums over this many at once.
inline constexpr int kPanelDepth = 32;

// output = x weight^T + bias + residual. Weight [columns, depth] is packed in panels: float32
// [panels, depth, 64], bfloat16 [panels, depth / 2, 32 or 64, 2] (Isa::panel_columns); the last
// panel is filled up with zeros. Rows are dense.
struct LinearCall {
  const void* x = nullptr;         // [rows, depth]
  const void* panels = nullptr;    // aligned to 64 bytes
  const void* bias = nullptr;      // [columns] or none
  const void* residual = nullptr;  // [rows, columns] or none
  void* output = nullptr;          // [rows, columns]
  int64_t x_stride = 0;            // elements between two rows
  int64_t residual_stride = 0;
  int64_t output_stride = 0;
  int64_t depth = 0;    // bfloat16: a multiple of kPanelDepth
  int64_t columns = 0;  // a multiple of kHeadDimStep
  // Outputs are gates, then as many factors (a multiple of a panel of each), and what is written is
  // [rows, columns / 2] of silu(gate) * factor, both rounded before; without residual.
  bool gates = false;
};

// The fewest rows of a layer that linear_many takes on AMX.
inline constexpr int64_t kMinManyRows = 32;

// What LinearBlock needs in addition in float32: the rows and the depth of a block whose parts fit
// in the second-level cache, with those of two panels (simd/amx_split_linear.h).
inline constexpr int64_t kSplitRows = 256;
inline constexpr int64_t kSplitDepth = 512;
// Floats of scratch, aligned to 64 bytes: three bfloat16 numbers for each of float32.
inline constexpr int64_t kSplitFloats = (kSplitRows + 2 * 64) * kSplitDepth * 3 / 2;

// The same where nothing is split: rows of a block, and floats of scratch (simd/many_linear.h).
inline constexpr int64_t kManyRows = 256;
inline constexpr int64_t kManyFloats = 64 * (128 + kManyRows) + 6 * 128;

// Rows [row_begin, row_end) and panels [begin, end) of a linear layer, on one thread.
struct LinearBlock {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

}  // namespace vtensor::kernels
