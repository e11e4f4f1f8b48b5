#include "kernels/linear/linear.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

namespace vtensor::kernels {
namespace {

// Fewer multiplications are done sooner than another thread wakes.
constexpr int64_t kWorkPerThread = 64 << 10;
// Rows that the kernels for many of them compute at once, and of a block.
constexpr int64_t kRowStep = kMinManyRows;
constexpr int64_t kBlockRows = 256;
static_assert(kBlockRows <= kManyRows && kBlockRows <= kSplitRows);
// Of a block's inputs, which are read again for each panel, as float32: a part of the second-level
// cache. Fewer rows than kLeastRows would read the weight too often.
constexpr int64_t kInputBytes = 512 << 10;
constexpr int64_t kLeastRows = 96;
// More rows of a group are worth all threads; of fewer, threads draw panels of all groups.
constexpr int64_t kMaxGroupRows = 15;
constexpr int64_t kPartsPerThread = 4;

int64_t parts_of(int64_t whole, int64_t part) { return (whole + part - 1) / part; }

int64_t block_rows(int64_t depth) {
  const int64_t rows = kInputBytes / (depth * static_cast<int64_t>(sizeof(float)));
  return std::clamp(rows / kRowStep * kRowStep, kLeastRows, kBlockRows);
}

}  // namespace

// Threads draw panels that are neighbours: while one is multiplied, the next is on its way.
void Linear::forward(DType dtype, const LinearCall& call, int64_t num_rows, int num_threads) const {
  if (num_rows <= 0) return;
  const int64_t max_few_rows = call.gates ? 0 : isa_->max_few_rows[static_cast<size_t>(dtype)];
  if (num_rows > max_few_rows && has_many_rows(dtype, call.depth)) {
    forward_many(dtype, call, num_rows, num_threads);
    return;
  }
  const auto compute = isa_->linear[static_cast<size_t>(dtype)];
  const int64_t width = panel_columns(dtype);
  const int64_t num_panels = parts_of(call.columns, width);
  const int64_t threads = parallel_.can_fork() ? num_threads : 1;
  const int64_t worth = 1 + num_rows * call.depth * call.columns / kWorkPerThread;
  const int64_t parts = std::min({worth, kPartsPerThread * threads, num_panels});
  parallel_.share_out(num_panels, parts, threads,
                      [&](int64_t begin, int64_t end) { compute(call, num_rows, begin, end); });
}

// Groups of many rows come one after the other.
void Linear::forward_groups(DType dtype, const LinearCall& call,
                            const std::vector<const void*>& panels, const GroupBiases& biases,
                            const RowGroups& groups, int num_threads) const {
  const auto bytes = static_cast<int64_t>(element_bytes(dtype));
  const int64_t max_few_rows =
      std::max(isa_->max_few_rows[static_cast<size_t>(dtype)], kMaxGroupRows);
  const bool has_many = has_many_rows(dtype, call.depth);
  const auto rows_of = [&](size_t group) {
    LinearCall own = call;
    const int64_t first = groups.begin(group);
    own.x = static_cast<const char*>(call.x) + first * call.x_stride * bytes;
    own.output = static_cast<char*>(call.output) + first * call.output_stride * bytes;
    own.panels = panels[group];
    own.bias = bias_of(biases, group);
    return own;
  };
  std::vector<size_t> few;
  int64_t num_few = 0;
  for (size_t i = 0; i < groups.count(); ++i) {
    if (groups.rows(i) > max_few_rows && has_many) {
      forward_many(dtype, rows_of(i), groups.rows(i), num_threads);
    } else if (groups.rows(i) > 0) {
      few.push_back(i);
      num_few += groups.rows(i);
    }
  }
  if (few.empty()) return;
  const auto compute = isa_->linear[static_cast<size_t>(dtype)];
  const auto multiply = [&](size_t group, int64_t begin, int64_t end) {
    compute(rows_of(group), groups.rows(group), begin, end);
  };
  const int64_t worth = 1 + num_few * call.depth * call.columns / kWorkPerThread;
  for_panels(parallel_, num_threads, worth, few, parts_of(call.columns, panel_columns(dtype)),
             multiply);
}

int Linear::panel_columns(DType dtype) const {
  return isa_->panel_columns[static_cast<size_t>(dtype)];
}

bool Linear::has_many_rows(DType dtype, int64_t depth) const {
  return isa_->linear_many[static_cast<size_t>(dtype)] != nullptr && depth % kPanelDepth == 0;
}

bool Linear::has_gates(DType dtype, int64_t depth) const {
  const bool splits = isa_->many_floats[static_cast<size_t>(dtype)] == kSplitFloats;
  return has_many_rows(dtype, depth) && !splits;
}

// Threads draw blocks of rows, cut by panels where there are more of these than rows.
void Linear::forward_many(DType dtype, const LinearCall& call, int64_t num_rows,
                          int num_threads) const {
  const auto compute = isa_->linear_many[static_cast<size_t>(dtype)];
  const int64_t scratch_floats = isa_->many_floats[static_cast<size_t>(dtype)];
  const int64_t width = panel_columns(dtype);
  const int64_t num_panels = parts_of(call.columns, width);
  const int64_t threads = parallel_.can_fork() ? num_threads : 1;
  const int64_t steps = parts_of(num_rows, kRowStep);
  const bool by_rows = num_rows >= call.columns;
  const int64_t blocks =
      parts_of(num_rows, scratch_floats == kManyFloats ? block_rows(call.depth) : kBlockRows);
  const int64_t row_parts = by_rows ? std::min(parts_of(blocks, threads) * threads, steps) : blocks;
  // Each part splits its block's rows anew, where they are split.
  const int64_t per_thread = scratch_floats == kSplitFloats ? 1 : kPartsPerThread;
  const int64_t wanted = std::max(threads, parts_of(per_thread * threads, row_parts));
  const int64_t panel_parts = by_rows ? 1 : std::min(wanted, num_panels);
  const int64_t parts = row_parts * panel_parts;
  const int64_t workers = std::min(threads, parts);
  const auto free_scratch = [](float* p) { ::operator delete[](p, std::align_val_t{64}); };
  const std::unique_ptr<float[], decltype(free_scratch)> scratch(
      new (std::align_val_t{64}) float[static_cast<size_t>(workers * scratch_floats)],
      free_scratch);
  std::atomic<int64_t> next{0}, next_worker{0};
  auto work = [&] {
    float* own = scratch.get() + next_worker++ * scratch_floats;
    for (int64_t part = next++; part < parts; part = next++) {
      const int64_t i = part / panel_parts, j = part % panel_parts;
      compute(call,
              {steps * i / row_parts * kRowStep,
               std::min(steps * (i + 1) / row_parts * kRowStep, num_rows),
               num_panels * j / panel_parts, num_panels * (j + 1) / panel_parts},
              own);
    }
  };
  parallel_.run(static_cast<int>(workers), work);
}

}  // namespace vtensor::kernels
