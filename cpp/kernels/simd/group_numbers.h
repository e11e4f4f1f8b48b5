// GroupNumbers: the scales of a tile's outputs, or their minimums, one group after the other.
#pragma once

#include "kernels/calls/quantised.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// N vectors of outputs from `column` on in a panel.
template <int N>
class GroupNumbers {
 public:
  // numbers: the weight's scales, or what is as they are.
  VTENSOR_INLINE GroupNumbers(const QuantisedWeight& weight, const void* numbers, int64_t panel,
                              int64_t column)
      : format_(weight.scale_format), factor_unit_(weight.factor_unit) {
    const int64_t num_groups = weight.num_groups();
    if (format_ == ScaleFormat::kBlocks) {
      const int64_t num_blocks = weight.depth / kScaleBlock;
      const auto* begin = static_cast<const char*>(numbers) +
                          panel * kQuantisedColumns * (2 * num_blocks + num_groups);
      next_factors_ = reinterpret_cast<const Float16*>(begin) + column;
      next_ = begin + num_blocks * kQuantisedColumns * 2 + column;
      block_groups_ = kScaleBlock / weight.group;
    } else {
      const int64_t bytes = format_ == ScaleFormat::kPowers    ? 1
                            : format_ == ScaleFormat::kFloat16 ? 2
                                                               : 4;
      next_ = static_cast<const char*>(numbers) +
              (panel * num_groups * kQuantisedColumns + column) * bytes;
    }
  }

  // Those of the next group, the first one at first.
  VTENSOR_INLINE void next(Vec (&numbers)[N]) {
    switch (format_) {
      case ScaleFormat::kBlocks:
        if (left_ == 0) enter_block();
        --left_;
        load_next<Int8>(numbers);
#pragma GCC unroll 8
        for (int n = 0; n < N; ++n) numbers[n] *= factors_[n];
        break;
      case ScaleFormat::kFloat16:
        load_next<Float16>(numbers);
        break;
      case ScaleFormat::kPowers:
        load_next<PowerOf2>(numbers);
        break;
      default:
        load_next<float>(numbers);
    }
  }

 private:
  template <class T>
  VTENSOR_INLINE void load_next(Vec (&numbers)[N]) {
    const auto* from = reinterpret_cast<const T*>(next_);
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) numbers[n] = load(from + n * kLanes);
    next_ += kQuantisedColumns * sizeof(T);
  }

  VTENSOR_INLINE void enter_block() {
    left_ = block_groups_;
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) factors_[n] = load(next_factors_ + n * kLanes) * factor_unit_;
    next_factors_ += kQuantisedColumns;
  }

  ScaleFormat format_;
  float factor_unit_;
  const char* next_;
  // In blocks: of the one that the next group is in.
  const Float16* next_factors_ = nullptr;
  int64_t block_groups_ = 0;
  int64_t left_ = 0;
  Vec factors_[N];
};

}  // namespace
}  // namespace vtensor::kernels
