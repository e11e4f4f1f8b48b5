#include "tests/cpp/support/limited_driver.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "tests/cpp/support/drivers.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

constexpr size_t kChunk = 64 * kKiB;

TEST(LimitedDriver, create_beyond_the_capacity_names_what_is_left) {
  LimitedDriver driver(make_sim(), 3 * kChunk);
  driver.create(2 * kChunk);
  try {
    driver.create(2 * kChunk);
    FAIL();
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.free_bytes(), kChunk);
    EXPECT_EQ(error.budget_bytes(), 3 * kChunk);
  }
}

TEST(LimitedDriver, release_makes_room_again) {
  LimitedDriver driver(make_sim(), kChunk);
  driver.release(driver.create(kChunk), kChunk);
  EXPECT_NO_THROW(driver.create(kChunk));
}

TEST(LimitedDriver, a_create_that_fails_inside_uses_no_capacity) {
  LimitedDriver driver(std::make_unique<FaultyDriver>(make_sim(), FaultPlan{.fail_at = 1}), kChunk);
  EXPECT_THROW(driver.create(kChunk), DriverError);
  EXPECT_EQ(driver.created_bytes(), 0u);
  EXPECT_NO_THROW(driver.create(kChunk));
}

TEST(LimitedDriver, a_release_that_fails_inside_gives_no_capacity_back) {
  LimitedDriver driver(make_sim(), 2 * kChunk);
  driver.release(driver.create(kChunk), kChunk);
  const Handle chunk = driver.create(kChunk);
  EXPECT_THROW(driver.release(chunk, 2 * kChunk), std::invalid_argument);
  EXPECT_EQ(driver.created_bytes(), kChunk);
}

TEST(LimitedDriver, threads_together_do_not_pass_the_cap) {
  LimitedDriver driver(make_sim(), 10 * kChunk);
  std::atomic<int> num_created{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int call = 0; call < 10; ++call) {
        try {
          driver.create(kChunk);
          ++num_created;
        } catch (const OutOfMemoryError&) {
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(num_created, 10);
}

}  // namespace
}  // namespace vtensor
