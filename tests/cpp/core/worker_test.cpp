#include "vtensor/core/worker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace vtensor {
namespace {

TEST(Worker, runs_jobs_in_the_order_they_were_posted) {
  Worker worker;
  std::vector<int> order;
  for (int i = 0; i < 100; ++i) worker.post([&order, i] { order.push_back(i); });
  worker.drain();
  ASSERT_EQ(order.size(), 100U);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
}

TEST(Worker, drain_without_jobs_returns_at_once) {
  Worker worker;
  worker.drain();
}

TEST(Worker, a_job_may_post_another) {
  Worker worker;
  std::atomic<bool> done = false;
  worker.post([&] { worker.post([&] { done = true; }); });
  worker.drain();
  EXPECT_TRUE(done);
}

TEST(Worker, stop_finishes_the_running_job_and_drops_the_waiting_ones) {
  Worker worker;
  std::promise<void> started;
  std::promise<void> may_end;
  std::atomic<int> num_run = 0;
  worker.post([&] {
    started.set_value();
    may_end.get_future().wait();
    ++num_run;
  });
  worker.post([&] { ++num_run; });
  started.get_future().wait();
  std::thread stopper([&] { worker.stop(); });
  // Dropped at once only when stop() has begun; until then it waits behind the others.
  const auto probe = std::make_shared<int>();
  do {
    worker.post([probe] {});
    std::this_thread::yield();
  } while (probe.use_count() > 1);
  may_end.set_value();
  stopper.join();
  EXPECT_EQ(num_run, 1);
}

TEST(Worker, jobs_after_stop_are_dropped) {
  Worker worker;
  worker.stop();
  bool ran = false;
  worker.post([&] { ran = true; });
  worker.drain();
  EXPECT_FALSE(ran);
}

TEST(Worker, may_be_stopped_by_several_threads_at_once) {
  for (int i = 0; i < 50; ++i) {
    Worker worker;
    std::atomic<bool> finished = false;
    worker.post([&] {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      finished = true;
    });
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    std::atomic<int> num_late = 0;
    {
      std::vector<std::jthread> threads;
      for (int t = 0; t < 4; ++t) {
        threads.emplace_back([&] {
          worker.stop();
          // whoever returns may rely on it: no job runs any more
          const bool first = finished;
          std::this_thread::sleep_for(std::chrono::microseconds(300));
          num_late += static_cast<int>(first != finished);
        });
      }
    }
    EXPECT_EQ(num_late, 0);
  }
}

TEST(Worker, drain_returns_when_another_thread_stops_the_worker) {
  Worker worker;
  for (int i = 0; i < 20; ++i) {
    worker.post([] { std::this_thread::sleep_for(std::chrono::milliseconds(1)); });
  }
  std::thread stopper([&] { worker.stop(); });
  worker.drain();
  stopper.join();
}

}  // namespace
}  // namespace vtensor
