#include "bindings/decoder_layer.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/activation.h"
#include "bindings/addresses.h"
#include "kernels/layer/decoder_layer.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor::kernels {
namespace {

using NormTuple = std::tuple<uintptr_t, float, bool>;

using AttentionTuple =
    std::tuple<HostAttention*, const Plan*, size_t, bool, float, float, uintptr_t>;

Norm norm_of(const NormTuple& norm) {
  const auto& [weight, eps, is_wide] = norm;
  return {pointer(weight), eps, is_wide};
}

std::vector<DecoderStep> steps_of(const std::vector<const DecoderLayer*>& layers,
                                  const std::vector<AttentionTuple>& attention) {
  if (layers.size() != attention.size()) {
    throw std::invalid_argument("as many layers as calls of attention are wanted");
  }
  std::vector<DecoderStep> steps(layers.size());
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& [kernel, plan, layer, stores, scaling, softcap, sinks] = attention[i];
    steps[i] = {layers[i],
                {kernel, plan, layer, stores, scaling, softcap, pointer<const float>(sinks)}};
  }
  return steps;
}

void bind_product(nb::module_& m) {
  nb::class_<Product>(m, "Product", "A linear layer's weight at addresses: no copy.")
      .def(
          "__init__",
          [](Product* self, uintptr_t panels, const QuantisedWeight* quantised, uintptr_t bias,
             int64_t depth, int64_t columns) {
            new (self)
                Product{pointer(panels), quantised == nullptr ? QuantisedWeight{} : *quantised,
                        pointer(bias), depth, columns};
          },
          nb::kw_only(), "panels"_a, "quantised"_a.none(), "bias"_a, "depth"_a, "columns"_a);
}

}  // namespace

void bind_decoder_layer(nb::module_& m) {
  bind_product(m);
  nb::class_<DecoderLayer>(m, "DecoderLayer", "A decoder layer's weights; addresses as integers.")
      .def(
          "__init__",
          [](DecoderLayer* self, size_t dtype, const RowOps& row_ops, const Linear& linear,
             const QuantisedLinear& quantised, const NormTuple& input_norm,
             const NormTuple& output_norm, const NormTuple& query_norm, const NormTuple& key_norm,
             const NormTuple& attention_norm, const NormTuple& mlp_norm,
             const std::vector<Product>& qkv, const Product& o, const std::vector<Product>& gate_up,
             const Product* down, int num_heads, int num_kv_heads, int head_dim,
             const std::string& activation) {
            const DecoderWeights weights = {norm_of(input_norm),
                                            norm_of(output_norm),
                                            norm_of(query_norm),
                                            norm_of(key_norm),
                                            norm_of(attention_norm),
                                            norm_of(mlp_norm),
                                            qkv,
                                            o,
                                            gate_up,
                                            down == nullptr ? Product{} : *down,
                                            num_heads,
                                            num_kv_heads,
                                            head_dim,
                                            {activation_kind_of(activation)}};
            new (self) DecoderLayer(dtype_of(dtype), weights, row_ops, linear, quantised);
          },
          nb::kw_only(), "dtype"_a, "row_ops"_a, "linear"_a, "quantised"_a, "input_norm"_a,
          "output_norm"_a, "query_norm"_a, "key_norm"_a, "attention_norm"_a, "mlp_norm"_a, "qkv"_a,
          "o"_a, "gate_up"_a, "down"_a.none(), "num_heads"_a, "num_kv_heads"_a, "head_dim"_a,
          "activation"_a,
          "Norms: address of the weight, 0 for none, eps, and whether the weight is float32 "
          "whatever the rows are. Products of a list are as one, their "
          "outputs one after the other. gate_up [] and down None: the layer up to its MLP.");
  m.def(
      "forward_decoder_layers",
      [](const std::vector<const DecoderLayer*>& layers,
         const std::vector<AttentionTuple>& attention, uintptr_t x, uintptr_t cos, uintptr_t sin,
         uintptr_t output, uintptr_t normed, int64_t num_rows, int num_threads) {
        const DecoderCall call = {pointer(x),      pointer(cos), pointer(sin), pointer(output),
                                  pointer(normed), num_rows,     num_threads};
        const std::vector<DecoderStep> steps = steps_of(layers, attention);
        const nb::gil_scoped_release release;
        forward(steps, call);
      },
      "layers"_a, "attention"_a, "x"_a, "cos"_a, "sin"_a, "output"_a, "normed"_a, "num_rows"_a,
      "num_threads"_a,
      "Layers one after the other; attention: kernel, plan, layer, stores, scaling, softcap and "
      "sinks (float32 [num_heads], 0 for none) of each. x [rows, width] -> output [rows, width]; "
      "cos, sin [rows, head_dim]; all dense. Of a "
      "layer up to its MLP output is what the MLP's is added to, normed [rows, width] its input.");
}

}  // namespace vtensor::kernels
