#include "kernels/sampling/candidates.h"

#include <algorithm>
#include <array>

namespace vtensor::kernels {
namespace {

float median(float a, float b, float c) {
  return std::max(std::min(a, b), std::min(std::max(a, b), c));
}

// The three parts of the candidates around a pivot: larger, equal, smaller.
struct Parts {
  std::span<Candidate> larger, equal, smaller;
};

Parts split(std::span<Candidate> candidates, float pivot) {
  size_t larger = 0, equal = 0, smaller = candidates.size();
  while (equal < smaller) {
    const float value = candidates[equal].value;
    if (value > pivot) {
      std::swap(candidates[larger++], candidates[equal++]);
    } else if (value < pivot) {
      std::swap(candidates[equal], candidates[--smaller]);
    } else {
      ++equal;
    }
  }
  return {candidates.first(larger), candidates.subspan(larger, equal - larger),
          candidates.subspan(equal)};
}

// Narrows `rest` to one of many ranges of equal width, the one that holds the threshold, and takes
// what is above it from the target. Partitions of many candidates mispredict half of their
// branches.
template <class Amount, class AmountOf>
std::span<Candidate> narrow(std::span<Candidate> rest, Amount& target, AmountOf amount_of) {
  constexpr size_t kRanges = 1024, kWorthwhile = 512;
  const auto by_value = [](const Candidate& a, const Candidate& b) { return a.value < b.value; };
  if (rest.size() < kWorthwhile) return rest;
  const auto [least, most] = std::minmax_element(rest.begin(), rest.end(), by_value);
  if (!(least->value < most->value)) return rest;
  const double low = least->value, scale = (kRanges - 1) / (most->value - low);
  const auto range_of = [=](const Candidate& candidate) {
    return static_cast<size_t>((candidate.value - low) * scale);
  };
  std::array<Amount, kRanges> amounts{};
  for (const Candidate& candidate : rest) amounts[range_of(candidate)] += amount_of(candidate);
  size_t range = range_of(*most);  // not empty, as the last one may be by rounding
  for (size_t i = range; i > 0 && amounts[range] < target;) {
    --i;
    if (amounts[i] == 0) continue;
    target -= amounts[range];
    range = i;
  }
  const auto end = std::partition(rest.begin(), rest.end(), [&](const Candidate& candidate) {
    return range_of(candidate) == range;
  });
  return {rest.begin(), end};
}

template <class Amount, class AmountOf>
float find_threshold(std::span<Candidate> rest, Amount target, AmountOf amount_of) {
  const auto sum_of = [&](std::span<const Candidate> part) {
    Amount sum = 0;
    for (const Candidate& candidate : part) sum += amount_of(candidate);
    return sum;
  };
  rest = narrow(rest, target, amount_of);
  for (;;) {
    const float pivot = median(rest.front().value, rest[rest.size() / 2].value, rest.back().value);
    const Parts parts = split(rest, pivot);
    const Amount larger = sum_of(parts.larger), equal = sum_of(parts.equal);
    if (!parts.larger.empty() && larger >= target) {
      rest = parts.larger;
    } else if (parts.smaller.empty() || larger + equal >= target) {
      return pivot;
    } else {
      target -= larger + equal;
      rest = parts.smaller;
    }
  }
}

}  // namespace

float find_count_threshold(std::span<Candidate> candidates, int64_t target) {
  return find_threshold(candidates, target, [](const Candidate&) { return int64_t{1}; });
}

float find_weight_threshold(std::span<Candidate> candidates, double target) {
  return find_threshold(candidates, target, [](const Candidate& candidate) {
    return static_cast<double>(candidate.weight);
  });
}

}  // namespace vtensor::kernels
