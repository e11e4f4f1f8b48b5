#include "tests/cpp/support/faulty_driver.h"

#include <cerrno>
#include <numeric>
#include <string>
#include <utility>

#include "vtensor/util/error.h"
#include "vtensor/util/text.h"

namespace vtensor {

FaultyDriver::FaultyDriver(std::unique_ptr<Driver> inner, const FaultPlan& plan)
    : ForwardingDriver(std::move(inner)), plan_(plan) {}

void FaultyDriver::set_plan(const FaultPlan& plan) {
  const std::lock_guard lock(mutex_);
  plan_ = plan;
  num_matching_ = 0;
}

int64_t FaultyDriver::num_calls(CallKind kind) const {
  const std::lock_guard lock(mutex_);
  return num_calls_[call_idx(kind)];
}

int64_t FaultyDriver::num_calls() const {
  const std::lock_guard lock(mutex_);
  return std::accumulate(num_calls_.begin(), num_calls_.end(), int64_t{0});
}

int64_t FaultyDriver::num_failed() const {
  const std::lock_guard lock(mutex_);
  return num_failed_;
}

void FaultyDriver::before(DriverCall& call) {
  fail_if_due(call);
  if (watcher_) watcher_(call);
}

void FaultyDriver::fail_if_due(const DriverCall& call) {
  const std::lock_guard lock(mutex_);
  ++num_calls_[call_idx(call.kind)];
  if (plan_.only.has_value() && *plan_.only != call.kind) return;
  ++num_matching_;
  const bool due =
      plan_.persistent ? num_matching_ >= plan_.fail_at : num_matching_ == plan_.fail_at;
  if (plan_.fail_at <= 0 || !due) return;
  ++num_failed_;
  if (plan_.kind == FaultPlan::Kind::kOutOfMemory) {
    throw OutOfMemoryError(call.size_bytes, 0, 0, "injected fault");
  }
  throw DriverError(std::string(call_name(call.kind)), EIO, errno_text(EIO),
                    span_text(call.addr, call.size_bytes), "injected fault");
}

}  // namespace vtensor
