#include "kernels/linear/quantised_linear.h"

#include <algorithm>
#include <atomic>

#include "kernels/linear/inputs.h"

namespace vtensor::kernels {
namespace {

// Fewer multiplications are done sooner than another thread wakes.
constexpr int64_t kWorkPerThread = 128 << 10;
// More parts than threads: one that is kept from its CPU leaves the rest to the others.
constexpr int64_t kPartsPerThread = 4;

}  // namespace

void QuantisedLinear::forward(DType dtype, const LinearCall& layer, const QuantisedWeight& weight,
                              int64_t num_rows, int num_threads) const {
  if (num_rows <= 0) return;
  const auto& kernels = weight.bits == 8 ? isa_->multiply_8_bits : isa_->multiply_4_bits;
  Inputs kind = weight.byte_inputs ? Inputs::kBytes : Inputs::kFloats;
  if (kind == Inputs::kFloats && dtype == DType::kBFloat16 &&
      kernels[static_cast<size_t>(Inputs::kBFloat16s)] != nullptr) {
    kind = Inputs::kBFloat16s;
  }
  const auto compute = kernels[static_cast<size_t>(kind)];
  const int64_t num_panels = (layer.columns + kQuantisedColumns - 1) / kQuantisedColumns;
  const int64_t block_rows = isa_->block_rows;
  PreparedInputs inputs(kind, dtype, weight, std::min(num_rows, block_rows));
  const auto bytes = static_cast<int64_t>(element_bytes(dtype));
  for (int64_t first = 0; first < num_rows; first += block_rows) {
    const int64_t rows = std::min(block_rows, num_rows - first);
    QuantisedCall call;
    call.layer = layer;
    call.weight = weight;
    inputs.prepare(parallel_, num_threads, first, rows, call);
    call.layer.output = static_cast<char*>(layer.output) + first * layer.output_stride * bytes;
    if (layer.residual != nullptr) {
      call.layer.residual =
          static_cast<const char*>(layer.residual) + first * layer.residual_stride * bytes;
    }
    const int64_t threads = parallel_.can_fork() ? num_threads : 1;
    const int64_t worth = 1 + rows * layer.depth * layer.columns / kWorkPerThread;
    const int64_t parts = std::min({worth, kPartsPerThread * threads, num_panels});
    std::atomic<int64_t> next{0};
    auto work = [&] {
      for (int64_t part = next++; part < parts; part = next++) {
        compute(call, dtype, {0, rows, num_panels * part / parts, num_panels * (part + 1) / parts});
      }
    };
    parallel_.run(static_cast<int>(std::min(threads, parts)), work);
  }
}

}  // namespace vtensor::kernels
