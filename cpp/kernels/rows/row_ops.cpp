#include "kernels/rows/row_ops.h"

#include <algorithm>

namespace vtensor::kernels {
namespace {

// Fewer elements are computed sooner than another thread wakes.
constexpr int64_t kElementsPerThread = 32 << 10;

}  // namespace

template <class Call>
void RowOps::run(void (*compute)(const Call&, int64_t, int64_t), const Call& call, int64_t num_rows,
                 int64_t row_elements, int num_threads) const {
  const int64_t worth = 1 + num_rows * row_elements / kElementsPerThread;
  const int64_t parts = std::min({worth, int64_t{num_threads}, std::max<int64_t>(num_rows, 1)});
  if (parts <= 1 || !parallel_.can_fork()) {
    compute(call, 0, num_rows);
    return;
  }
  parallel_.share_out(num_rows, parts, parts,
                      [&](int64_t begin, int64_t end) { compute(call, begin, end); });
}

void RowOps::rms_norm(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const {
  run(isa_->rms_norm[static_cast<size_t>(dtype)], call, num_rows, call.width, num_threads);
}

void RowOps::silu_mul(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const {
  run(isa_->silu_mul[static_cast<size_t>(dtype)], call, num_rows, call.width, num_threads);
}

void RowOps::clamped_swiglu(DType dtype, const RowCall& call, int64_t num_rows,
                            int num_threads) const {
  run(isa_->clamped_swiglu[static_cast<size_t>(dtype)], call, num_rows, call.width, num_threads);
}

void RowOps::gelu_tanh_mul(DType dtype, const RowCall& call, int64_t num_rows,
                           int num_threads) const {
  run(isa_->gelu_tanh_mul[static_cast<size_t>(dtype)], call, num_rows, call.width, num_threads);
}

void RowOps::relu2(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const {
  run(isa_->relu2[static_cast<size_t>(dtype)], call, num_rows, call.width, num_threads);
}

void RowOps::rotate(DType dtype, const RotaryCall& call, int64_t num_tokens,
                    int num_threads) const {
  run(isa_->rotate[static_cast<size_t>(dtype)], call, num_tokens, call.num_heads * call.width,
      num_threads);
}

}  // namespace vtensor::kernels
