// LimitedDriver: a cap on the bytes of created chunks, in front of any driver.
//
// Thread-safe. Invariant: created_bytes() <= capacity_bytes(), also while create() runs.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>

#include "vtensor/driver/wrappers/forwarding_driver.h"

namespace vtensor {

class LimitedDriver final : public ForwardingDriver {
 public:
  LimitedDriver(std::unique_ptr<Driver> inner, size_t capacity_bytes);

  size_t capacity_bytes() const noexcept { return capacity_bytes_; }
  size_t created_bytes() const;

 protected:
  void before(DriverCall& call) override;  // create: throws OutOfMemoryError at the cap
  void after(DriverCall& call) noexcept override;

 private:
  const size_t capacity_bytes_;
  mutable std::mutex mutex_;
  size_t created_bytes_ = 0;  // guarded by mutex_
};

}  // namespace vtensor
