// make_isa: the table of what simd/*.h compiles to here. Included by each isa/<name>.cpp alone.
#pragma once

#include "kernels/isa/isa.h"
#if defined(__AMX_BF16__)
#include "kernels/simd/amx_linear.h"
#include "kernels/simd/amx_many_linear.h"
#include "kernels/simd/amx_split_linear.h"
#endif
#include "kernels/simd/attend.h"
#include "kernels/simd/linear.h"
#include "kernels/simd/many_linear.h"
#include "kernels/simd/pair_many_linear.h"
#include "kernels/simd/rows.h"
#include "kernels/simd/sampling.h"

namespace vtensor::kernels {
namespace {

constexpr Isa make_isa(const char* name) {
  return {name,
          kLanes,
          {{attend<float>, attend<BFloat16>, attend<Float16>},
           {attend<float, Int8>, attend<BFloat16, Int8>, attend<Float16, Int8>},
           {attend<float, Float8>, attend<BFloat16, Float8>, attend<Float16, Float8>}},
          {merge<float>, merge<BFloat16>, merge<Float16>},
          {{},
           {quantise_key<float, Int8>, quantise_key<BFloat16, Int8>, quantise_key<Float16, Int8>},
           {quantise_key<float, Float8>, quantise_key<BFloat16, Float8>,
            quantise_key<Float16, Float8>}},
          {{},
           {quantise<float, Int8>, quantise<BFloat16, Int8>, quantise<Float16, Int8>},
           {quantise<float, Float8>, quantise<BFloat16, Float8>, quantise<Float16, Float8>}},
          {rms_norm<float>, rms_norm<BFloat16>, rms_norm<Float16>},
          {silu_mul<float>, silu_mul<BFloat16>, silu_mul<Float16>},
          {clamped_swiglu<float>, clamped_swiglu<BFloat16>, clamped_swiglu<Float16>},
          {gelu_tanh_mul<float>, gelu_tanh_mul<BFloat16>, gelu_tanh_mul<Float16>},
          {relu2<float>, relu2<BFloat16>, relu2<Float16>},
          {rotate<float>, rotate<BFloat16>, rotate<Float16>},
          {kPanelColumns<float>, kPanelColumns<BFloat16>, 0},
          {linear<float>, linear<BFloat16>, nullptr},
#if defined(__AMX_BF16__)
          {64, 48, 0},
          {amx_split_linear, amx_many_linear, nullptr},
          {kSplitFloats, 0, 0},
#elif defined(VTENSOR_HAS_PAIRS)
          {kLinearRows, 15, 0},
          {many_linear<float>, pair_many_linear, nullptr},
          {kManyFloats, 0, 0},
#else
          {kLinearRows, kLanes == 16 ? kLinearRows : kLinearRows / 2, 0},
          {many_linear<float>, many_linear<BFloat16>, nullptr},
          {kManyFloats, kManyFloats, 0},
#endif
          {read_row<float>, read_row<BFloat16>, read_row<Float16>},
          weigh};
}

}  // namespace
}  // namespace vtensor::kernels
