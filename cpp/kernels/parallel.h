// Parallel: runs one function on several threads, on the pool that the caller's process has
// already.
//
// torch's operators run on OpenMP's threads, which spin for a while after each region. A second
// pool would fight them for the cores, so the kernel enters the same runtime by the function that
// compiled `#pragma omp parallel` regions call, GOMP_parallel (libgomp, and LLVM's and Intel's
// runtimes have it). Its address comes from outside: nothing here is linked with OpenMP.
//
// Thread-safety: a value; run() may be called from any thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

namespace vtensor::kernels {

class Parallel {
 public:
  // void GOMP_parallel(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags)
  using Start = void (*)(void (*)(void*), void*, unsigned, unsigned);

  Parallel() = default;  // the calling thread alone
  explicit Parallel(Start start) : start_(start) {}

  bool can_fork() const { return start_ != nullptr; }

  // Calls fn() on at most `num_threads` threads, the caller among them; returns when all have
  // returned. How many there are is the runtime's choice: fn must share the work out by itself.
  // REQUIRES: fn does not throw.
  template <class Fn>
  void run(int num_threads, Fn& fn) const {
    if (num_threads <= 1 || start_ == nullptr) {
      fn();
      return;
    }
    start_([](void* data) { (*static_cast<Fn*>(data))(); }, &fn, static_cast<unsigned>(num_threads),
           0);
  }

  // Calls fn(begin, end) for [0, total), cut into `parts` that so many threads draw one by one: of
  // more parts than threads, one that is kept from its CPU leaves the rest to the others.
  // REQUIRES: fn does not throw.
  template <class Fn>
  void share_out(int64_t total, int64_t parts, int64_t num_threads, const Fn& fn) const {
    std::atomic<int64_t> next{0};
    auto work = [&] {
      for (int64_t part = next++; part < parts; part = next++) {
        fn(total * part / parts, total * (part + 1) / parts);
      }
    };
    run(static_cast<int>(std::min(num_threads, parts)), work);
  }

 private:
  Start start_ = nullptr;
};

}  // namespace vtensor::kernels
