// RowGroups: the rows of several products of one shape, each group with a weight of its own.
//
// A token's experts have few rows each: threads that shared out one group after the other would
// wait for each other as often as there are experts. So they draw parts of all groups' panels.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/parallel.h"

namespace vtensor::kernels {

// Of group i the rows [begin(i), ends[i]); those of the first begin at 0.
struct RowGroups {
  std::vector<int64_t> ends;

  size_t count() const { return ends.size(); }
  int64_t begin(size_t i) const { return i == 0 ? 0 : ends[i - 1]; }
  int64_t rows(size_t i) const { return ends[i] - begin(i); }
  int64_t num_rows() const { return ends.empty() ? 0 : ends.back(); }
};

// [columns] of each group, or of none.
using GroupBiases = std::vector<const void*>;

inline const void* bias_of(const GroupBiases& biases, size_t group) {
  return biases.empty() ? nullptr : biases[group];
}

// Parts for each thread: groups differ in their rows, and the last parts should be small.
inline constexpr int64_t kGroupPartsPerThread = 8;

// Calls compute(group, begin, end) for all panels [0, num_panels) of these groups, on threads that
// draw neighbouring ones. max_parts: more are not worth a thread.
template <class Compute>
void for_panels(const Parallel& parallel, int num_threads, int64_t max_parts,
                const std::vector<size_t>& groups, int64_t num_panels, const Compute& compute) {
  const auto total = static_cast<int64_t>(groups.size()) * num_panels;
  const int64_t threads = parallel.can_fork() ? num_threads : 1;
  const int64_t parts = std::min({max_parts, kGroupPartsPerThread * threads, total});
  parallel.share_out(total, parts, threads, [&](int64_t at, int64_t end) {
    while (at < end) {
      const int64_t first = at % num_panels;
      const int64_t last = std::min(num_panels, first + end - at);
      compute(groups[static_cast<size_t>(at / num_panels)], first, last);
      at += last - first;
    }
  });
}

}  // namespace vtensor::kernels
