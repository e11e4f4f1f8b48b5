// Fence: a point in a device's work that may still lie ahead.
//
// Thread-safety: done() and wait() may be called from any thread.
#pragma once

namespace vtensor {

class Fence {
 public:
  virtual ~Fence() = default;

  // Whether the device has got there. Never blocks.
  virtual bool done() const = 0;
  // Sleeps until done().
  virtual void wait() const = 0;
};

}  // namespace vtensor
