#include "vtensor/driver/sim/sim_driver.h"

#include <gtest/gtest.h>

#include <chrono>
#include <vector>

#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

constexpr size_t kChunk = 2 * kMiB;

TEST(SimDriver, a_terabyte_takes_no_memory) {
  SimDriver driver({.capacity_bytes = 1024 * kGiB});
  for (int i = 0; i < 1024; ++i) driver.create(kGiB);
  EXPECT_THROW(driver.create(kGiB), OutOfMemoryError);
  EXPECT_EQ(driver.created_bytes(), 1024 * kGiB);
}

TEST(SimDriver, no_latency_means_no_time) {
  SimDriver driver;
  driver.release(driver.create(kChunk), kChunk);
  EXPECT_EQ(driver.elapsed_us(), 0);
}

TEST(SimDriver, the_virtual_clock_adds_call_chunk_and_size_costs) {
  SimLatency latency;
  latency[CallKind::kMap] = {.per_call_us = 100, .per_chunk_us = 10, .per_mib_us = 1};
  SimDriver driver({.latency = latency});
  const uintptr_t range = driver.reserve(4 * kChunk, kChunk);
  driver.map(range, std::vector{driver.create(kChunk), driver.create(kChunk)}, kChunk);
  EXPECT_DOUBLE_EQ(driver.elapsed_us(), 100 + 2 * 10 + 4 * 1);
}

TEST(SimDriver, on_a100_one_set_access_over_a_run_is_cheaper_than_one_a_chunk) {
  const auto set_access_us = [](size_t num_calls) {
    SimDriver driver({.latency = SimLatency::a100()});
    const uintptr_t range = driver.reserve(8 * kChunk, kChunk);
    driver.map(range, std::vector(8, driver.create(kChunk)), kChunk);
    const double before_us = driver.elapsed_us();
    const size_t step = 8 * kChunk / num_calls;
    for (size_t i = 0; i < num_calls; ++i) {
      driver.set_access(range + i * step, step, Access::kReadWrite);
    }
    return driver.elapsed_us() - before_us;
  };
  EXPECT_DOUBLE_EQ(set_access_us(8), 8 * set_access_us(1));
}

TEST(SimDriver, a_failed_call_costs_nothing) {
  SimDriver driver({.capacity_bytes = kChunk, .latency = SimLatency::a100()});
  EXPECT_THROW(driver.create(2 * kChunk), OutOfMemoryError);
  EXPECT_EQ(driver.elapsed_us(), 0);
}

TEST(SimDriver, in_real_time_a_call_takes_as_long_as_it_costs) {
  SimLatency latency;
  latency[CallKind::kCreate] = {.per_chunk_us = 50};
  latency[CallKind::kRelease] = {.per_chunk_us = 2000};
  SimDriver driver({.latency = latency, .real_time = true});
  const auto start = std::chrono::steady_clock::now();
  driver.release(driver.create(kChunk), kChunk);
  EXPECT_GE(std::chrono::steady_clock::now() - start, std::chrono::microseconds(2050));
}

TEST(SimDriver, addresses_are_never_used_twice) {
  SimDriver driver;
  const uintptr_t range = driver.reserve(kChunk, kChunk);
  driver.free(range, kChunk);
  EXPECT_NE(driver.reserve(kChunk, kChunk), range);
}

TEST(SimDriver, the_granularity_can_be_cudas) {
  SimDriver driver({.granularity_bytes = kChunk});
  EXPECT_THROW(driver.create(64 * kKiB), std::invalid_argument);
  EXPECT_EQ(driver.granularity(), kChunk);
}

}  // namespace
}  // namespace vtensor
