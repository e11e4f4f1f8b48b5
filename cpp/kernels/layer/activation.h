// Activation: what stands between the two products of an MLP.
//
// Thread-safety: a value; any thread may call.
#pragma once

#include <cstdint>

#include "kernels/dtype.h"
#include "kernels/rows/row_ops.h"

namespace vtensor::kernels {

// What the second product of an MLP is given, of the outputs of the first: of gates and as many
// factors, or of factors alone.
struct Activation {
  enum class Kind {
    kSilu,           // silu(gate) * factor
    kGeluTanh,       // gelu(gate) * factor, gelu by tanh
    kClampedSwiglu,  // g * sigmoid(alpha * g) * (1 + clamp(factor, -limit, limit)) of
                     // g = min(gate, limit)
    kRelu2,          // max(factor, 0)^2: there are no gates
  };

  Kind kind = Kind::kSilu;
  float alpha = 1;  // kClampedSwiglu
  float limit = 0;

  bool has_gates() const { return kind != Kind::kRelu2; }

  // Of the first product's outputs, rows of gates and factors as they stand there, or of factors;
  // output: [rows, hidden], dense.
  void apply(const RowOps& ops, DType dtype, const void* outputs, void* output, int64_t hidden,
             int64_t num_rows, int num_threads) const;
};

}  // namespace vtensor::kernels
