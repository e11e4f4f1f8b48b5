// Experts: the MLPs of a mixture of experts on the CPU, those of all rows in one call.
//
//   each token, each of its experts:  y = down(activation(gate(x), up(x))), or of up(x) alone
//   a token's output:                 the sum of weight * y over its experts, in their order
//
// The rows that are routed to an expert are one product. A token's output is the same bits alone or
// among others, as products are, and is summed up in float32.
//
// Thread-safety: no state but its settings; any thread may call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/layer/activation.h"
#include "kernels/layer/product.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/quantised_linear.h"
#include "kernels/rows/row_ops.h"

namespace vtensor::kernels {

// One product of each expert; all of one shape, and alike but for their numbers.
class ExpertTable {
 public:
  // Throws std::invalid_argument where they differ.
  explicit ExpertTable(const std::vector<Product>& products);

  size_t num_experts() const { return num_experts_; }
  int64_t depth() const { return depth_; }
  int64_t columns() const { return columns_; }
  // Either is empty.
  const std::vector<const void*>& panels() const { return panels_; }
  const std::vector<QuantisedWeight>& quantised() const { return quantised_; }
  const GroupBiases& biases() const { return biases_; }

 private:
  size_t num_experts_;
  int64_t depth_;
  int64_t columns_;
  std::vector<const void*> panels_;
  std::vector<QuantisedWeight> quantised_;
  GroupBiases biases_;
};

// One step's tokens; all dense.
struct ExpertsCall {
  const void* x = nullptr;           // [tokens, width]
  const int64_t* experts = nullptr;  // [tokens, top_k]; num_experts: none, which adds nothing
  const float* weights = nullptr;    // [tokens, top_k]
  void* output = nullptr;            // [tokens, width]; not x
  int64_t num_tokens = 0;
  int64_t top_k = 0;
  int num_threads = 1;
};

class Experts {
 public:
  // gate_up: one table whose columns are gates, then as many factors, or one for each; without
  // gates one of factors. The others tell instruction sets and threads. REQUIRES: dtype float32 or
  // bfloat16.
  // Throws std::invalid_argument where the tables do not go together.
  Experts(DType dtype, std::vector<ExpertTable> gate_up, ExpertTable down,
          const Activation& activation, const RowOps& row_ops, const Linear& linear,
          const QuantisedLinear& quantised);

  // Throws std::invalid_argument, before anything is computed, for an expert that there is not;
  // std::bad_alloc where there is no memory for what lies between the products.
  void forward(const ExpertsCall& call) const;

 private:
  class Run;

  // Whether the first product gives gated numbers, so that its outputs need no memory.
  bool gates_in_product() const;

  DType dtype_;
  std::vector<ExpertTable> gate_up_;
  ExpertTable down_;
  Activation activation_;
  RowOps row_ops_;
  Linear linear_;
  QuantisedLinear quantised_;
};

}  // namespace vtensor::kernels
