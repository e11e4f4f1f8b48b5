#include "vtensor/core/worker.h"

#include <utility>

namespace vtensor {

void Worker::post(Job job) {
  const std::lock_guard lock(mutex_);
  if (stopped_) return;
  if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
  jobs_.push_back(std::move(job));
  wake_.notify_one();
}

void Worker::drain() {
  std::unique_lock lock(mutex_);
  idle_.wait(lock, [this] { return jobs_.empty() && !running_job_; });
}

void Worker::stop() {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    jobs_.clear();
    wake_.notify_one();
    thread = std::move(thread_);
  }
  if (thread.joinable()) thread.join();
  std::unique_lock lock(mutex_);  // another thread may have come first, and be joining still
  idle_.wait(lock, [this] { return !running_job_; });
}

void Worker::run() {
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [this] { return stopped_ || !jobs_.empty(); });
    if (stopped_) break;
    const Job job = std::move(jobs_.front());
    jobs_.pop_front();
    running_job_ = true;
    lock.unlock();
    job();
    lock.lock();
    running_job_ = false;
    if (jobs_.empty()) idle_.notify_all();
  }
  jobs_.clear();
  idle_.notify_all();
}

}  // namespace vtensor
