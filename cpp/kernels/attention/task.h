// What a SIMD level is asked to compute: one layer call, and one task of it.
//
// A task is a block of query rows of one KV head against one contiguous range of keys, on one
// thread. Plain values and pointers; nothing of the standard library, whose inline functions must
// not be compiled for a special instruction set (see simd/vec.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

namespace vtensor::kernels {

// Query rows of one task: bounds the scratch of a thread. A row is one head of one token. AMX packs
// keys and values once for all of them, others take as many at once as fit the first-level cache.
inline constexpr int kMaxRows = 512;
inline constexpr int kPartRows = 96;
// Keys that are computed at once.
inline constexpr int kTileTokens = 128;
inline constexpr int kMaxHeadDim = 256;
// Head sizes must be multiples of this, the widest level's floats in a vector.
inline constexpr int kHeadDimStep = 16;
// Floats behind the output of a partial row: running maximum, running sum, and room to stay
// aligned.
inline constexpr int kPartialTail = 16;
inline constexpr int64_t kNoWindow = INT64_MAX;

// One layer's call, the same for all tasks. Strides count elements.
struct LayerCall {
  const void* query = nullptr;  // [num_heads, num_tokens, head_dim], last dimension dense
  int64_t query_head_stride = 0;
  int64_t query_token_stride = 0;
  void* output = nullptr;  // [num_tokens, num_heads, head_dim], contiguous
  int num_heads = 0;
  int head_dim = 0;
  float scaling = 1;             // of the scores
  float softcap = 0;             // scores become softcap * tanh(score / softcap); 0: they do not
  const float* sinks = nullptr;  // [num_heads]: a score that has no value; or none
  int64_t window = kNoWindow;    // a token sees itself and the window - 1 tokens before it
  const int64_t* positions = nullptr;  // [num_tokens] of each token in its request
};

// Query rows against the keys [begin, end) of one slot and one KV head.
struct AttendTask {
  const int32_t* tokens = nullptr;  // rows of the flat batch, positions ascending a request
  int num_tokens = 0;
  int first_head = 0;       // query heads [first_head, first_head + num_heads), all of this KV head
  int num_heads = 0;        // REQUIRES: <= kPartRows, num_tokens * num_heads <= kMaxRows
  const void* k = nullptr;  // of the slot's token 0 and this KV head; each row is dense
  const void* v = nullptr;
  int64_t token_stride = 0;  // elements between two tokens
  int64_t begin = 0;
  int64_t end = 0;
  // None: the rows see no other keys, write the output. Else: row (i, head) goes, not yet
  // normalised, to partial + (i * call.num_heads + head) * (head_dim + kPartialTail).
  float* partial = nullptr;
};

// The partial results of one token, to be merged by online softmax into its output.
struct MergeTask {
  // Partial row r, all its heads, begins at partials + r * num_heads * (head_dim + kPartialTail).
  const float* partials = nullptr;
  const int32_t* rows = nullptr;  // those of the token
  int num_rows = 0;
  int token = 0;
  int first_head = 0;
  int num_heads = 0;
};

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

// A packed bfloat16 weight holds pairs of inputs, and AMX sums over this many at once.
inline constexpr int kPanelDepth = 32;

// Outputs of a linear layer that stand side by side in its packed weight.
constexpr int panel_columns(DType dtype) { return dtype == DType::kFloat32 ? 64 : 32; }

// output = x weight^T + bias + residual. Weight [columns, depth] is packed in panels, as oneDNN
// packs it: float32 [panels, depth, 64], bfloat16 [panels, depth / 2, 32, 2]; the last panel is
// filled up with zeros. Rows are dense.
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

// The fewest rows of a layer that linear_many takes.
inline constexpr int64_t kMinManyRows = 32;

// What LinearBlock needs beside in float32: the rows and the depth of a block whose parts fit in
// the second-level cache, with those of two panels (simd/amx_split_linear.h).
inline constexpr int64_t kSplitRows = 256;
inline constexpr int64_t kSplitDepth = 512;
// Floats of scratch, aligned to 64 bytes: three bfloat16 numbers for each of float32.
inline constexpr int64_t kSplitFloats = (kSplitRows + 2 * 64) * kSplitDepth * 3 / 2;

// Rows [row_begin, row_end) and panels [begin, end) of a linear layer, on one thread.
struct LinearBlock {
  int64_t row_begin = 0;
  int64_t row_end = 0;
  int64_t begin = 0;
  int64_t end = 0;
};

// The kernel compiled for one instruction set. No state.
struct Level {
  const char* name;
  int lanes;  // floats in a vector
  // By DType. `scratch` holds scratch_floats(head_dim) floats, aligned to 64 bytes, any contents.
  void (*attend[kNumDTypes])(const LayerCall&, const AttendTask&, float* scratch);
  void (*merge[kNumDTypes])(const LayerCall&, const MergeTask&);
  // Rows or tokens [begin, end).
  void (*rms_norm[kNumDTypes])(const RowCall&, int64_t begin, int64_t end);
  void (*silu_mul[kNumDTypes])(const RowCall&, int64_t begin, int64_t end);
  void (*rotate[kNumDTypes])(const RotaryCall&, int64_t begin, int64_t end);
  // Panels [begin, end), for all rows. None for float16.
  void (*linear[kNumDTypes])(const LinearCall&, int64_t num_rows, int64_t begin, int64_t end);
  // For at least kMinManyRows rows on AMX, with a depth that is a multiple of kPanelDepth, else
  // none. `scratch`: kSplitFloats in float32, none in bfloat16. Gates: in bfloat16.
  void (*linear_many[kNumDTypes])(const LinearCall&, const LinearBlock&, float* scratch);
};

// One for each level_<name>.cpp; none where the compiler's target has no such instructions.
const Level* portable_level();
const Level* avx2_level();
const Level* avx512_level();
const Level* amx_level();

}  // namespace vtensor::kernels
