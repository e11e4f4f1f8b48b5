#include "kernels/layer/decoder_layer.h"

#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>

namespace vtensor::kernels {
namespace {

constexpr int64_t kAlignment = 64;

struct FreeAligned {
  void operator()(char* p) const { ::operator delete[](p, std::align_val_t{kAlignment}); }
};

int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

// One call: what lies between the products, and the steps from one to the next.
class DecoderLayer::Run {
 public:
  Run(const DecoderLayer& owner, const DecoderCall& call)
      : owner_(owner),
        weights_(owner.weights_),
        call_(call),
        bytes_(static_cast<int64_t>(element_bytes(owner.dtype_))),
        width_(weights_.o.columns),
        hidden_(weights_.down.depth) {
    for (const Product& product : weights_.qkv) qkv_width_ += product.columns;
    const std::vector<Product>& gate_up = weights_.gate_up;
    gates_in_product_ = weights_.activation.kind == Activation::Kind::kSilu &&
                        gate_up.size() == 1 && gate_up[0].quantised.words != nullptr &&
                        QuantisedLinear::has_gates(gate_up[0].columns);
    const int64_t gate_up_width = gates_in_product_ ? 0 : 2 * hidden_;
    const int64_t widths[] = {width_, qkv_width_, weights_.o.depth, width_, gate_up_width, hidden_};
    int64_t total = 0;
    for (const int64_t width : widths) total += block_bytes(width);
    memory_.reset(static_cast<char*>(
        ::operator new[](static_cast<size_t>(total), std::align_val_t{kAlignment})));
    char* next = memory_.get();
    char** const blocks[] = {&normed_, &qkv_, &attended_, &middle_, &gate_up_, &gated_};
    for (size_t i = 0; i < std::size(widths); ++i) {
      *blocks[i] = next;
      next += block_bytes(widths[i]);
    }
  }

  void forward(const DecoderAttention& attention) {
    norm(weights_.input_norm, call_.x, normed_);
    multiply(weights_.qkv, normed_, qkv_, qkv_width_);
    rotate();
    attend(attention);
    if (weights_.gate_up.empty()) {
      multiply(weights_.o, attended_, call_.x, call_.output, width_);
      norm(weights_.output_norm, call_.output, call_.normed);
      return;
    }
    multiply_add(weights_.o, attended_, weights_.attention_norm, call_.x, middle_);
    norm(weights_.output_norm, middle_, normed_);
    multiply_gates();
    multiply_add(weights_.down, gated_, weights_.mlp_norm, middle_, call_.output);
  }

 private:
  int64_t block_bytes(int64_t width) const { return aligned(call_.num_rows * width * bytes_); }

  void norm(const Norm& norm, const void* x, void* output, const void* residual = nullptr) {
    RowCall rows = {x, norm.weight, output, width_, 0, width_, norm.eps};
    rows.has_wide_weight = norm.is_wide;
    rows.residual = residual;
    owner_.row_ops_.rms_norm(owner_.dtype_, rows, call_.num_rows, call_.num_threads);
  }

  void multiply(const std::vector<Product>& products, const void* x, char* output, int64_t stride) {
    for (const Product& product : products) {
      multiply(product, x, nullptr, output, stride);
      output += product.columns * bytes_;
    }
  }

  void multiply(const Product& product, const void* x, const void* residual, void* output,
                int64_t stride, bool gates = false) {
    LinearCall layer;
    layer.x = x;
    layer.x_stride = product.depth;
    layer.panels = product.panels;
    layer.bias = product.bias;
    layer.residual = residual;
    layer.residual_stride = product.columns;
    layer.output = output;
    layer.output_stride = stride;
    layer.depth = product.depth;
    layer.columns = product.columns;
    layer.gates = gates;
    if (product.quantised.words == nullptr) {
      owner_.linear_.forward(owner_.dtype_, layer, call_.num_rows, call_.num_threads);
    } else {
      owner_.quantised_.forward(owner_.dtype_, layer, product.quantised, call_.num_rows,
                                call_.num_threads);
    }
  }

  // The residual is added to the product, or to its norm if there is one.
  void multiply_add(const Product& product, const void* x, const Norm& norm_of_it,
                    const void* residual, void* output) {
    if (norm_of_it.weight == nullptr) {
      multiply(product, x, residual, output, width_);
      return;
    }
    multiply(product, x, nullptr, normed_, width_);
    norm(norm_of_it, normed_, output, residual);
  }

  void multiply_gates() {
    if (gates_in_product_) {
      multiply(weights_.gate_up[0], normed_, nullptr, gated_, hidden_, true);
      return;
    }
    multiply(weights_.gate_up, normed_, gate_up_, 2 * hidden_);
    weights_.activation.apply(owner_.row_ops_, owner_.dtype_, gate_up_, gated_, hidden_,
                              call_.num_rows, call_.num_threads);
  }

  // Queries and keys in place, normalised before if the model does.
  void rotate() {
    norm_heads(weights_.query_norm, 0, weights_.num_heads);
    norm_heads(weights_.key_norm, weights_.num_heads, weights_.num_kv_heads);
    const int64_t dim = weights_.head_dim, stride = qkv_width_;
    const RotaryCall both = {qkv_, call_.cos, call_.sin,
                             qkv_, dim,       stride,
                             dim,  stride,    weights_.num_heads + weights_.num_kv_heads,
                             dim};
    owner_.row_ops_.rotate(owner_.dtype_, both, call_.num_rows, call_.num_threads);
  }

  void norm_heads(const Norm& norm, int first, int count) {
    if (norm.weight == nullptr) return;
    const int64_t dim = weights_.head_dim;
    for (int64_t row = 0; row < call_.num_rows; ++row) {
      char* heads = qkv_ + (row * qkv_width_ + first * dim) * bytes_;
      RowCall rows = {heads, norm.weight, heads, dim, 0, dim, norm.eps};
      rows.has_wide_weight = norm.is_wide;
      owner_.row_ops_.rms_norm(owner_.dtype_, rows, count, 1);
    }
  }

  void attend(const DecoderAttention& attention) {
    const int64_t dim = weights_.head_dim, stride = qkv_width_;
    const int64_t num_planned = attention.plan->num_tokens();
    if (num_planned > call_.num_rows) {
      throw std::invalid_argument("the plan has more tokens than the layer has rows");
    }
    const char* keys = qkv_ + weights_.num_heads * dim * bytes_;
    const char* values = keys + weights_.num_kv_heads * dim * bytes_;
    LayerInputs inputs;
    inputs.query = {qkv_, dim, stride};
    if (attention.stores) inputs.key = {keys, dim, stride};
    if (attention.stores) inputs.value = {values, dim, stride};
    inputs.output = attended_;
    inputs.scaling = attention.scaling;
    inputs.softcap = attention.softcap;
    inputs.sinks = attention.sinks;
    const int64_t row_bytes = weights_.num_heads * dim * bytes_;
    std::memset(attended_ + num_planned * row_bytes, 0,
                static_cast<size_t>((call_.num_rows - num_planned) * row_bytes));
    attention.kernel->forward(*attention.plan, attention.layer, inputs);
  }

  const DecoderLayer& owner_;
  const DecoderWeights& weights_;
  const DecoderCall& call_;
  int64_t bytes_;  // of a number
  int64_t width_;
  int64_t hidden_;  // of the MLP
  int64_t qkv_width_ = 0;
  bool gates_in_product_ = false;  // of gate_up, which then needs no memory
  std::unique_ptr<char[], FreeAligned> memory_;
  char* normed_ = nullptr;    // [rows, width]
  char* qkv_ = nullptr;       // [rows, heads, head_dim]
  char* attended_ = nullptr;  // [rows, query heads, head_dim]
  char* middle_ = nullptr;    // [rows, width]
  char* gate_up_ = nullptr;   // [rows, 2 * hidden]
  char* gated_ = nullptr;     // [rows, hidden]
};

void DecoderLayer::forward(const DecoderAttention& attention, const DecoderCall& call) const {
  if (call.num_rows <= 0) return;
  Run(*this, call).forward(attention);
}

void forward(const std::vector<DecoderStep>& steps, DecoderCall call) {
  for (const DecoderStep& step : steps) {
    step.layer->forward(step.attention, call);
    call.x = call.output;
  }
}

}  // namespace vtensor::kernels
