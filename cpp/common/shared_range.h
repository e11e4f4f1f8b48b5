// SharedRange: tokens whose KV several readers have in the same memory; what the manager tells and
// what attention over shared prefixes is planned from.
#pragma once

#include <cstdint>
#include <vector>

namespace vtensor {

// Tokens [start, end) have the same chunks, in all planes, behind them in all members, and stand
// before the new tokens of each.
struct SharedRange {
  int64_t slot = 0;  // of the first member: where to read
  int64_t start = 0;
  int64_t end = 0;
  std::vector<int64_t> members;  // indices into the readers, ascending, at least two
};

}  // namespace vtensor
