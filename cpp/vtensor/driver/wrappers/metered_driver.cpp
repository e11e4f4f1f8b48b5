#include "vtensor/driver/wrappers/metered_driver.h"

#include "vtensor/driver/call_scope.h"
#include "vtensor/driver/work_clock.h"

namespace vtensor {

DriverStats MeteredDriver::stats() const noexcept {
  DriverStats stats;
  for (size_t i = 0; i < kNumCallKinds; ++i) {
    stats.calls[i] = {.num_calls = counters_[i].num_calls,
                      .num_failed = counters_[i].num_failed,
                      .total_ns = counters_[i].total_ns,
                      .hidden_ns = counters_[i].hidden_ns};
  }
  return stats;
}

void MeteredDriver::before(DriverCall& call) { call.start_ns = work_now_ns(); }

void MeteredDriver::after(DriverCall& call) noexcept {
  call.duration_ns = work_now_ns() - call.start_ns;
  Counters& counters = counters_[call_idx(call.kind)];
  ++counters.num_calls;
  counters.num_failed += call.ok ? 0 : 1;
  counters.total_ns += call.duration_ns;
  if (CallScope::is_worker()) counters.hidden_ns += call.duration_ns;
}

}  // namespace vtensor
