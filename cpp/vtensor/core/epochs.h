// Epochs: which steps' kernels may still be running. What they may read must not be unmapped,
// remapped, scrubbed or handed to somebody else.
//
//   begin() | kernels of epoch e | end(fence of e) | begin() | kernels of e + 1 ...
//                                                     ^ e is over when its fence is done
//
// On the host kernels are over when they return: end(nullptr). Without begin() and end() nothing is
// ever in flight, which is right for callers that wait for their kernels themselves.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "vtensor/driver/fence.h"

namespace vtensor {

class Epochs {
 public:
  // A step's kernels are about to be issued.
  void begin() { open_ = true; }
  bool is_open() const { return open_; }
  // All of them have been; `fence` follows the last one (nullptr: they are over already).
  void end(std::unique_ptr<Fence> fence);

  // The last epoch whose kernels may use what is in use now.
  uint64_t last_used() const { return open_ ? current_ : current_ - 1; }
  // The last epoch that is over, with all before it.
  uint64_t completed();
  // Sleeps until nothing is in flight. Throws std::invalid_argument between begin() and end():
  // kernels without a fence cannot be waited for.
  void wait();

 private:
  uint64_t current_ = 1;
  bool open_ = false;
  std::deque<std::pair<uint64_t, std::unique_ptr<Fence>>> in_flight_;  // oldest first
};

}  // namespace vtensor
