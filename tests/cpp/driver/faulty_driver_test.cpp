#include "tests/cpp/support/faulty_driver.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/cpp/support/drivers.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

constexpr size_t kChunk = 64 * kKiB;

TEST(FaultyDriver, exactly_the_kth_call_fails) {
  FaultyDriver driver(make_sim(), {.fail_at = 3});
  driver.create(kChunk);
  driver.create(kChunk);
  EXPECT_THROW(driver.create(kChunk), DriverError);
  EXPECT_NO_THROW(driver.create(kChunk));
}

TEST(FaultyDriver, a_persistent_fault_stays_until_the_plan_changes) {
  FaultyDriver driver(make_sim(), {.fail_at = 2, .persistent = true});
  driver.create(kChunk);
  EXPECT_THROW(driver.create(kChunk), DriverError);
  EXPECT_THROW(driver.create(kChunk), DriverError);
  driver.set_plan({});
  EXPECT_NO_THROW(driver.create(kChunk));
}

TEST(FaultyDriver, a_filter_counts_only_its_kind) {
  FaultyDriver driver(make_sim(), {.fail_at = 1, .only = CallKind::kRelease});
  const Handle chunk = driver.create(kChunk);
  EXPECT_THROW(driver.release(chunk, kChunk), DriverError);
  EXPECT_NO_THROW(driver.release(chunk, kChunk));
}

TEST(FaultyDriver, a_failed_call_does_not_reach_the_inner_driver) {
  auto sim = std::make_unique<SimDriver>();
  const SimDriver& inner = *sim;
  FaultyDriver driver(std::move(sim), {.fail_at = 1, .kind = FaultPlan::Kind::kOutOfMemory});
  EXPECT_THROW(driver.create(kChunk), OutOfMemoryError);
  EXPECT_EQ(inner.created_bytes(), 0u);
}

TEST(FaultyDriver, the_error_names_the_call) {
  FaultyDriver driver(make_sim(), {.fail_at = 1});
  try {
    driver.reserve(kChunk, kChunk);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call(), "reserve");
  }
}

TEST(FaultyDriver, a_new_plan_counts_from_now_on) {
  FaultyDriver driver(make_sim());
  driver.create(kChunk);
  driver.create(kChunk);
  driver.set_plan({.fail_at = 1});
  EXPECT_THROW(driver.create(kChunk), DriverError);
}

TEST(FaultyDriver, calls_are_counted_by_kind_failed_ones_too) {
  FaultyDriver driver(make_sim(), {.fail_at = 2});
  const Handle chunk = driver.create(kChunk);
  EXPECT_THROW(driver.create(kChunk), DriverError);
  driver.release(chunk, kChunk);
  EXPECT_EQ(driver.num_calls(CallKind::kCreate), 2);
  EXPECT_EQ(driver.num_calls(), 3);
  EXPECT_EQ(driver.num_failed(), 1);
}

TEST(FaultyDriver, of_many_threads_exactly_one_meets_the_fault) {
  FaultyDriver driver(make_sim(), {.fail_at = 100});
  std::atomic<int> num_caught{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 50; ++call) {
        try {
          driver.create(kChunk);
        } catch (const DriverError&) {
          ++num_caught;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_caught, 1);
}

}  // namespace
}  // namespace vtensor
