// TracingDriver: hands every call, with its arguments, start, duration and outcome, to a sink.
//
// Thread-safety: the sink is called from whichever thread made the call, concurrently, after the
// inner driver has returned or thrown; it must be thread-safe. What it throws is swallowed: a trace
// must not change what it watches. call.handles is valid only inside the sink.
#pragma once

#include <atomic>
#include <functional>
#include <memory>

#include "vtensor/driver/wrappers/forwarding_driver.h"

namespace vtensor {

class TracingDriver final : public ForwardingDriver {
 public:
  using Sink = std::function<void(const DriverCall&)>;

  // While `is_on` is false calls pass through, unmeasured, at the cost of two branches. Null: on.
  TracingDriver(std::unique_ptr<Driver> inner, Sink sink,
                std::shared_ptr<const std::atomic<bool>> is_on = nullptr);

 protected:
  void before(DriverCall& call) override;
  void after(DriverCall& call) noexcept override;

 private:
  const Sink sink_;
  const std::shared_ptr<const std::atomic<bool>> is_on_;
};

}  // namespace vtensor
