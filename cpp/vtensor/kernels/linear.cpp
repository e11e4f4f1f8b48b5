#include "vtensor/kernels/linear.h"

#include <algorithm>
#include <atomic>

namespace vtensor::kernels {
namespace {

// Fewer multiplications are done sooner than another thread wakes.
constexpr int64_t kWorkPerThread = 64 << 10;

}  // namespace

// Each thread has panels that are neighbours: while one is multiplied, the next is on its way.
void Linear::forward(DType dtype, const LinearCall& call, int64_t num_rows, int num_threads) const {
  if (num_rows <= 0) return;
  const auto compute = level_->linear[static_cast<size_t>(dtype)];
  const int64_t width = panel_columns(dtype), num_panels = (call.columns + width - 1) / width;
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

}  // namespace vtensor::kernels
