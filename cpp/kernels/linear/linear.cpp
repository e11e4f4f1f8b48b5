#include "kernels/linear/linear.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <new>

namespace vtensor::kernels {
namespace {

// Fewer multiplications are done sooner than another thread wakes.
constexpr int64_t kWorkPerThread = 64 << 10;
// Up to here the kernel for few rows is faster, by DType.
constexpr int64_t kMaxFewRows[] = {64, 48, 0};
// Rows that the kernels for many of them compute at once.
constexpr int64_t kRowStep = kMinManyRows;

}  // namespace

// Each thread has panels that are neighbours: while one is multiplied, the next is on its way.
void Linear::forward(DType dtype, const LinearCall& call, int64_t num_rows, int num_threads) const {
  if (num_rows <= 0) return;
  const int64_t max_few_rows = call.gates ? 0 : kMaxFewRows[static_cast<size_t>(dtype)];
  if (num_rows > max_few_rows && has_many_rows(dtype, call.depth)) {
    forward_many(dtype, call, num_rows, num_threads);
    return;
  }
  const auto compute = isa_->linear[static_cast<size_t>(dtype)];
  const int64_t width = panel_columns(dtype);
  const int64_t num_panels = (call.columns + width - 1) / width;
  const int64_t worth = 1 + num_rows * call.depth * call.columns / kWorkPerThread;
  const int64_t parts =
      parallel_.can_fork() ? std::min({worth, int64_t{num_threads}, num_panels}) : 1;
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t part = next++; part < parts; part = next++) {
      compute(call, num_rows, num_panels * part / parts, num_panels * (part + 1) / parts);
    }
  };
  parallel_.run(static_cast<int>(parts), work);
}

int Linear::panel_columns(DType dtype) const {
  return isa_->panel_columns[static_cast<size_t>(dtype)];
}

bool Linear::has_many_rows(DType dtype, int64_t depth) const {
  return isa_->linear_many[static_cast<size_t>(dtype)] != nullptr && depth % kPanelDepth == 0;
}

// Each thread has a share of the rows or of the panels, of which there is more: what a thread
// splits of the other in float32 is split by each.
void Linear::forward_many(DType dtype, const LinearCall& call, int64_t num_rows,
                          int num_threads) const {
  const auto compute = isa_->linear_many[static_cast<size_t>(dtype)];
  const int64_t width = panel_columns(dtype);
  const int64_t num_panels = (call.columns + width - 1) / width;
  const bool by_rows = num_rows >= call.columns;
  const int64_t units = by_rows ? (num_rows + kRowStep - 1) / kRowStep : num_panels;
  const int64_t parts = parallel_.can_fork() ? std::min(int64_t{num_threads}, units) : 1;
  const int64_t scratch_floats = dtype == DType::kFloat32 ? kSplitFloats : 0;
  const auto free_scratch = [](float* p) { ::operator delete[](p, std::align_val_t{64}); };
  const std::unique_ptr<float[], decltype(free_scratch)> scratch(
      new (std::align_val_t{64}) float[static_cast<size_t>(parts * scratch_floats)], free_scratch);
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t part = next++; part < parts; part = next++) {
      const int64_t first = units * part / parts, last = units * (part + 1) / parts;
      LinearBlock block = {0, num_rows, first, last};
      if (by_rows) {
        block = {first * kRowStep, std::min(last * kRowStep, num_rows), 0, num_panels};
      }
      compute(call, block, scratch.get() + part * scratch_floats);
    }
  };
  parallel_.run(static_cast<int>(parts), work);
}

}  // namespace vtensor::kernels
