#include "bindings/quantised_linear.h"

#include <nanobind/stl/array.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bindings/addresses.h"
#include "kernels/linear/quantised_linear.h"
#include "kernels/linear/words.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor::kernels {
namespace {

ScaleFormat scale_format_of(size_t index) {
  if (index >= kNumScaleFormats) throw std::invalid_argument("no format of scales has this number");
  return static_cast<ScaleFormat>(index);
}

void bind_weight(nb::module_& m) {
  nb::class_<QuantisedWeight>(m, "QuantisedWeight", "A quantised weight at addresses: no copy.")
      .def(
          "__init__",
          [](QuantisedWeight* self, uintptr_t words, uintptr_t scales, uintptr_t minimums,
             uintptr_t sums, size_t scale_format, bool byte_inputs, int bits, int64_t group,
             int64_t depth, int64_t columns, const std::optional<CodebookNumbers>& codebook,
             float factor_unit, bool rotates_inputs) {
            new (self) QuantisedWeight{pointer<const uint32_t>(words),
                                       pointer<>(scales),
                                       pointer<>(minimums),
                                       pointer<const int32_t>(sums),
                                       scale_format_of(scale_format),
                                       byte_inputs,
                                       bits,
                                       group,
                                       depth,
                                       columns,
                                       codebook ? Codebook(*codebook) : Codebook(),
                                       factor_unit,
                                       rotates_inputs};
            if (!self->has_whole_blocks()) {
              throw std::invalid_argument(
                  "scales in blocks need groups that divide blocks, and inputs that blocks divide");
            }
            if (!self->may_have_codebook()) {
              throw std::invalid_argument("codebooks need 4 bits in groups without minimums");
            }
            if (rotates_inputs && !byte_inputs) {
              throw std::invalid_argument("only inputs that become bytes are rotated");
            }
          },
          nb::kw_only(), "words"_a, "scales"_a, "minimums"_a, "sums"_a, "scale_format"_a,
          "byte_inputs"_a, "bits"_a, "group"_a, "depth"_a, "columns"_a, "codebook"_a.none(),
          "factor_unit"_a, "rotates_inputs"_a = false,
          "scale_format: one of SCALE_FORMATS; codebook: the 16 numbers that 4 bits stand for, or "
          "None. Raises ValueError where they do not go with the sizes.");
}

void bind_linear(nb::module_& m) {
  nb::class_<QuantisedLinear>(m, "QuantisedLinear",
                              "Linear layers with quantised weights; addresses as integers.")
      .def(
          "__init__",
          [](QuantisedLinear* self, uintptr_t start_threads, const std::string& isa) {
            const Parallel parallel(reinterpret_cast<Parallel::Start>(start_threads));
            new (self) QuantisedLinear(parallel, find_quantised(isa));
          },
          "start_threads"_a = 0, "isa"_a = "")
      .def_prop_ro("isa", [](const QuantisedLinear& self) { return self.isa().name; })
      .def_prop_ro("block_rows", [](const QuantisedLinear& self) { return self.isa().block_rows; })
      .def_static("has_gates", &QuantisedLinear::has_gates, "columns"_a,
                  "Whether `forward` can take so many columns for gates and factors.")
      .def(
          "forward",
          [](const QuantisedLinear& self, size_t dtype, const QuantisedWeight& weight, uintptr_t x,
             int64_t x_stride, uintptr_t bias, uintptr_t residual, int64_t residual_stride,
             uintptr_t output, int64_t num_rows, bool gates, int num_threads) {
            LinearCall layer;
            layer.x = pointer(x);
            layer.x_stride = x_stride;
            layer.bias = pointer(bias);
            layer.residual = pointer(residual);
            layer.residual_stride = residual_stride;
            layer.output = pointer(output);
            layer.output_stride = gates ? weight.columns / 2 : weight.columns;
            layer.depth = weight.depth;
            layer.columns = weight.columns;
            layer.gates = gates;
            self.forward(dtype_of(dtype), layer, weight, num_rows, num_threads);
          },
          nb::call_guard<nb::gil_scoped_release>(), "dtype"_a, "weight"_a, "x"_a, "x_stride"_a,
          "bias"_a, "residual"_a, "residual_stride"_a, "output"_a, "num_rows"_a, "gates"_a,
          "num_threads"_a,
          "output [num_rows, columns] = x weight^T + bias + residual; bias, residual: 0 for none. "
          "gates: of columns that has_gates accepts, and without a residual, output [num_rows, "
          "columns / 2] = silu(first half) * second half.");
}

void bind_functions(nb::module_& m) {
  m.def(
      "rotate",
      [](uintptr_t x, int64_t rows, int64_t depth) {
        const auto times_hadamard = find_quantised("").float_inputs.times_hadamard;
        auto* row = pointer<float>(x);
        for (; rows > 0; --rows, row += depth) times_hadamard(row, depth, 1, row);
      },
      nb::call_guard<nb::gil_scoped_release>(), "x"_a, "rows"_a, "depth"_a,
      "x float32 [rows, depth], dense: each row times a Hadamard matrix, as runtime/rotation.py "
      "says.");
  m.def(
      "write_words",
      [](uintptr_t integers, int64_t columns, int64_t depth, int bits, bool from_zero,
         uintptr_t words) {
        return write_words(pointer<const int8_t>(integers), columns, depth, bits, from_zero,
                           pointer<uint32_t>(words));
      },
      nb::call_guard<nb::gil_scoped_release>(), "integers"_a, "columns"_a, "depth"_a, "bits"_a,
      "from_zero"_a, "words"_a,
      "words [panels, steps, words of a step, 64] of integers [columns, depth], from_zero: each "
      "plus 2^(bits - 1). Returns whether all have so many bits.");
  m.def(
      "available_quantised_isas",
      [] {
        std::vector<std::string> names;
        for (const QuantisedIsa* isa : available_quantised()) names.emplace_back(isa->name);
        return names;
      },
      "Levels of the kernels for quantised weights that are here, best last.");
}

}  // namespace

void bind_quantised_linear(nb::module_& m) {
  bind_weight(m);
  bind_linear(m);
  bind_functions(m);
}

}  // namespace vtensor::kernels
