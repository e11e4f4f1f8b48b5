// GatedDriver: holds the next call of one kind up, once armed, until it is let through.
#pragma once

#include <atomic>
#include <future>

#include "vtensor/driver/wrappers/forwarding_driver.h"

namespace vtensor {

class GatedDriver final : public ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  std::promise<void> entered;
  std::promise<void> may_pass;
  void arm(CallKind kind = CallKind::kMap) {
    kind_ = kind;
    armed_ = true;
  }

 protected:
  void before(DriverCall& call) override {
    if (call.kind != kind_ || !armed_.exchange(false)) return;
    entered.set_value();
    may_pass.get_future().wait();
  }
  void after(DriverCall&) noexcept override {}

 private:
  std::atomic<CallKind> kind_ = CallKind::kMap;
  std::atomic<bool> armed_ = false;
};

}  // namespace vtensor
