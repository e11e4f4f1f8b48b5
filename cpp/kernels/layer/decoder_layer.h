// DecoderLayer: decoder layers of Llama's kind on the CPU in one call, for the rows of a decode
// step.
//
//   x -> norm -> q, k, v -> rotated -> attention -> o + x = y -> norm -> gate, up -> silu -> down +
//   y
//
// or with a norm behind o and down, too, before something is added (sandwich normalisation, Ding et
// al., 2021: Gemma 2 and 3), and with gelu.
//
// Of a layer whose MLP is something else, a mixture of experts, it is the part before: y, and the
// MLP's input.
//
// The same kernels in the same order as a call for each of them, so the same bits; what falls away
// is the caller's time between them, which is a tenth of a decode step of one row.
//
// Thread-safety: no state but its settings; one forward() at a time for each HostAttention.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/layer/activation.h"
#include "kernels/layer/product.h"
#include "kernels/linear/linear.h"
#include "kernels/linear/quantised_linear.h"
#include "kernels/rows/row_ops.h"

namespace vtensor::kernels {

// No weight: there is no such norm.
struct Norm {
  const void* weight = nullptr;  // [width]
  float eps = 0;
  bool is_wide = false;  // its weight is float32, as RowCall says
};

// Several products are as one, their outputs one after the other: weights of other formats.
struct DecoderWeights {
  Norm input_norm;
  Norm output_norm;  // before the MLP
  Norm query_norm;   // of each head
  Norm key_norm;
  Norm attention_norm;           // of what attention gives, before x is added; with an MLP alone
  Norm mlp_norm;                 // of what the MLP gives, before y is added
  std::vector<Product> qkv;      // columns: queries, keys, values, head by head
  Product o;                     // residual added
  std::vector<Product> gate_up;  // columns: gates, then as many factors; none: there is no MLP here
  Product down;                  // residual added
  int num_heads = 0;
  int num_kv_heads = 0;
  int head_dim = 0;       // a multiple of 2 * kHeadDimStep
  Activation activation;  // of the MLP, with gates
};

// One step's rows; all dense, of one dtype.
struct DecoderCall {
  const void* x = nullptr;    // [rows, width]
  const void* cos = nullptr;  // [rows, head_dim]
  const void* sin = nullptr;
  void* output = nullptr;  // [rows, width]; may be x where there is an MLP, else y
  void* normed = nullptr;  // [rows, width]; without an MLP: its input
  int64_t num_rows = 0;    // those of the plan, then padding
  int num_threads = 1;
};

// How it attends; scaling, softcap and sinks as in LayerInputs.
struct DecoderAttention {
  HostAttention* kernel = nullptr;
  const Plan* plan = nullptr;
  size_t layer = 0;    // among those of `kernel`
  bool stores = true;  // false: K and V stand in the arena already
  float scaling = 1;
  float softcap = 0;
  const float* sinks = nullptr;
};

class DecoderLayer {
 public:
  // The three tell instruction sets and threads. REQUIRES: dtype float32 or bfloat16.
  DecoderLayer(DType dtype, const DecoderWeights& weights, const RowOps& row_ops,
               const Linear& linear, const QuantisedLinear& quantised)
      : dtype_(dtype),
        weights_(weights),
        row_ops_(row_ops),
        linear_(linear),
        quantised_(quantised) {}

  // REQUIRES: the kernel's layers have this dtype and these heads.
  // Throws std::invalid_argument as HostAttention::forward, and for fewer rows than the plan's;
  // std::bad_alloc where there is no memory for what lies between the products.
  void forward(const DecoderAttention& attention, const DecoderCall& call) const;

 private:
  class Run;

  DType dtype_;
  DecoderWeights weights_;
  RowOps row_ops_;
  Linear linear_;
  QuantisedLinear quantised_;
};

// A layer in one step.
struct DecoderStep {
  const DecoderLayer* layer = nullptr;
  DecoderAttention attention;
};

// Layers one after the other, each on the output of the one before. REQUIRES: they have one width,
// dtype and head_dim; all but the last have their MLP. Throws as DecoderLayer::forward; the output
// may then be anything.
void forward(const std::vector<DecoderStep>& steps, DecoderCall call);

}  // namespace vtensor::kernels
