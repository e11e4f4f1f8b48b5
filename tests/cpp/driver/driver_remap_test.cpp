// Rule 9 of vtensor/driver/driver.h, on every driver: remapping in place and mapping copy-on-write
// where a driver can, a refusal where it cannot.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/cpp/support/each_driver.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

class DriverRemap : public EachDriver {};

INSTANTIATE_TEST_SUITE_P(Drivers, DriverRemap, testing::ValuesIn(all_drivers()),
                         [](const auto& tested) { return tested.param.name; });

#define REQUIRE_REMAP() \
  if (!driver_->remaps_in_place()) GTEST_SKIP() << "this driver does not remap in place"

TEST_P(DriverRemap, what_a_driver_lacks_it_refuses) {
  if (driver_->remaps_in_place()) GTEST_SKIP() << "this driver remaps in place";
  const auto chunks = create(2);
  map_rw(0, {chunks[0]});
  EXPECT_THROW(driver_->remap(at(0), {&chunks[1], 1}, chunk_bytes_, Access::kReadWrite),
               std::logic_error);
  EXPECT_THROW(driver_->set_access(at(0), chunk_bytes_, Access::kCopyOnWrite),
               std::invalid_argument);
}

TEST_P(DriverRemap, remap_puts_other_chunks_in_the_place_of_a_part_of_a_run) {
  REQUIRE_REMAP();
  const auto chunks = create(4);
  for (size_t i = 0; i < 4; ++i) driver_->fill(chunks[i], 0, 1, std::byte(i + 1));
  map_rw(0, {chunks[0], chunks[1], chunks[2]});
  driver_->remap(at(1), {&chunks[3], 1}, chunk_bytes_, Access::kReadWrite);
  EXPECT_EQ(byte_at(at(0)), 1);
  EXPECT_EQ(byte_at(at(1)), 4);
  EXPECT_EQ(byte_at(at(2)), 3);
  EXPECT_NO_THROW(driver_->release(chunks[1], chunk_bytes_));
  EXPECT_THROW(driver_->release(chunks[3], chunk_bytes_), std::invalid_argument);
}

TEST_P(DriverRemap, remap_refuses_what_is_not_mapped_and_changes_nothing) {
  REQUIRE_REMAP();
  const auto chunks = create(3);
  map_rw(0, {chunks[0]});
  EXPECT_THROW(driver_->remap(at(0), {&chunks[1], 2}, chunk_bytes_, Access::kReadWrite),
               std::invalid_argument);
  driver_->release(chunks[1], chunk_bytes_);
  EXPECT_THROW(driver_->remap(at(0), {&chunks[1], 1}, chunk_bytes_, Access::kReadWrite),
               std::invalid_argument);
  EXPECT_TRUE(is_writable(at(0)));
  EXPECT_NO_THROW(driver_->unmap(at(0), chunk_bytes_, chunk_bytes_));
}

// What is read while the system replaces the pages: ThreadSanitizer takes its call for a write.
__attribute__((no_sanitize("thread"))) size_t num_other_than_one(uintptr_t addr, size_t bytes) {
  size_t num_wrong = 0;
  for (size_t byte = 0; byte < bytes; byte += 512) {
    num_wrong += *reinterpret_cast<volatile char*>(addr + byte) != 1 ? 1U : 0U;
  }
  return num_wrong;
}

// No moment without the one chunk or the other: the reader would end the process (kGuard) or find
// a zero (kZero).
TEST_P(DriverRemap, whoever_reads_during_a_remap_sees_the_old_bytes_or_the_new_ones) {
  REQUIRE_REMAP();
  const auto chunks = create(2);
  driver_->fill(chunks[0], 0, chunk_bytes_, std::byte{1});
  driver_->fill(chunks[1], 0, chunk_bytes_, std::byte{1});
  map_rw(0, {chunks[0]});
  std::atomic<bool> stop = false;
  size_t num_wrong = 0;
  std::thread reader([&] {
    while (!stop) num_wrong += num_other_than_one(at(0), chunk_bytes_);
  });
  for (size_t i = 1; i < 500; ++i) {
    const Access access = i % 3 == 0 ? Access::kCopyOnWrite : Access::kReadWrite;
    driver_->remap(at(0), {&chunks[i % 2], 1}, chunk_bytes_, access);
    driver_->set_access(at(0), chunk_bytes_, i % 5 == 0 ? Access::kRead : Access::kReadWrite);
  }
  stop = true;
  reader.join();
  EXPECT_EQ(num_wrong, 0U);
}

TEST_P(DriverRemap, what_is_written_copy_on_write_stays_in_the_range) {
  REQUIRE_REMAP();
  const auto chunks = create(1);
  driver_->fill(chunks[0], 0, 1, std::byte{1});
  map_rw(0, chunks);
  map_rw(4, chunks);
  driver_->set_access(at(0), chunk_bytes_, Access::kCopyOnWrite);
  EXPECT_EQ(byte_at(at(0)), 1);
  byte_at(at(0)) = 9;
  EXPECT_EQ(byte_at(at(4)), 1);
  EXPECT_EQ(first_byte(chunks[0]), std::byte{1});
  driver_->set_access(at(0), chunk_bytes_, Access::kReadWrite);
  EXPECT_EQ(byte_at(at(0)), 1);
  byte_at(at(0)) = 5;
  EXPECT_EQ(byte_at(at(4)), 5);
}

}  // namespace
}  // namespace vtensor
