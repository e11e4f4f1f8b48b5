#include "vtensor/driver/wrappers/tracing_driver.h"

#include <stdexcept>
#include <utility>

#include "vtensor/driver/work_clock.h"

namespace vtensor {

TracingDriver::TracingDriver(std::unique_ptr<Driver> inner, Sink sink,
                             std::shared_ptr<const std::atomic<bool>> is_on)
    : ForwardingDriver(std::move(inner)), sink_(std::move(sink)), is_on_(std::move(is_on)) {
  if (!sink_) throw std::invalid_argument("a tracing driver needs a sink");
}

void TracingDriver::before(DriverCall& call) {
  if (is_on_ == nullptr || is_on_->load(std::memory_order_relaxed)) call.start_ns = work_now_ns();
}

void TracingDriver::after(DriverCall& call) noexcept {
  if (call.start_ns == 0) return;  // it was off when the call began
  call.duration_ns = work_now_ns() - call.start_ns;
  try {
    sink_(call);
  } catch (...) {
  }
}

}  // namespace vtensor
