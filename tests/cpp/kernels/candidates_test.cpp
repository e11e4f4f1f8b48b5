// Thresholds found by quickselect against those of a sorted list: ties, few and many candidates.
#include "kernels/sampling/candidates.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace vtensor::kernels {
namespace {

struct Case {
  size_t num_candidates;
  float step;  // values are multiples of it
};

class Thresholds : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    std::mt19937 random(static_cast<unsigned>(GetParam().num_candidates));
    std::normal_distribution<float> normal(0, 3);
    for (size_t i = 0; i < GetParam().num_candidates; ++i) {
      const float value = std::round(normal(random) / GetParam().step) * GetParam().step;
      candidates_.push_back({value, std::exp(value)});
    }
    sorted_ = candidates_;
    std::ranges::sort(sorted_, std::greater<>(), &Candidate::value);
  }

  std::vector<Candidate> candidates_, sorted_;
};

TEST_P(Thresholds, the_kth_largest_is_the_one_of_the_sorted_list) {
  for (size_t k = 1; k <= sorted_.size(); k += 1 + sorted_.size() / 50) {
    EXPECT_EQ(find_count_threshold(candidates_, static_cast<int64_t>(k)), sorted_[k - 1].value);
  }
}

TEST_P(Thresholds, weights_above_are_less_than_the_target_and_with_it_are_not) {
  double total = 0;
  for (const Candidate& candidate : sorted_) total += static_cast<double>(candidate.weight);
  for (double part = 0.013; part < 1; part += 0.05) {
    const float threshold = find_weight_threshold(candidates_, part * total);
    double above = 0, with = 0;
    for (const Candidate& candidate : sorted_) {
      if (candidate.value > threshold) above += static_cast<double>(candidate.weight);
      if (candidate.value >= threshold) with += static_cast<double>(candidate.weight);
    }
    EXPECT_LT(above, part * total * (1 + 1e-9));
    EXPECT_GE(with, part * total * (1 - 1e-9));
  }
}

TEST_P(Thresholds, beyond_all_weights_the_smallest_value_is_found) {
  EXPECT_EQ(find_weight_threshold(candidates_, 1e30), sorted_.back().value);
}

INSTANTIATE_TEST_SUITE_P(Sizes, Thresholds,
                         testing::Values(Case{1, 1}, Case{2, 1}, Case{100, 1e-4F}, Case{100, 2},
                                         Case{5000, 1e-4F}, Case{5000, 1}, Case{5000, 100}));

}  // namespace
}  // namespace vtensor::kernels
