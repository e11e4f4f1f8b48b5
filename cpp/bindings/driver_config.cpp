#include "bindings/driver_config.h"

#include <stdexcept>
#include <utility>

#include "vtensor/driver/cuda/cuda_driver.h"
#include "vtensor/driver/host/host_driver.h"
#include "vtensor/driver/sim/sim_driver.h"

namespace vtensor {
namespace {

constexpr size_t kUnlimited = size_t{1} << 60;

std::unique_ptr<Driver> open_plain(const DriverConfig& config) {
  if (config.kind == "host") {
    HostOptions options;
    options.capacity_bytes = config.capacity_bytes;
    options.unmapped = config.unmapped;
    options.huge_pages = config.huge_pages;
    options.mapping_limit = config.mapping_limit;
    return std::make_unique<HostDriver>(options);
  }
  if (config.kind == "sim") {
    SimOptions options;
    // Without a capacity of its own the manager's budget is the only bound.
    options.capacity_bytes = config.capacity_bytes != 0 ? config.capacity_bytes : kUnlimited;
    options.granularity_bytes = config.granularity_bytes;
    options.latency = config.a100_latency ? SimLatency::a100() : SimLatency::none();
    options.real_time = config.real_time;
    return std::make_unique<SimDriver>(options);
  }
  if (config.kind == "cuda") {
    CudaOptions options;
    options.device_index = config.device_index;
    options.unmapped = config.unmapped;
    return std::make_unique<CudaDriver>(options);
  }
  throw std::invalid_argument("no driver is called '" + config.kind + "': host, sim or cuda");
}

}  // namespace

std::unique_ptr<Driver> open_driver(const DriverConfig& config) {
  std::unique_ptr<Driver> driver = open_plain(config);
  return config.wrap ? config.wrap(std::move(driver)) : std::move(driver);
}

}  // namespace vtensor
