// RowSampler: one random token per row of logits on the CPU, by one uniform number per row.
//
// The number is looked up in the cumulative sum of the row's weights, e^(logit / temperature), in
// the order of the token ids. What temperature, min_p, top_k and top_p forbid (in this order, as
// vLLM has it) is each time everything below some logit:
//
//   min_p   below maximum + temperature ln(min_p)
//   top_k   below the k-th largest logit
//   top_p   those which tokens of larger logits precede with at least top_p of what top_k left
//
// so equal logits stay or go together, and a row is a search for one threshold. It needs no sort:
// what can not be kept for sure goes by the maxima of blocks, of the rest a quickselect finds it.
//
// A row's token depends on this row and its numbers alone. Needs no torch.
//
// Thread-safety: no state but its settings; any thread may call.
#pragma once

#include <cstdint>

#include "kernels/isa/choice.h"
#include "kernels/parallel.h"

namespace vtensor::kernels {

class RowSampler {
 public:
  RowSampler(Parallel parallel, const Isa& isa) : parallel_(parallel), isa_(&isa) {}

  // REQUIRES: vocab_size >= 1, num_threads >= 1. Throws std::bad_alloc where there is no scratch.
  void sample(DType dtype, const SampleCall& call, int64_t num_rows, int num_threads) const;

 private:
  Parallel parallel_;
  const Isa* isa_;
};

}  // namespace vtensor::kernels
