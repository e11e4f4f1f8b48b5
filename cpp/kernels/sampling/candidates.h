// Candidates: the tokens among which a threshold is searched, by quickselect.
#pragma once

#include <cstdint>
#include <span>

namespace vtensor::kernels {

struct Candidate {
  float value;
  float weight;
};

// The largest value v such that those of at least v amount to `target` or more; the smallest value
// if all together do not. So a candidate is at or above it exactly if those with larger values than
// its own amount to less than `target`. Expected time: linear. Reorders the candidates.
// REQUIRES: at least one candidate.
float find_count_threshold(std::span<Candidate> candidates, int64_t target);
float find_weight_threshold(std::span<Candidate> candidates, double target);

}  // namespace vtensor::kernels
