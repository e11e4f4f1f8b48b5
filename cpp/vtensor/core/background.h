// Background: what the worker does for a manager: mapping ahead of need, and upkeep.
//
// Driver work runs without the manager's mutex; the vTensors and chunks in the worker's hands are
// marked meanwhile, and callers that need them wait here. A job does one extension or one piece of
// upkeep and lets callers that wait go first: they wait for one chunk at most, since an extension
// is left off between two and posted again. Never fails: failures are counted, and met again by
// whoever needs the memory.
//
// Thread-safety: by the manager's mutex, which callers hold where a lock is asked for.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "vtensor/core/core.h"
#include "vtensor/core/trace.h"
#include "vtensor/core/worker.h"

namespace vtensor {

class Background {
 public:
  using Lock = std::unique_lock<std::mutex>;

  Background(Core& core, TraceWriter& trace, std::mutex& mutex)
      : core_(core), trace_(trace), mutex_(mutex) {}

  // Posts mapping ahead of need, of those that need it, and upkeep if any is due.
  void post(const Lock& lock, std::span<const VTensorId> ids, std::span<const size_t> num_tokens);
  // Notes that no query below token num_tokens[i] of ids[i] follows, and posts giving back what
  // windows have left then, once steps that may read it are over. A comparison each while nothing
  // is due.
  void post_forget(const Lock& lock, std::span<const VTensorId> ids,
                   std::span<const size_t> num_tokens);
  // Returns when the worker has nothing left to do. Requires: the mutex is not held.
  void drain() { worker_.drain(); }
  // Ends the thread. Requires: the mutex is not held.
  void stop() { worker_.stop(); }

  // Both let others at the mutex meanwhile: what was checked before must be checked again.
  void wait_until_idle(Lock& lock, std::span<const VTensorId> ids);  // none of them is busy
  void wait_until_quiet(Lock& lock);  // no chunk is claimed, nothing is being given back

  // Does driver work in this thread; others have the mutex meanwhile. Requires: it has claims, or
  // sleep() and close() would not wait for it.
  void run_without(Lock& lock, const std::function<void()>& work);

  // The worker, or an extension of another thread, holds chunks that others may have in a moment.
  bool holds_chunks() const { return gives_back_ || !core_.state.claimed.empty(); }

  uint64_t hidden_ns() const { return hidden_ns_; }
  size_t num_rows_mapped() const { return num_rows_mapped_; }
  size_t num_failures() const { return num_failures_; }

 private:
  void post_upkeep();
  void map_ahead(VTensorId id, size_t num_tokens);
  void give_back(const std::vector<VTensorId>& ids);
  bool run_upkeep(Lock& lock);

  Core& core_;
  TraceWriter& trace_;
  std::mutex& mutex_;
  std::condition_variable progress_;     // a job has ended, or a caller no longer waits
  std::atomic<size_t> num_waiting_ = 0;  // callers in wait_until_quiet(); read without the mutex
  bool gives_back_ = false;              // the worker unmaps without the mutex
  bool upkeep_posted_ = false;
  uint64_t hidden_ns_ = 0;
  size_t num_rows_mapped_ = 0;
  size_t num_failures_ = 0;
  Worker worker_;  // last: it stops before anything above goes away
};

}  // namespace vtensor
