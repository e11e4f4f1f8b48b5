// Stopwatch: measures how long callers wait for driver work.
//
// Thread-safety: none; the counter's owner guards it.
#pragma once

#include <cstdint>

#include "vtensor/driver/work_clock.h"

namespace vtensor {

// Adds the time until its end to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(uint64_t& total_ns) : total_ns_(total_ns) {}
  ~Stopwatch() { total_ns_ += static_cast<uint64_t>(work_now_ns() - start_ns_); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  uint64_t& total_ns_;
  int64_t start_ns_ = work_now_ns();
};

}  // namespace vtensor
