// Worker: one thread that runs jobs in order, away from the scheduling thread.
//
// It sleeps when there is nothing to do, never needs the GIL, and holds no lock of its own while a
// job runs. A job must not throw: failures are the job's to report. Thread-safety: full.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace vtensor {

class Worker {
 public:
  using Job = std::function<void()>;

  Worker() = default;
  ~Worker() { stop(); }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Starts the thread at the first job. After stop() jobs are dropped.
  void post(Job job);
  // Returns when every job posted so far has run.
  void drain();
  // Drops the waiting jobs, finishes the running one, ends the thread. Not from inside a job.
  void stop();

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable idle_;
  std::deque<Job> jobs_;
  bool running_job_ = false;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace vtensor
