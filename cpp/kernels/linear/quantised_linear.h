// QuantisedLinear: linear layers with quantised weights on the CPU, few rows or many.
//
// A weight of 8 or 4 bits is a half or a quarter of the memory that a decode step reads. The inputs
// are made ready once, then threads share the panels out. A row's outputs are the same bits alone,
// among whatever rows, and with any number of threads.
//
// Thread-safety: no state but its settings; any thread may call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/calls/quantised.h"
#include "kernels/isa/choice.h"
#include "kernels/linear/groups.h"
#include "kernels/parallel.h"

namespace vtensor::kernels {

class QuantisedLinear {
 public:
  QuantisedLinear(Parallel parallel, const QuantisedIsa& isa) : parallel_(parallel), isa_(&isa) {}

  const QuantisedIsa& isa() const { return *isa_; }

  // Whether so many columns can be gates and factors.
  static bool has_gates(int64_t columns) { return columns % (2 * kQuantisedColumns) == 0; }

  // output = x weight^T + bias + residual, or of gates and factors, as LinearCall says.
  // REQUIRES: dtype float32 or bfloat16; sizes as QuantisedWeight says; layer.columns a multiple of
  // kHeadDimStep, with gates of what has_gates says; num_threads >= 1; the output overlaps no
  // input.
  // Throws std::bad_alloc where there is no memory for the inputs of some hundred rows.
  void forward(DType dtype, const LinearCall& layer, const QuantisedWeight& weight,
               int64_t num_rows, int num_threads) const;

  // The same for rows in groups, each with a weight of its own: the same bits as a call for each.
  // REQUIRES: a weight for each group, all alike but for their numbers, and biases for each, in
  // place of the layer's; no residual.
  // Throws std::bad_alloc where there is no memory for the inputs of all rows.
  void forward_groups(DType dtype, const LinearCall& layer,
                      const std::vector<QuantisedWeight>& weights, const GroupBiases& biases,
                      const RowGroups& groups, int num_threads) const;

 private:
  Inputs inputs_of(DType dtype, const QuantisedWeight& weight) const;

  Parallel parallel_;
  const QuantisedIsa* isa_;
};

}  // namespace vtensor::kernels
