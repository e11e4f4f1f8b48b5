// CallScope: for whom this thread is calling the driver, so that wrappers below can tell.
//
//   const CallScope scope(vtensor.id);   // until the end of the block: calls are made for it
//
// Thread-safety: the state is the thread's own. Scopes nest; the inner one counts.
#pragma once

#include <cstdint>

namespace vtensor {

class CallScope {
 public:
  explicit CallScope(uint64_t vtensor) : CallScope(vtensor, current_.is_worker) {}
  CallScope(uint64_t vtensor, bool is_worker) : outer_(current_) {
    current_ = {vtensor, is_worker};
  }
  ~CallScope() { current_ = outer_; }
  CallScope(const CallScope&) = delete;
  CallScope& operator=(const CallScope&) = delete;

  // 0: for none in particular.
  static uint64_t vtensor() noexcept { return current_.vtensor; }
  // True on the worker: no step waits for this call.
  static bool is_worker() noexcept { return current_.is_worker; }

 private:
  struct State {
    uint64_t vtensor;
    bool is_worker;
  };
  inline static constinit thread_local State current_{0, false};

  State outer_;
};

}  // namespace vtensor
