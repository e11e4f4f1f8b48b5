// LinesAhead: rows that are read soon, asked for a few lines at a time while others are computed.
//
// In the order in which they stand in memory, the heads of a token side by side: the order of the
// tasks, a head's rows and then the next one's, takes a sixth longer (measured on Zen 4). Into the
// second-level cache: rows of many layers' tokens, a power of two apart, fall into a few sets of
// the first one and would push each other out before they are read (measured: twice the time).
#pragma once

#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

class LinesAhead {
 public:
  LinesAhead() = default;  // nothing to ask for
  // Rows of `run` bytes, `stride` bytes apart, while num_steps steps are computed.
  LinesAhead(const void* first, int64_t stride, int run, int64_t num_rows, int64_t num_steps)
      : row_(static_cast<const char*>(first)),
        stride_(stride),
        run_(run),
        left_(num_rows),
        share_(num_rows * ((run + kLine - 1) / kLine) * kWhole / num_steps + 1) {
    begin_row();
  }

  // Those that are due after so many steps more.
  VTENSOR_INLINE void advance(int num_steps) {
    for (due_ += num_steps * share_; due_ >= kWhole && left_ > 0; due_ -= kWhole) ask();
  }

  void finish() {
    while (left_ > 0) ask();
  }

 private:
  static constexpr int kLine = 64;
  static constexpr int64_t kWhole = 1 << 16;  // parts of a line

  VTENSOR_INLINE void ask() {
    __builtin_prefetch(row_ + offset_, 0, 2);
    offset_ += kLine;
    if (offset_ < run_) return;
    row_ += stride_;
    --left_;
    begin_row();
  }

  VTENSOR_INLINE void begin_row() {
    offset_ = -static_cast<int>(reinterpret_cast<uintptr_t>(row_) % kLine);
  }

  const char* row_ = nullptr;
  int64_t stride_ = 0;
  int run_ = 0;
  int offset_ = 0;
  int64_t left_ = 0;
  int64_t share_ = 0;  // parts of a line that a step asks for
  int64_t due_ = 0;
};

}  // namespace
}  // namespace vtensor::kernels
