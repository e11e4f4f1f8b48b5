// DriverConfig: what Python says about the driver to open. Knows nothing of Python itself.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "vtensor/driver/driver.h"

namespace vtensor {

// Fields of other kinds of driver are ignored.
struct DriverConfig {
  std::string kind = "host";  // host | sim | cuda
  int device_index = 0;
  size_t capacity_bytes = 0;
  UnmappedPolicy unmapped = kDefaultUnmapped;
  bool huge_pages = true;
  size_t mapping_limit = 0;
  size_t granularity_bytes = 4096;  // sim
  bool a100_latency = false;        // sim
  bool real_time = false;           // sim
  // What stands between the manager and the driver, if anything.
  std::function<std::unique_ptr<Driver>(std::unique_ptr<Driver>)> wrap;
};

// Throws std::invalid_argument for a kind that does not exist, else as the driver's constructor.
std::unique_ptr<Driver> open_driver(const DriverConfig& config);

}  // namespace vtensor
