#include "kernels/linear/quantised_linear.h"

#include <algorithm>

#include "kernels/linear/inputs.h"

namespace vtensor::kernels {
namespace {

// Fewer multiplications are done sooner than another thread wakes.
constexpr int64_t kWorkPerThread = 128 << 10;
constexpr int64_t kPartsPerThread = 4;

// nullptr where there is none.
QuantisedIsa::Multiply kernel_for(const QuantisedIsa& isa, const QuantisedWeight& weight,
                                  Inputs inputs) {
  if (weight.group == 0) return isa.multiply_outputs;
  const auto i = static_cast<size_t>(inputs);
  if (weight.bits == 4) return isa.multiply_4_bits[static_cast<size_t>(weight.codebook.kind())][i];
  return weight.bits == 6 ? isa.multiply_6_bits[i] : isa.multiply_8_bits[i];
}

// Panels that threads draw: with gates those of the gates, each with the one of its factors.
int64_t drawn_panels(const LinearCall& layer) {
  const int64_t num_panels = (layer.columns + kQuantisedColumns - 1) / kQuantisedColumns;
  return layer.gates ? num_panels / 2 : num_panels;
}

// Rows [0, num_rows) of what was drawn.
void compute_drawn(QuantisedIsa::Multiply compute, const QuantisedCall& call, DType dtype,
                   int64_t num_rows, int64_t begin, int64_t end) {
  compute(call, dtype, {0, num_rows, begin, end});
  if (!call.layer.gates) return;
  const int64_t num_gates = drawn_panels(call.layer);
  compute(call, dtype, {0, num_rows, num_gates + begin, num_gates + end});
}

// `call` for the rows from `row` on. Kernels may compute rows of a block twice, and so must see
// none of another group before its first.
QuantisedCall rows_from(QuantisedCall call, int64_t row, int64_t element_bytes) {
  const int64_t first_sum = row * call.weight.num_groups(), first_piece = row * call.num_pieces;
  call.inputs = static_cast<const char*>(call.inputs) + row * call.input_stride;
  if (call.x_scales != nullptr) call.x_scales += row * call.num_scales();
  if (call.x_sums != nullptr) call.x_sums += first_sum;
  if (call.x_offsets != nullptr) call.x_offsets += first_piece;
  call.layer.output =
      static_cast<char*>(call.layer.output) + row * call.layer.output_stride * element_bytes;
  return call;
}

}  // namespace

Inputs QuantisedLinear::inputs_of(DType dtype, const QuantisedWeight& weight) const {
  if (weight.byte_inputs) return Inputs::kBytes;
  // Not for float32, which 16 bits would not do justice.
  if (dtype == DType::kBFloat16) {
    for (const Inputs pairs : {Inputs::kBFloat16s, Inputs::kInt16s}) {
      if (kernel_for(*isa_, weight, pairs) != nullptr) return pairs;
    }
  }
  return Inputs::kFloats;
}

void QuantisedLinear::forward(DType dtype, const LinearCall& layer, const QuantisedWeight& weight,
                              int64_t num_rows, int num_threads) const {
  if (num_rows <= 0) return;
  const Inputs kind = inputs_of(dtype, weight);
  const auto compute = kernel_for(*isa_, weight, kind);
  const int64_t num_panels = drawn_panels(layer);
  const int64_t block_rows = isa_->block_rows;
  PreparedInputs inputs(kind, dtype, weight, std::min(num_rows, block_rows), *isa_);
  const auto bytes = static_cast<int64_t>(element_bytes(dtype));
  for (int64_t first = 0; first < num_rows; first += block_rows) {
    const int64_t rows = std::min(block_rows, num_rows - first);
    QuantisedCall call;
    call.layer = layer;
    call.weight = weight;
    inputs.prepare(parallel_, num_threads, first, rows, call);
    call.layer.output = static_cast<char*>(layer.output) + first * layer.output_stride * bytes;
    if (layer.residual != nullptr) {
      call.layer.residual =
          static_cast<const char*>(layer.residual) + first * layer.residual_stride * bytes;
    }
    const int64_t threads = parallel_.can_fork() ? num_threads : 1;
    const int64_t worth = 1 + rows * layer.depth * layer.columns / kWorkPerThread;
    const int64_t parts = std::min({worth, kPartsPerThread * threads, num_panels});
    parallel_.share_out(num_panels, parts, threads, [&](int64_t begin, int64_t end) {
      compute_drawn(compute, call, dtype, rows, begin, end);
    });
  }
}

void QuantisedLinear::forward_groups(DType dtype, const LinearCall& layer,
                                     const std::vector<QuantisedWeight>& weights,
                                     const GroupBiases& biases, const RowGroups& groups,
                                     int num_threads) const {
  const int64_t num_rows = groups.num_rows();
  if (num_rows <= 0) return;
  std::vector<size_t> used;
  for (size_t i = 0; i < groups.count(); ++i) {
    if (groups.rows(i) > 0) used.push_back(i);
  }
  const Inputs kind = inputs_of(dtype, weights[0]);
  const auto compute = kernel_for(*isa_, weights[0], kind);
  PreparedInputs inputs(kind, dtype, weights[0], num_rows, *isa_);
  QuantisedCall all;
  all.layer = layer;
  all.weight = weights[0];
  inputs.prepare(parallel_, num_threads, 0, num_rows, all);
  const auto bytes = static_cast<int64_t>(element_bytes(dtype));
  const auto multiply = [&](size_t group, int64_t begin, int64_t end) {
    const int64_t last = groups.ends[group];
    for (int64_t row = groups.begin(group); row < last; row += isa_->block_rows) {
      QuantisedCall call = rows_from(all, row, bytes);
      call.weight = weights[group];
      call.layer.bias = bias_of(biases, group);
      compute_drawn(compute, call, dtype, std::min(isa_->block_rows, last - row), begin, end);
    }
  };
  const int64_t worth = 1 + num_rows * layer.depth * layer.columns / kWorkPerThread;
  for_panels(parallel_, num_threads, worth, used, drawn_panels(layer), multiply);
}

}  // namespace vtensor::kernels
