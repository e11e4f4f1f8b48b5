#include "bindings/experts.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <utility>
#include <vector>

#include "bindings/activation.h"
#include "bindings/addresses.h"
#include "kernels/layer/experts.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor::kernels {
namespace {}  // namespace

void bind_experts(nb::module_& m) {
  nb::class_<Experts>(m, "Experts", "A mixture of experts in one call; addresses as integers.")
      .def(
          "__init__",
          [](Experts* self, size_t dtype, const RowOps& row_ops, const Linear& linear,
             const QuantisedLinear& quantised, const std::vector<std::vector<Product>>& gate_up,
             const std::vector<Product>& down, const std::string& activation, float alpha,
             float limit) {
            std::vector<ExpertTable> tables;
            tables.reserve(gate_up.size());
            for (const auto& products : gate_up) tables.emplace_back(products);
            new (self)
                Experts(dtype_of(dtype), std::move(tables), ExpertTable(down),
                        {activation_kind_of(activation), alpha, limit}, row_ops, linear, quantised);
          },
          nb::kw_only(), "dtype"_a, "row_ops"_a, "linear"_a, "quantised"_a, "gate_up"_a, "down"_a,
          "activation"_a = "silu", "alpha"_a = 1.0F, "limit"_a = 0.0F,
          "gate_up: of each expert gates and factors together, or all gates, then all factors; "
          "factors alone for relu2. activation: silu, gelu_tanh or clamped_swiglu of gates, times "
          "factors; or relu2. alpha, limit: of clamped_swiglu. Raises ValueError where they do not "
          "go together.")
      .def(
          "forward",
          [](const Experts& self, uintptr_t x, uintptr_t experts, uintptr_t weights,
             uintptr_t output, int64_t num_tokens, int64_t top_k, int num_threads) {
            self.forward({pointer(x), pointer<const int64_t>(experts),
                          pointer<const float>(weights), pointer(output), num_tokens, top_k,
                          num_threads});
          },
          nb::call_guard<nb::gil_scoped_release>(), "x"_a, "experts"_a, "weights"_a, "output"_a,
          "num_tokens"_a, "top_k"_a, "num_threads"_a,
          "output [tokens, width] of x [tokens, width], experts int64 and weights float32 [tokens, "
          "top_k]; all dense. Raises ValueError for an expert that there is not.");
}

}  // namespace vtensor::kernels
