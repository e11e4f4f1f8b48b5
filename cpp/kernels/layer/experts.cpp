#include "kernels/layer/experts.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

namespace vtensor::kernels {
namespace {

constexpr auto kCacheLine = std::align_val_t{64};
// Rows that are computed at once, at least, and for each expert: fewer would read its weights too
// often for what they are multiplied with, and of more what lies between the products, which is
// 23 KB a row at gpt-oss's width, only takes memory.
constexpr int64_t kBlockRows = 1024;
constexpr int64_t kBlockRowsPerExpert = 32;
// Fewer numbers are added up sooner than another thread wakes.
constexpr int64_t kNumbersPerThread = 64 << 10;

struct FreeAligned {
  void operator()(char* p) const { ::operator delete[](p, kCacheLine); }
};
using Memory = std::unique_ptr<char[], FreeAligned>;

Memory allocate(int64_t bytes) {
  return Memory(static_cast<char*>(::operator new[](static_cast<size_t>(bytes), kCacheLine)));
}

float widen(float x) { return x; }
float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

void store(float x, float& output) { output = x; }
void store(float x, BFloat16& output) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const bool is_nan = (bits & 0x7fffffff) > 0x7f800000;
  const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);  // to nearest, ties to even
  output.bits = static_cast<uint16_t>((is_nan ? bits | 0x400000 : rounded) >> 16);
}

// One token: output [width] = the sum of weights[i] * rows[places[i]] over its experts. Places from
// num_rows on are of no expert.
template <class T>
void add_up(const T* rows, int64_t num_rows, const int64_t* places, const float* weights,
            int64_t top_k, int64_t width, T* output) {
  constexpr int64_t kStep = 64;
  for (int64_t first = 0; first < width; first += kStep) {
    const int64_t count = std::min(kStep, width - first);
    float sums[kStep] = {};
    for (int64_t i = 0; i < top_k; ++i) {
      if (places[i] >= num_rows) continue;
      const T* row = rows + places[i] * width + first;
      for (int64_t k = 0; k < count; ++k) sums[k] += weights[i] * widen(row[k]);
    }
    for (int64_t k = 0; k < count; ++k) store(sums[k], output[first + k]);
  }
}

bool are_alike(const Product& a, const Product& b) {
  const QuantisedWeight &p = a.quantised, &q = b.quantised;
  return a.depth == b.depth && a.columns == b.columns &&
         (a.bias == nullptr) == (b.bias == nullptr) &&
         (p.words == nullptr) == (q.words == nullptr) &&
         (p.minimums == nullptr) == (q.minimums == nullptr) && p.bits == q.bits &&
         p.group == q.group && p.byte_inputs == q.byte_inputs && p.scale_format == q.scale_format &&
         p.codebook == q.codebook && p.rotates_inputs == q.rotates_inputs;
}

}  // namespace

ExpertTable::ExpertTable(const std::vector<Product>& products)
    : num_experts_(products.size()),
      depth_(products.empty() ? 0 : products[0].depth),
      columns_(products.empty() ? 0 : products[0].columns) {
  for (const Product& product : products) {
    if (!are_alike(product, products[0])) {
      throw std::invalid_argument(
          "experts of one table must have weights of one kind, and all of them biases or none");
    }
    if (product.bias != nullptr) biases_.push_back(product.bias);
    if (product.quantised.words == nullptr) {
      panels_.push_back(product.panels);
    } else {
      quantised_.push_back(product.quantised);
    }
  }
}

Experts::Experts(DType dtype, std::vector<ExpertTable> gate_up, ExpertTable down,
                 const Activation& activation, const RowOps& row_ops, const Linear& linear,
                 const QuantisedLinear& quantised)
    : dtype_(dtype),
      gate_up_(std::move(gate_up)),
      down_(std::move(down)),
      activation_(activation),
      row_ops_(row_ops),
      linear_(linear),
      quantised_(quantised) {
  int64_t columns = 0;
  bool fits = down_.num_experts() > 0;
  for (const ExpertTable& table : gate_up_) {
    columns += table.columns();
    fits = fits && table.depth() == down_.columns() && table.num_experts() == down_.num_experts();
  }
  if (!fits || columns != (activation_.has_gates() ? 2 : 1) * down_.depth()) {
    throw std::invalid_argument("gates, factors and outputs of experts do not go together");
  }
}

bool Experts::gates_in_product() const {
  return activation_.kind == Activation::Kind::kSilu && gate_up_.size() == 1 &&
         !gate_up_[0].quantised().empty() && QuantisedLinear::has_gates(gate_up_[0].columns());
}

// Some tokens' rows: sorted by expert, multiplied, and added up.
class Experts::Run {
 public:
  Run(const Experts& owner, const ExpertsCall& call)
      : owner_(owner),
        call_(call),
        bytes_(static_cast<int64_t>(element_bytes(owner.dtype_))),
        width_(owner.down_.columns()),
        hidden_(owner.down_.depth()),
        first_((owner.activation_.has_gates() ? 2 : 1) * hidden_) {
    const int64_t rows = call.num_tokens * call.top_k;
    rows_ = allocate(rows * width_ * bytes_);
    if (!owner.gates_in_product()) gate_up_ = allocate(rows * first_ * bytes_);
    activated_ = allocate(rows * hidden_ * bytes_);
  }

  void forward() {
    sort();
    if (owner_.gates_in_product()) {
      multiply(owner_.gate_up_[0], rows_.get(), activated_.get(), hidden_, true);
    } else {
      int64_t column = 0;
      for (const ExpertTable& table : owner_.gate_up_) {
        multiply(table, rows_.get(), gate_up_.get() + column * bytes_, first_);
        column += table.columns();
      }
      owner_.activation_.apply(owner_.row_ops_, owner_.dtype_, gate_up_.get(), activated_.get(),
                               hidden_, groups_.num_rows(), call_.num_threads);
    }
    multiply(owner_.down_, activated_.get(), rows_.get(), width_);
    if (owner_.dtype_ == DType::kFloat32) {
      add_up_tokens<float>();
    } else {
      add_up_tokens<BFloat16>();
    }
  }

 private:
  // Copies each token's row to where the rows of each of its experts are, in their order. Those of
  // no expert come last.
  void sort() {
    const int64_t num_rows = call_.num_tokens * call_.top_k, row_bytes = width_ * bytes_;
    std::vector<int64_t> next(owner_.down_.num_experts() + 1, 0);
    for (int64_t i = 0; i < num_rows; ++i) ++next[static_cast<size_t>(call_.experts[i])];
    int64_t total = 0;
    for (int64_t& count : next) {
      const int64_t begin = total;
      groups_.ends.push_back(total += count);
      count = begin;
    }
    groups_.ends.pop_back();
    places_.resize(static_cast<size_t>(num_rows));
    for (int64_t i = 0; i < num_rows; ++i) {
      const int64_t place = next[static_cast<size_t>(call_.experts[i])]++;
      places_[static_cast<size_t>(i)] = place;
      std::memcpy(rows_.get() + place * row_bytes,
                  static_cast<const char*>(call_.x) + i / call_.top_k * row_bytes,
                  static_cast<size_t>(row_bytes));
    }
  }

  void multiply(const ExpertTable& table, const void* x, void* output, int64_t output_stride,
                bool gates = false) {
    LinearCall layer;
    layer.x = x;
    layer.x_stride = layer.depth = table.depth();
    layer.output = output;
    layer.output_stride = output_stride;
    layer.columns = table.columns();
    layer.gates = gates;
    if (table.quantised().empty()) {
      owner_.linear_.forward_groups(owner_.dtype_, layer, table.panels(), table.biases(), groups_,
                                    call_.num_threads);
    } else {
      owner_.quantised_.forward_groups(owner_.dtype_, layer, table.quantised(), table.biases(),
                                       groups_, call_.num_threads);
    }
  }

  template <class T>
  void add_up_tokens() {
    const auto* outputs = reinterpret_cast<const T*>(rows_.get());
    const int64_t worth = 1 + groups_.num_rows() * width_ / kNumbersPerThread;
    const int64_t parts = std::min({worth, int64_t{call_.num_threads}, call_.num_tokens});
    const auto add_up_some = [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        const int64_t first = token * call_.top_k;
        add_up(outputs, groups_.num_rows(), places_.data() + first, call_.weights + first,
               call_.top_k, width_, static_cast<T*>(call_.output) + token * width_);
      }
    };
    owner_.linear_.parallel().share_out(call_.num_tokens, parts, parts, add_up_some);
  }

  const Experts& owner_;
  const ExpertsCall& call_;
  int64_t bytes_;  // of a number
  int64_t width_;
  int64_t hidden_;
  int64_t first_;  // outputs of the first product: gates and factors, or factors alone
  RowGroups groups_;
  std::vector<int64_t> places_;  // [tokens, top_k]: where in rows_
  Memory rows_;                  // [rows, width]: inputs, then outputs
  Memory gate_up_;               // [rows, first], or none
  Memory activated_;             // [rows, hidden]
};

void Experts::forward(const ExpertsCall& call) const {
  if (call.num_tokens <= 0 || call.top_k <= 0) return;
  const auto num_experts = static_cast<int64_t>(down_.num_experts());
  for (int64_t i = 0; i < call.num_tokens * call.top_k; ++i) {
    if (call.experts[i] < 0 || call.experts[i] > num_experts) {
      throw std::invalid_argument("a token is routed to an expert that there is not");
    }
  }
  const int64_t block_rows = std::max(kBlockRows, kBlockRowsPerExpert * num_experts);
  const int64_t step = std::max<int64_t>(1, block_rows / call.top_k);
  const int64_t row_bytes = down_.columns() * static_cast<int64_t>(element_bytes(dtype_));
  for (int64_t first = 0; first < call.num_tokens; first += step) {
    ExpertsCall block = call;
    block.num_tokens = std::min(step, call.num_tokens - first);
    block.x = static_cast<const char*>(call.x) + first * row_bytes;
    block.output = static_cast<char*>(call.output) + first * row_bytes;
    block.experts = call.experts + first * call.top_k;
    block.weights = call.weights + first * call.top_k;
    Run(*this, block).forward();
  }
}

}  // namespace vtensor::kernels
