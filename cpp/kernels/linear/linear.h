// Linear: linear layers with packed weights on the CPU, for the few rows of a decode step and the
// many of a prefill.
//
// A decode step reads each weight once for a few rows: the packed weight is one stream of memory,
// and all rows are multiplied with a panel of it while it is in the cache. Needs no torch:
// pointers, strides (in elements) and lengths.
//
// Thread-safety: no state but its settings; any thread may call.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/isa/choice.h"
#include "kernels/linear/groups.h"
#include "kernels/parallel.h"

namespace vtensor::kernels {

class Linear {
 public:
  Linear(Parallel parallel, const Isa& isa) : parallel_(parallel), isa_(&isa) {}

  const Isa& isa() const { return *isa_; }
  const Parallel& parallel() const { return parallel_; }

  // REQUIRES: dtype float32 or bfloat16; sizes as LinearCall says; num_threads >= 1; the output
  // overlaps no input; for gates has_gates and kMinManyRows.
  // Throws std::bad_alloc where many rows want scratch memory.
  void forward(DType dtype, const LinearCall& call, int64_t num_rows, int num_threads) const;

  // The same for rows in groups, each with a weight of its own: the same bits as a call for each.
  // REQUIRES: panels and biases for each group, in place of the call's; no residual, no gates.
  void forward_groups(DType dtype, const LinearCall& call, const std::vector<const void*>& panels,
                      const GroupBiases& biases, const RowGroups& groups, int num_threads) const;

  // Outputs of a panel; 0 for float16.
  int panel_columns(DType dtype) const;

  // Whether the Isa has a kernel for a prefill's many rows of such a layer, and one for gates.
  bool has_many_rows(DType dtype, int64_t depth) const;
  bool has_gates(DType dtype, int64_t depth) const;

 private:
  void forward_many(DType dtype, const LinearCall& call, int64_t num_rows, int num_threads) const;

  Parallel parallel_;
  const Isa* isa_;
};

}  // namespace vtensor::kernels
