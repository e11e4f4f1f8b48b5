// The nanobind module flexinfer._kernels: attention and row operations on the CPU, for
// the few Python files that
// tests/py/repo/test_layers.py names.
//
// Addresses come as integers: a layer call then costs less than a microsecond, where converting
// four tensors through DLPack costs several. The Python side has checked dtypes, shapes and dense
// rows.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>

#include "bindings/addresses.h"
#include "bindings/decoder_layer.h"
#include "bindings/experts.h"
#include "bindings/quantised_linear.h"
#include "kernels/attention/attention.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/quantised_linear.h"
#include "kernels/rows/row_ops.h"
#include "kernels/sampling/sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor::kernels {
namespace {

using SegmentArray = nb::ndarray<const int64_t, nb::shape<-1, 4>, nb::c_contig, nb::device::cpu>;
using SharedTuple = std::tuple<int64_t, int64_t, int64_t, std::vector<int64_t>>;

KVFormat format_of(size_t index) {
  if (index >= kNumKVFormats) throw std::invalid_argument("no KV format has this number");
  return static_cast<KVFormat>(index);
}

// The numbers by which Python names the values of an enumeration.
template <size_t kCount>
nb::dict numbers_of(const char* const (&names)[kCount]) {
  nb::dict found;
  for (size_t i = 0; i < kCount; ++i) found[names[i]] = i;
  return found;
}

Plan make_plan(const SegmentArray& segments, const std::vector<SharedTuple>& shared,
               const PlanOptions& options, const std::optional<std::vector<int64_t>>& rows) {
  std::vector<Segment> given(segments.shape(0));
  for (size_t i = 0; i < given.size(); ++i) {
    given[i] = {segments(i, 0), segments(i, 1), segments(i, 2), segments(i, 3)};
  }
  std::vector<SharedRange> ranges;
  ranges.reserve(shared.size());
  for (const auto& [slot, start, end, members] : shared) {
    ranges.push_back({slot, start, end, members});
  }
  return {std::move(given), ranges, options, rows};
}

using StrideTuple = std::tuple<int64_t, int64_t, int64_t>;

Strides strides_of(const StrideTuple& strides) {
  return {std::get<0>(strides), std::get<1>(strides), std::get<2>(strides)};
}

std::vector<std::string> isa_names() {
  std::vector<std::string> names;
  for (const Isa* isa : available_isas()) names.emplace_back(isa->name);
  return names;
}

void bind_plan(nb::module_& m) {
  nb::class_<Plan>(m, "Plan", "What one step's attention consists of, the same for all layers.")
      .def(
          "__init__",
          [](Plan* self, const SegmentArray& segments, const std::vector<SharedTuple>& shared,
             int num_kv_heads, int group, int64_t window, int num_threads, int64_t chunk,
             const std::optional<std::vector<int64_t>>& rows) {
            new (self) Plan(make_plan(segments, shared,
                                      {window, group, num_kv_heads, num_threads, chunk}, rows));
          },
          "segments"_a, "shared"_a, "num_kv_heads"_a, "group"_a, "window"_a = kNoWindow,
          "num_threads"_a = 1, "chunk"_a = kNoWindow, "rows"_a = nb::none(),
          "segments: int64 [n, 4] of slot, row, start, end. shared: (slot, start, end, members) of "
          "each shared range. rows: whose outputs are wanted; None: all. Raises ValueError where "
          "they contradict each other.")
      .def_prop_ro("num_tokens", &Plan::num_tokens);
}

void bind_attention(nb::module_& m) {
  nb::class_<ArenaShape>(m, "ArenaShape",
                         "Shape and strides, in elements, of each layer's K and V.")
      .def(
          "__init__",
          [](ArenaShape* self, size_t dtype, int64_t num_slots, int64_t max_seq_len,
             int num_kv_heads, int key_dim, int value_dim, const StrideTuple& k,
             const StrideTuple& v, size_t format) {
            new (self)
                ArenaShape{dtype_of(dtype), num_slots,     max_seq_len,   num_kv_heads,     key_dim,
                           value_dim,       strides_of(k), strides_of(v), format_of(format)};
          },
          "dtype"_a, "num_slots"_a, "max_seq_len"_a, "num_kv_heads"_a, "key_dim"_a, "value_dim"_a,
          "k_strides"_a, "v_strides"_a, "format"_a = 0,
          "Strides: between slots, tokens and heads. format: one of KV_FORMATS; dtype: what "
          "comes.");
  nb::class_<HostAttention>(m, "HostAttention",
                            "A step's attention over the KV arena, one call per layer.")
      .def(
          "__init__",
          [](HostAttention* self, const ArenaShape& shape,
             const std::vector<std::pair<uintptr_t, uintptr_t>>& layers, uintptr_t start_threads,
             const std::string& isa) {
            std::vector<LayerArena> arenas;
            arenas.reserve(layers.size());
            for (const auto& [k, v] : layers) arenas.push_back({pointer(k), pointer(v)});
            const Parallel parallel(reinterpret_cast<Parallel::Start>(start_threads));
            new (self) HostAttention(shape, std::move(arenas), parallel, find_isa(isa));
          },
          "shape"_a, "layers"_a, "start_threads"_a = 0, "isa"_a = "",
          "layers: addresses of K and V. start_threads: address of GOMP_parallel, 0 for one "
          "thread. "
          "isa: one of available_isas(), or the best. Raises ValueError for an unsupported head "
          "size.")
      .def_prop_ro("isa", [](const HostAttention& self) { return self.isa().name; })
      .def(
          "forward",
          [](HostAttention& self, const Plan& plan, size_t layer, uintptr_t query,
             int64_t query_head_stride, int64_t query_token_stride, uintptr_t key,
             int64_t key_head_stride, int64_t key_token_stride, uintptr_t value,
             int64_t value_head_stride, int64_t value_token_stride, uintptr_t output, float scaling,
             float softcap, uintptr_t sinks) {
            self.forward(plan, layer,
                         {{pointer(query), query_head_stride, query_token_stride},
                          {pointer(key), key_head_stride, key_token_stride},
                          {pointer(value), value_head_stride, value_token_stride},
                          pointer(output),
                          scaling,
                          softcap,
                          pointer<float>(sinks)});
          },
          nb::call_guard<nb::gil_scoped_release>(), "plan"_a, "layer"_a, "query"_a,
          "query_head_stride"_a, "query_token_stride"_a, "key"_a, "key_head_stride"_a,
          "key_token_stride"_a, "value"_a, "value_head_stride"_a, "value_token_stride"_a,
          "output"_a, "scaling"_a, "softcap"_a, "sinks"_a,
          "Store key and value, write the output. Addresses, and strides in elements; key or value "
          "0: "
          "what it would store is there.");
}

// Addresses of gates and factors -> one of the operations that multiply them.
template <void (RowOps::*op)(DType, const RowCall&, int64_t, int) const>
void multiply_gates(const RowOps& self, size_t dtype, uintptr_t x, int64_t x_stride,
                    uintptr_t factor, int64_t factor_stride, uintptr_t output, int64_t num_rows,
                    int64_t width, int num_threads) {
  const RowCall call = {
      pointer(x), pointer(factor), pointer(output), x_stride, factor_stride, width, 0};
  (self.*op)(dtype_of(dtype), call, num_rows, num_threads);
}

void bind_row_ops(nb::module_& m) {
  nb::class_<RowOps>(m, "RowOps", "Operations on the rows of a batch; addresses as integers.")
      .def(
          "__init__",
          [](RowOps* self, uintptr_t start_threads, const std::string& isa) {
            const Parallel parallel(reinterpret_cast<Parallel::Start>(start_threads));
            new (self) RowOps(parallel, find_isa(isa));
          },
          "start_threads"_a = 0, "isa"_a = "")
      .def(
          "rms_norm",
          [](const RowOps& self, size_t dtype, uintptr_t x, int64_t x_stride, uintptr_t weight,
             bool has_wide_weight, uintptr_t output, int64_t num_rows, int64_t width, float eps,
             int num_threads) {
            RowCall call = {pointer(x), pointer(weight), pointer(output), x_stride, 0, width, eps};
            call.has_wide_weight = has_wide_weight;
            self.rms_norm(dtype_of(dtype), call, num_rows, num_threads);
          },
          nb::call_guard<nb::gil_scoped_release>(), "dtype"_a, "x"_a, "x_stride"_a, "weight"_a,
          "has_wide_weight"_a, "output"_a, "num_rows"_a, "width"_a, "eps"_a, "num_threads"_a,
          "has_wide_weight: it is float32, whatever the rows are.")
      .def("silu_mul", &multiply_gates<&RowOps::silu_mul>, nb::call_guard<nb::gil_scoped_release>(),
           "dtype"_a, "x"_a, "x_stride"_a, "factor"_a, "factor_stride"_a, "output"_a, "num_rows"_a,
           "width"_a, "num_threads"_a)
      .def("gelu_tanh_mul", &multiply_gates<&RowOps::gelu_tanh_mul>,
           nb::call_guard<nb::gil_scoped_release>(), "dtype"_a, "x"_a, "x_stride"_a, "factor"_a,
           "factor_stride"_a, "output"_a, "num_rows"_a, "width"_a, "num_threads"_a)
      .def(
          "relu2",
          [](const RowOps& self, size_t dtype, uintptr_t x, int64_t x_stride, uintptr_t output,
             int64_t num_rows, int64_t width, int num_threads) {
            const RowCall call = {pointer(x), nullptr, pointer(output), x_stride, 0, width, 0};
            self.relu2(dtype_of(dtype), call, num_rows, num_threads);
          },
          nb::call_guard<nb::gil_scoped_release>(), "dtype"_a, "x"_a, "x_stride"_a, "output"_a,
          "num_rows"_a, "width"_a, "num_threads"_a)
      .def(
          "rotate",
          [](const RowOps& self, size_t dtype, uintptr_t x, int64_t head_stride,
             int64_t token_stride, uintptr_t cos, uintptr_t sin, uintptr_t output,
             int64_t output_head_stride, int64_t output_token_stride, int64_t num_heads,
             int64_t num_tokens, int64_t width, int num_threads) {
            const RotaryCall call = {
                pointer(x),   pointer(cos),       pointer(sin),        pointer(output), head_stride,
                token_stride, output_head_stride, output_token_stride, num_heads,       width};
            self.rotate(dtype_of(dtype), call, num_tokens, num_threads);
          },
          nb::call_guard<nb::gil_scoped_release>(), "dtype"_a, "x"_a, "head_stride"_a,
          "token_stride"_a, "cos"_a, "sin"_a, "output"_a, "output_head_stride"_a,
          "output_token_stride"_a, "num_heads"_a, "num_tokens"_a, "width"_a, "num_threads"_a);
}

void bind_linear(nb::module_& m) {
  nb::class_<Linear>(m, "Linear", "Linear layers with packed weights; addresses as integers.")
      .def(
          "__init__",
          [](Linear* self, uintptr_t start_threads, const std::string& isa) {
            const Parallel parallel(reinterpret_cast<Parallel::Start>(start_threads));
            new (self) Linear(parallel, find_isa(isa));
          },
          "start_threads"_a = 0, "isa"_a = "")
      .def_prop_ro("isa", [](const Linear& self) { return self.isa().name; })
      .def(
          "panel_columns",
          [](const Linear& self, size_t dtype) { return self.panel_columns(dtype_of(dtype)); },
          "dtype"_a, "Outputs that stand side by side in a packed weight.")
      .def(
          "has_gates",
          [](const Linear& self, size_t dtype, int64_t depth) {
            return self.has_gates(dtype_of(dtype), depth);
          },
          "dtype"_a, "depth"_a, "Whether gates of many rows are computed with their product.")
      .def(
          "forward",
          [](const Linear& self, size_t dtype, uintptr_t x, int64_t x_stride, uintptr_t panels,
             uintptr_t bias, uintptr_t residual, int64_t residual_stride, uintptr_t output,
             int64_t num_rows, int64_t depth, int64_t columns, bool gates, int num_threads) {
            LinearCall call;
            call.x = pointer(x);
            call.x_stride = x_stride;
            call.panels = pointer(panels);
            call.bias = pointer(bias);
            call.residual = pointer(residual);
            call.residual_stride = residual_stride;
            call.output = pointer(output);
            call.output_stride = gates ? columns / 2 : columns;
            call.depth = depth;
            call.columns = columns;
            call.gates = gates;
            self.forward(dtype_of(dtype), call, num_rows, num_threads);
          },
          nb::call_guard<nb::gil_scoped_release>(), "dtype"_a, "x"_a, "x_stride"_a, "panels"_a,
          "bias"_a, "residual"_a, "residual_stride"_a, "output"_a, "num_rows"_a, "depth"_a,
          "columns"_a, "gates"_a, "num_threads"_a,
          "output [num_rows, columns] = x weight^T + bias + residual; bias, residual: 0 for none. "
          "gates: output [num_rows, columns / 2] = silu(first half) * second half, no residual.");
}

std::vector<int64_t> sample(const RowSampler& sampler, size_t dtype, uintptr_t logits,
                            int64_t row_stride, int64_t vocab_size,
                            const std::vector<float>& temperature,
                            const std::vector<int64_t>& top_k, const std::vector<float>& top_p,
                            const std::vector<float>& min_p, const std::vector<double>& uniform,
                            int num_threads) {
  const size_t num_rows = uniform.size();
  if (vocab_size < 1 || temperature.size() != num_rows || top_k.size() != num_rows ||
      top_p.size() != num_rows || min_p.size() != num_rows) {
    throw std::invalid_argument("sampling takes a vocabulary and one parameter of each per row");
  }
  std::vector<int64_t> token_ids(num_rows);
  const SampleCall call = {pointer(logits),    row_stride,     vocab_size,
                           temperature.data(), top_k.data(),   top_p.data(),
                           min_p.data(),       uniform.data(), token_ids.data()};
  const nb::gil_scoped_release unlocked;
  sampler.sample(dtype_of(dtype), call, static_cast<int64_t>(num_rows), num_threads);
  return token_ids;
}

void bind_sampler(nb::module_& m) {
  nb::class_<RowSampler>(m, "RowSampler", "One random token per row of logits.")
      .def(
          "__init__",
          [](RowSampler* self, uintptr_t start_threads, const std::string& isa) {
            const Parallel parallel(reinterpret_cast<Parallel::Start>(start_threads));
            new (self) RowSampler(parallel, find_isa(isa));
          },
          "start_threads"_a = 0, "isa"_a = "")
      .def("sample", &sample, "dtype"_a, "logits"_a, "row_stride"_a, "vocab_size"_a,
           "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "uniform"_a, "num_threads"_a,
           "Token ids; -1 for a row with a NaN, or without a largest finite logit.");
}

}  // namespace

NB_MODULE(_kernels, m) {
  m.doc() = "Attention and row operations on the CPU. Internal; see runtime.kernels.";
  m.def("available_isas", &isa_names, "Instruction sets that this build and this CPU both have.");
  m.attr("DTYPES") = numbers_of(kDTypeNames);
  m.attr("KV_FORMATS") = numbers_of(kKVFormatNames);
  m.attr("SCALE_FORMATS") = numbers_of(kScaleFormatNames);
  m.attr("SCALE_BLOCK") = kScaleBlock;
  m.attr("SCALE_BYTES") = kScaleBytes;
  bind_plan(m);
  bind_attention(m);
  bind_row_ops(m);
  bind_linear(m);
  bind_quantised_linear(m);
  bind_decoder_layer(m);
  bind_experts(m);
  bind_sampler(m);
}

}  // namespace vtensor::kernels
