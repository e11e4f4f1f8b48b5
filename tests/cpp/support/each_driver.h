// EachDriver: one of all drivers with a range of eight chunks.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/cpp/support/drivers.h"

namespace vtensor {

class EachDriver : public testing::TestWithParam<DriverCase> {
 protected:
  EachDriver() : driver_(GetParam().make()) {
    chunk_bytes_ = std::max(driver_->granularity(), 64 * kKiB);
    range_ = driver_->reserve(8 * chunk_bytes_, driver_->granularity());
  }

  std::vector<Handle> create(size_t num_chunks) {
    std::vector<Handle> handles;
    for (size_t i = 0; i < num_chunks; ++i) handles.push_back(driver_->create(chunk_bytes_));
    return handles;
  }
  uintptr_t at(size_t chunk_idx) const { return range_ + chunk_idx * chunk_bytes_; }
  void map_rw(size_t chunk_idx, const std::vector<Handle>& handles) {
    driver_->map(at(chunk_idx), handles, chunk_bytes_);
    driver_->set_access(at(chunk_idx), handles.size() * chunk_bytes_, Access::kReadWrite);
  }
  std::byte first_byte(Handle handle) {
    std::byte value{};
    driver_->read(handle, 0, {&value, 1});
    return value;
  }

  std::unique_ptr<Driver> driver_;
  size_t chunk_bytes_ = 0;
  uintptr_t range_ = 0;
};

}  // namespace vtensor
