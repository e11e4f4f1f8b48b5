// RowOps: norms, gates and rotary embeddings of a batch on the CPU, split over threads by rows.
//
// Needs no torch: pointers, strides (in elements) and lengths.
//
// Thread-safety: no state but its settings; any thread may call.
#pragma once

#include <cstdint>

#include "kernels/isa/choice.h"
#include "kernels/parallel.h"

namespace vtensor::kernels {

class RowOps {
 public:
  RowOps(Parallel parallel, const Isa& isa) : parallel_(parallel), isa_(&isa) {}

  // REQUIRES, of all six: widths are multiples of kHeadDimStep, for rotate of twice that;
  // num_threads >= 1. Outputs overlap no input, but rotate's and rms_norm's may be their input.
  void rms_norm(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const;
  void silu_mul(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const;
  void clamped_swiglu(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const;
  void gelu_tanh_mul(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const;
  void relu2(DType dtype, const RowCall& call, int64_t num_rows, int num_threads) const;
  void rotate(DType dtype, const RotaryCall& call, int64_t num_tokens, int num_threads) const;

 private:
  template <class Call>
  void run(void (*compute)(const Call&, int64_t, int64_t), const Call& call, int64_t num_rows,
           int64_t row_elements, int num_threads) const;

  Parallel parallel_;
  const Isa* isa_;
};

}  // namespace vtensor::kernels
