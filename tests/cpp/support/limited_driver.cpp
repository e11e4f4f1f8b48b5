#include "tests/cpp/support/limited_driver.h"

#include <utility>

#include "vtensor/util/error.h"

namespace vtensor {

LimitedDriver::LimitedDriver(std::unique_ptr<Driver> inner, size_t capacity_bytes)
    : ForwardingDriver(std::move(inner)), capacity_bytes_(capacity_bytes) {}

size_t LimitedDriver::created_bytes() const {
  const std::lock_guard lock(mutex_);
  return created_bytes_;
}

// Claims the bytes before the chunk exists, so that two threads can not both pass the cap.
void LimitedDriver::before(DriverCall& call) {
  if (call.kind != CallKind::kCreate) return;
  const std::lock_guard lock(mutex_);
  const size_t free_bytes = capacity_bytes_ - created_bytes_;
  if (call.chunk_bytes > free_bytes) {
    throw OutOfMemoryError(call.chunk_bytes, free_bytes, capacity_bytes_,
                           "the limit set on this driver is reached");
  }
  created_bytes_ += call.chunk_bytes;
}

void LimitedDriver::after(DriverCall& call) noexcept {
  const bool create_failed = call.kind == CallKind::kCreate && !call.ok;
  const bool released = call.kind == CallKind::kRelease && call.ok;
  if (!create_failed && !released) return;
  const std::lock_guard lock(mutex_);
  created_bytes_ -= call.chunk_bytes;
}

}  // namespace vtensor
