#include "vtensor/vmm/tracing_driver.h"

#include <stdexcept>
#include <utility>

namespace vtensor {

TracingDriver::TracingDriver(std::unique_ptr<Driver> inner, Sink sink)
    : ForwardingDriver(std::move(inner)), sink_(std::move(sink)) {
  if (!sink_) throw std::invalid_argument("a tracing driver needs a sink");
}

void TracingDriver::before(DriverCall& call) { call.start_ns = steady_now_ns(); }

void TracingDriver::after(DriverCall& call) noexcept {
  call.duration_ns = steady_now_ns() - call.start_ns;
  try {
    sink_(call);
  } catch (...) {
  }
}

}  // namespace vtensor
