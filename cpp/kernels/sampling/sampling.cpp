#include "kernels/sampling/sampling.h"

#include <algorithm>
#include <atomic>
#include <cfloat>
#include <cmath>
#include <functional>
#include <memory>
#include <vector>

#include "kernels/sampling/candidates.h"

namespace vtensor::kernels {
namespace {

// Fewer logits are read sooner than another thread wakes.
constexpr int64_t kLogitsPerThread = 16 << 10;
// Keeps 0 x scale a number at the smallest temperatures.
constexpr float kMaxScale = 1e30F;
// Keeps temperature x log(min_p) one at the largest, which make all tokens equal long before.
constexpr float kMaxTemperature = 1e30F;

// What one thread needs; large arrays stay untouched, and cost nothing, until a row needs them.
struct Scratch {
  explicit Scratch(size_t num_blocks)
      : block_max(num_blocks),
        block_sums(num_blocks),
        values(new float[num_blocks * kSampleBlock]),
        weights(new float[num_blocks * kSampleBlock]),
        candidates(new Candidate[num_blocks * kSampleBlock]) {}

  std::vector<float> block_max, block_sums;
  std::unique_ptr<float[]> values, weights;
  std::unique_ptr<Candidate[]> candidates;
};

class RowSampling {
 public:
  RowSampling(const Isa& isa, DType dtype, const SampleCall& call, int64_t row, Scratch& scratch)
      : isa_(isa),
        dtype_(dtype),
        call_(call),
        row_(row),
        scratch_(scratch),
        temperature_(std::min(call.temperature[row], kMaxTemperature)),
        top_k_(call.top_k[row] < 1 ? call.vocab_size : call.top_k[row]),
        top_p_(call.top_p[row]) {}

  int64_t sample() {
    if (!read()) return -1;
    if (temperature_ <= 0) return first_of_largest();
    scale_ = std::min(1.44269504F / temperature_, kMaxScale);
    if (const float min_p = call_.min_p[row_]; min_p > 0) {
      raise(maximum_ + temperature_ * std::log(min_p));
    }
    if (top_k_ < call_.vocab_size || top_p_ < 1) find_threshold();
    return look_up(weigh(nullptr));
  }

 private:
  // False where no token can be sampled.
  bool read() {
    const auto bytes = static_cast<int64_t>(element_bytes(dtype_));
    const char* row = static_cast<const char*>(call_.logits) + row_ * call_.row_stride * bytes;
    const auto read_row = isa_.read_row[static_cast<size_t>(dtype_)];
    if (!read_row(row, call_.vocab_size, scratch_.values.get(), scratch_.block_max.data())) {
      return false;
    }
    values_ =
        dtype_ == DType::kFloat32 ? reinterpret_cast<const float*>(row) : scratch_.values.get();
    maximum_ = *std::max_element(scratch_.block_max.begin(), scratch_.block_max.end());
    return std::isfinite(maximum_);
  }

  int64_t first_of_largest() const {
    const std::vector<float>& maxima = scratch_.block_max;
    const int64_t block = std::find(maxima.begin(), maxima.end(), maximum_) - maxima.begin();
    const float* values = values_ + block * kSampleBlock;
    return std::find(values, values_ + call_.vocab_size, maximum_) - values_;
  }

  void raise(float threshold) { threshold_ = std::clamp(threshold, threshold_, maximum_); }

  // The weights of what is not below the threshold; their sum.
  double weigh(float* weights) {
    isa_.weigh({values_, scratch_.block_max.data(), weights, scratch_.block_sums.data(),
                call_.vocab_size, maximum_, scale_, threshold_});
    double sum = 0;
    for (const float block : scratch_.block_sums) sum += static_cast<double>(block);
    return sum;
  }

  void find_threshold() {
    double total = 0;
    if (top_k_ < call_.vocab_size) {
      raise_to_block_max();
    } else {
      // Tokens of less weight than this are less than 1 - top_p together.
      total = weigh(nullptr);
      const double bound = 0.999 * (1 - top_p_) * total / static_cast<double>(call_.vocab_size);
      if (bound > 0) raise(maximum_ + temperature_ * static_cast<float>(std::log(bound)));
    }
    weigh(scratch_.weights.get());
    std::span<Candidate> candidates = gather();
    if (top_k_ < static_cast<int64_t>(candidates.size())) {
      raise(find_count_threshold(candidates, top_k_));
      const auto kept = std::partition(candidates.begin(), candidates.end(),
                                       [&](const Candidate& c) { return c.value >= threshold_; });
      candidates = {candidates.begin(), kept};
    }
    if (top_p_ >= 1) return;
    if (top_k_ < call_.vocab_size) {
      for (const Candidate& candidate : candidates) total += static_cast<double>(candidate.weight);
    }
    raise(find_weight_threshold(candidates, top_p_ * total));
  }

  // The k-th largest maximum of a block is not above the k-th largest logit.
  void raise_to_block_max() {
    if (top_k_ > static_cast<int64_t>(scratch_.block_max.size())) return;
    std::vector<float> largest(static_cast<size_t>(top_k_));
    std::partial_sort_copy(scratch_.block_max.begin(), scratch_.block_max.end(), largest.begin(),
                           largest.end(), std::greater<>());
    raise(largest.back());
  }

  // What is not below the threshold.
  std::span<Candidate> gather() {
    size_t num_found = 0;
    for (size_t block = 0; block < scratch_.block_max.size(); ++block) {
      if (scratch_.block_max[block] < threshold_) continue;
      const int64_t begin = static_cast<int64_t>(block) * kSampleBlock;
      const int64_t end = std::min(begin + kSampleBlock, call_.vocab_size);
      for (int64_t i = begin; i < end; ++i) {
        scratch_.candidates[num_found] = {values_[i], scratch_.weights[static_cast<size_t>(i)]};
        num_found += values_[i] >= threshold_ ? 1 : 0;
      }
    }
    return {scratch_.candidates.get(), num_found};
  }

  // The first token up to which weights sum up to more than uniform x total; the last one with a
  // weight, should rounding put that out of reach.
  int64_t look_up(double total) {
    double left = call_.uniform[row_] * total;
    size_t block = 0;
    for (size_t i = 0; i < scratch_.block_sums.size(); ++i) {
      const auto sum = static_cast<double>(scratch_.block_sums[i]);
      if (sum <= 0) continue;
      block = i;
      if (left < sum) break;
      left -= sum;
    }
    const int64_t begin = static_cast<int64_t>(block) * kSampleBlock;
    const int64_t count = std::min(kSampleBlock, call_.vocab_size - begin);
    float sum = 0;
    float* weights = scratch_.weights.get();
    isa_.weigh({values_ + begin, &scratch_.block_max[block], weights, &sum, count, maximum_, scale_,
                threshold_});
    int64_t found = -1;
    for (int64_t i = 0; i < count; ++i) {
      if (weights[i] <= 0) continue;
      found = begin + i;
      left -= static_cast<double>(weights[i]);
      if (left < 0) break;
    }
    return found;
  }

  const Isa& isa_;
  const DType dtype_;
  const SampleCall& call_;
  const int64_t row_;
  Scratch& scratch_;
  const float temperature_;
  const int64_t top_k_;
  const double top_p_;
  const float* values_ = nullptr;
  float maximum_ = 0;
  float scale_ = 0;
  float threshold_ = -FLT_MAX;
};

}  // namespace

void RowSampler::sample(DType dtype, const SampleCall& call, int64_t num_rows,
                        int num_threads) const {
  const int64_t worth = 1 + num_rows * call.vocab_size / kLogitsPerThread;
  const int64_t parts =
      parallel_.can_fork() ? std::min({worth, int64_t{num_threads}, num_rows}) : 1;
  std::vector<Scratch> scratch;
  const int64_t num_blocks = (call.vocab_size + kSampleBlock - 1) / kSampleBlock;
  for (int64_t part = 0; part < parts; ++part) {
    scratch.emplace_back(static_cast<size_t>(num_blocks));
  }
  std::atomic<int64_t> next_row{0};
  std::atomic<size_t> next_part{0};
  auto work = [&] {
    const size_t part = next_part++;
    if (part >= scratch.size()) return;
    for (int64_t row = next_row++; row < num_rows; row = next_row++) {
      call.token_id[row] = RowSampling(*isa_, dtype, call, row, scratch[part]).sample();
    }
  };
  parallel_.run(static_cast<int>(parts), work);
}

}  // namespace vtensor::kernels
