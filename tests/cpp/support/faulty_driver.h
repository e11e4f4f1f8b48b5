// FaultyDriver: fails the k-th call of the driver it wraps, to test that callers roll back.
//
// Thread-safe. A failing call does not reach the inner driver: it has changed nothing (rule 1).
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "vtensor/driver/wrappers/forwarding_driver.h"

namespace vtensor {

struct FaultPlan {
  enum class Kind { kOutOfMemory, kDriverError };

  int64_t fail_at = 0;             // the k-th matching call from now on, 1-based; 0: never
  std::optional<CallKind> only{};  // calls of this kind match; nothing: all do
  Kind kind = Kind::kDriverError;
  bool persistent = false;  // every matching call from the k-th on fails, not just that one
};

class FaultyDriver final : public ForwardingDriver {
 public:
  explicit FaultyDriver(std::unique_ptr<Driver> inner, const FaultPlan& plan = {});

  // Starts counting matching calls from 0 again. May be called while others use the driver.
  void set_plan(const FaultPlan& plan);

  // Runs before every call that does not fail. Not while others use the driver.
  void watch(std::function<void(const DriverCall&)> watcher) { watcher_ = std::move(watcher); }

  // Calls made since construction, failed ones too: of one kind, or all.
  int64_t num_calls(CallKind kind) const;
  int64_t num_calls() const;
  int64_t num_failed() const;  // by this wrapper

 protected:
  void before(DriverCall& call) override;
  void after(DriverCall&) noexcept override {}

 private:
  void fail_if_due(const DriverCall& call);

  std::function<void(const DriverCall&)> watcher_;
  mutable std::mutex mutex_;  // guards all below
  FaultPlan plan_;
  int64_t num_matching_ = 0;  // since set_plan
  int64_t num_failed_ = 0;
  std::array<int64_t, kNumCallKinds> num_calls_{};
};

}  // namespace vtensor
