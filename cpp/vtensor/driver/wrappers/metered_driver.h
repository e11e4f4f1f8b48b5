// MeteredDriver: counts calls and their time by kind, cheaply enough (0.1 us) to stay on.
//
// Thread-safe. stats() may be called at any time; while calls run, its numbers are each right but
// not of one moment.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>

#include "vtensor/driver/wrappers/forwarding_driver.h"

namespace vtensor {

struct CallStats {
  int64_t num_calls = 0;   // failed ones too
  int64_t num_failed = 0;  // the inner driver threw
  int64_t total_ns = 0;
  int64_t hidden_ns = 0;  // of it, spent by the worker
};

struct DriverStats {
  std::array<CallStats, kNumCallKinds> calls{};

  const CallStats& operator[](CallKind kind) const { return calls[call_idx(kind)]; }
};

class MeteredDriver final : public ForwardingDriver {
 public:
  explicit MeteredDriver(std::unique_ptr<Driver> inner) : ForwardingDriver(std::move(inner)) {}

  DriverStats stats() const noexcept;

 protected:
  void before(DriverCall& call) override;
  void after(DriverCall& call) noexcept override;

 private:
  struct Counters {
    std::atomic<int64_t> num_calls{0};
    std::atomic<int64_t> num_failed{0};
    std::atomic<int64_t> total_ns{0};
    std::atomic<int64_t> hidden_ns{0};
  };
  std::array<Counters, kNumCallKinds> counters_{};
};

}  // namespace vtensor
