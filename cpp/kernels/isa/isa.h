// Isa: the kernels compiled for one instruction set, as a table of functions.
//
// One source, simd/*.h, is compiled once per instruction set (<name>.cpp). Nothing of the
// standard library here: its inline functions must not be compiled for a special instruction set
// (simd/vec.h). Which one runs is choice.h's business.
//
// Thread-safety: no state.
#pragma once

#include "kernels/calls/attention.h"
#include "kernels/calls/linear.h"
#include "kernels/calls/rows.h"
#include "kernels/calls/sampling.h"
#include "kernels/dtype.h"

namespace vtensor::kernels {

struct Isa {
  const char* name;
  int lanes;  // floats in a vector
  // Up to kMaxSideBySide tasks that differ in their KV head alone, with rows side by side. `later`
  // is the first one of those that this thread computes next: its keys are asked for. None: that
  // is not known. By DType, of KV by KVFormat too.
  // `scratch` holds scratch_floats(key_dim, value_dim) floats, aligned to 64 bytes, any contents.
  void (*attend[kNumKVFormats][kNumDTypes])(const LayerCall&, const AttendTask* tasks,
                                            int num_tasks, const AttendTask* later, float* scratch);
  void (*merge[kNumDTypes])(const LayerCall&, const MergeTask&);
  // `width` numbers of a head's key or value as they stand; none for plain KV.
  using Quantise = void (*)(const void* numbers, void* row, int width);
  Quantise quantise_key[kNumKVFormats][kNumDTypes];
  Quantise quantise_value[kNumKVFormats][kNumDTypes];
  // Rows or tokens [begin, end).
  void (*rms_norm[kNumDTypes])(const RowCall&, int64_t begin, int64_t end);
  void (*silu_mul[kNumDTypes])(const RowCall&, int64_t begin, int64_t end);
  void (*clamped_swiglu[kNumDTypes])(const RowCall&, int64_t begin, int64_t end);
  void (*gelu_tanh_mul[kNumDTypes])(const RowCall&, int64_t begin, int64_t end);
  void (*relu2[kNumDTypes])(const RowCall&, int64_t begin, int64_t end);
  void (*rotate[kNumDTypes])(const RotaryCall&, int64_t begin, int64_t end);
  // Outputs that stand side by side in the packed weight of a linear layer.
  int panel_columns[kNumDTypes];
  // Panels [begin, end), for all rows. None for float16.
  void (*linear[kNumDTypes])(const LinearCall&, int64_t num_rows, int64_t begin, int64_t end);
  // Up to so many rows `linear` is faster than `linear_many`.
  int64_t max_few_rows[kNumDTypes];
  // With a depth that is a multiple of kPanelDepth; on AMX for at least kMinManyRows rows, and in
  // float32 without gates. `scratch`: many_floats, aligned to 64 bytes.
  void (*linear_many[kNumDTypes])(const LinearCall&, const LinearBlock&, float* scratch);
  int64_t many_floats[kNumDTypes];
  // The maxima of a row's blocks (kSampleBlock), and its values as float32 if they are not; false
  // for a NaN.
  bool (*read_row[kNumDTypes])(const void* row, int64_t num_values, float* values,
                               float* block_max);
  void (*weigh)(const WeighCall&);
};

// One for each isa/<name>.cpp; none where the compiler's target has no such instructions.
const Isa* portable_isa();
const Isa* avx2_isa();
const Isa* avx512_isa();
const Isa* avx512_vnni_isa();
const Isa* avx512_bf16_isa();
const Isa* amx_isa();

}  // namespace vtensor::kernels
