// What the attention of one instruction set is asked to compute: one layer call, and one task of
// it.
//
// A task is a block of query rows of one KV head against one contiguous range of keys, on one
// thread. Plain values and pointers; nothing of the standard library, whose inline functions must
// not be compiled for a special instruction set (see simd/vec.h).
#pragma once

#include <cstdint>

namespace vtensor::kernels {

// Query rows of one task, for all of which keys and values are packed once: bounds the scratch of a
// thread. A row is one head of one token.
inline constexpr int kMaxRows = 512;
// Query heads of one KV head that are computed together.
inline constexpr int kMaxBlockHeads = 96;
// Tasks that read neighbouring KV heads of the same tokens, and may be computed in turns.
inline constexpr int kMaxSideBySide = 8;
// Tasks of more query rows are always computed by matrix products; of fewer where AMX multiplies.
inline constexpr int kMaxFewRows = 12;
// Keys that are computed at once.
inline constexpr int kTileTokens = 128;
// The widest keys: DeepSeek's latent of 512 with its rotary key of 64.
inline constexpr int kMaxHeadDim = 576;
// Head sizes must be multiples of this, the floats of the widest vector.
inline constexpr int kHeadDimStep = 16;
// Floats behind the output of a partial row: running maximum, running sum, and room to stay
// aligned.
inline constexpr int kPartialTail = 16;
inline constexpr int64_t kNoWindow = INT64_MAX;  // nor any chunk

// One layer's call, the same for all tasks. Strides count elements.
struct LayerCall {
  const void* query = nullptr;  // [num_heads, num_tokens, key_dim], last dimension dense
  int64_t query_head_stride = 0;
  int64_t query_token_stride = 0;
  void* output = nullptr;  // [num_tokens, num_heads, value_dim], contiguous
  int num_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  float scaling = 1;             // of the scores
  float softcap = 0;             // scores become softcap * tanh(score / softcap); 0: they do not
  const float* sinks = nullptr;  // [num_heads]: a score that has no value; or none
  // [num_tokens] each: the token's place in its request, and the first one that it sees; neither
  // falls from one token of a request to the next.
  const int64_t* positions = nullptr;
  const int64_t* firsts = nullptr;
};

// Query rows against the keys [begin, end) of one slot and one KV head.
struct AttendTask {
  const int32_t* tokens = nullptr;  // rows of the flat batch, positions ascending a request
  int num_tokens = 0;
  int first_head = 0;       // query heads [first_head, first_head + num_heads), all of this KV head
  int num_heads = 0;        // REQUIRES: <= kMaxBlockHeads, num_tokens * num_heads <= kMaxRows
  const void* k = nullptr;  // of the slot's token 0 and this KV head; each row is dense
  const void* v = nullptr;
  int64_t k_stride = 0;  // elements between two tokens
  int64_t v_stride = 0;
  int64_t begin = 0;
  int64_t end = 0;
  // None: the rows see no other keys, write the output. Else: row (i, head) goes, not yet
  // normalised, to partial + (i * call.num_heads + head) * (value_dim + kPartialTail).
  float* partial = nullptr;
};

// The partial results of one token, to be merged by online softmax into its output.
struct MergeTask {
  // Partial row r, all its heads, begins at partials + r * num_heads * (value_dim + kPartialTail).
  const float* partials = nullptr;
  const int32_t* rows = nullptr;  // those of the token
  int num_rows = 0;
  int token = 0;
  int first_head = 0;
  int num_heads = 0;
};

}  // namespace vtensor::kernels
