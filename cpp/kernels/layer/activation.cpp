#include "kernels/layer/activation.h"

namespace vtensor::kernels {

void Activation::apply(const RowOps& ops, DType dtype, const void* outputs, void* output,
                       int64_t hidden, int64_t num_rows, int num_threads) const {
  const auto bytes = static_cast<int64_t>(element_bytes(dtype));
  RowCall call;
  call.x = outputs;
  call.x_stride = call.second_stride = has_gates() ? 2 * hidden : hidden;
  call.second = has_gates() ? static_cast<const char*>(outputs) + hidden * bytes : nullptr;
  call.output = output;
  call.width = hidden;
  call.alpha = alpha;
  call.limit = limit;
  switch (kind) {
    case Kind::kSilu:
      return ops.silu_mul(dtype, call, num_rows, num_threads);
    case Kind::kGeluTanh:
      return ops.gelu_tanh_mul(dtype, call, num_rows, num_threads);
    case Kind::kClampedSwiglu:
      return ops.clamped_swiglu(dtype, call, num_rows, num_threads);
    case Kind::kRelu2:
      return ops.relu2(dtype, call, num_rows, num_threads);
  }
}

}  // namespace vtensor::kernels
