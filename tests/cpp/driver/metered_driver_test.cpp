#include "vtensor/driver/wrappers/metered_driver.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/cpp/support/drivers.h"

namespace vtensor {
namespace {

constexpr size_t kChunk = 64 * kKiB;

TEST(MeteredDriver, calls_are_counted_by_kind) {
  MeteredDriver driver(make_sim());
  driver.release(driver.create(kChunk), kChunk);
  driver.create(kChunk);
  EXPECT_EQ(driver.stats()[CallKind::kCreate].num_calls, 2);
  EXPECT_EQ(driver.stats()[CallKind::kRelease].num_calls, 1);
  EXPECT_EQ(driver.stats()[CallKind::kMap].num_calls, 0);
}

TEST(MeteredDriver, failed_calls_are_counted_apart) {
  MeteredDriver driver(make_sim());
  EXPECT_THROW(driver.create(1), std::invalid_argument);
  EXPECT_EQ(driver.stats()[CallKind::kCreate].num_calls, 1);
  EXPECT_EQ(driver.stats()[CallKind::kCreate].num_failed, 1);
}

TEST(MeteredDriver, time_adds_up) {
  SimLatency latency;
  latency[CallKind::kCreate] = {.per_call_us = 500};
  MeteredDriver driver(
      std::make_unique<SimDriver>(SimOptions{.latency = latency, .real_time = true}));
  driver.create(kChunk);
  driver.create(kChunk);
  EXPECT_GE(driver.stats()[CallKind::kCreate].total_ns, 1'000'000);
}

TEST(MeteredDriver, threads_are_all_counted) {
  MeteredDriver driver(make_sim());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 100; ++call) driver.release(driver.create(kChunk), kChunk);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver.stats()[CallKind::kRelease].num_calls, 400);
}

}  // namespace
}  // namespace vtensor
