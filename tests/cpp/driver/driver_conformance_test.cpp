// The rules of vtensor/driver/driver.h, on every driver. Contents are checked through read() and
// write(); addresses are touched only where they are this process's own.
#include <gtest/gtest.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <vector>

#include "tests/cpp/support/each_driver.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

class DriverConformance : public EachDriver {};

INSTANTIATE_TEST_SUITE_P(Drivers, DriverConformance, testing::ValuesIn(all_drivers()),
                         [](const auto& tested) { return tested.param.name; });

#define REQUIRE_MEMORY() \
  if (!driver_->has_memory()) GTEST_SKIP() << "this driver has no memory"
#define REQUIRE_CPU_ADDRESSES() \
  if (!GetParam().cpu_addresses) GTEST_SKIP() << "its addresses are not this process's"

// --- reserve and free ---

TEST_P(DriverConformance, reserve_honours_the_alignment) {
  const size_t alignment = std::max(driver_->granularity(), 4 * kMiB);
  const uintptr_t addr = driver_->reserve(chunk_bytes_, alignment);
  EXPECT_EQ(addr % alignment, 0u);
  driver_->free(addr, chunk_bytes_);
}

TEST_P(DriverConformance, reserved_ranges_do_not_overlap) {
  const uintptr_t other = driver_->reserve(8 * chunk_bytes_, driver_->granularity());
  EXPECT_TRUE(other >= at(8) || other + 8 * chunk_bytes_ <= range_);
}

TEST_P(DriverConformance, reserve_refuses_an_impossible_shape) {
  const size_t unit = driver_->granularity();
  EXPECT_THROW(driver_->reserve(0, unit), std::invalid_argument);
  EXPECT_THROW(driver_->reserve(unit + 1, unit), std::invalid_argument);
  EXPECT_THROW(driver_->reserve(unit, 3 * unit), std::invalid_argument);
}

TEST_P(DriverConformance, free_refuses_a_range_with_a_mapped_chunk_until_it_is_unmapped) {
  map_rw(3, create(1));
  EXPECT_THROW(driver_->free(range_, 8 * chunk_bytes_), std::invalid_argument);
  driver_->unmap(at(3), chunk_bytes_, chunk_bytes_);
  EXPECT_NO_THROW(driver_->free(range_, 8 * chunk_bytes_));
}

TEST_P(DriverConformance, free_refuses_what_is_not_exactly_a_reserved_range) {
  EXPECT_THROW(driver_->free(range_, chunk_bytes_), std::invalid_argument);
  EXPECT_THROW(driver_->free(at(1), 7 * chunk_bytes_), std::invalid_argument);
  driver_->free(range_, 8 * chunk_bytes_);
  EXPECT_THROW(driver_->free(range_, 8 * chunk_bytes_), std::invalid_argument);
}

// --- create and release ---

TEST_P(DriverConformance, created_chunks_are_distinct) {
  const auto handles = create(3);
  EXPECT_TRUE(handles[0] != handles[1] && handles[1] != handles[2] && handles[0] != handles[2]);
}

TEST_P(DriverConformance, create_refuses_a_size_that_is_no_multiple_of_the_granularity) {
  EXPECT_THROW(driver_->create(0), std::invalid_argument);
  EXPECT_THROW(driver_->create(driver_->granularity() + 1), std::invalid_argument);
}

TEST_P(DriverConformance, create_at_the_capacity_throws_and_recovers_after_a_release) {
  const size_t big = 16 * kMiB;
  std::vector<Handle> handles;
  try {
    for (int i = 0; i < 1000; ++i) handles.push_back(driver_->create(big));
    GTEST_SKIP() << "this driver has no small capacity";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.asked_bytes(), big);
  }
  ASSERT_GE(handles.size(), 2u);
  driver_->release(handles.back(), big);
  EXPECT_NO_THROW(driver_->create(big));
}

TEST_P(DriverConformance, release_refuses_a_chunk_twice) {
  const Handle handle = driver_->create(chunk_bytes_);
  driver_->release(handle, chunk_bytes_);
  EXPECT_THROW(driver_->release(handle, chunk_bytes_), std::invalid_argument);
}

TEST_P(DriverConformance, release_refuses_another_size_than_was_created) {
  const Handle handle = driver_->create(chunk_bytes_);
  EXPECT_THROW(driver_->release(handle, 2 * chunk_bytes_), std::invalid_argument);
  EXPECT_NO_THROW(driver_->release(handle, chunk_bytes_));
}

TEST_P(DriverConformance, release_of_a_mapped_chunk_is_refused_until_the_last_unmap) {
  if (!GetParam().refuses_mapped_release) GTEST_SKIP() << "keeps the memory instead";
  const auto chunk = create(1);
  map_rw(0, chunk);
  map_rw(1, chunk);
  EXPECT_THROW(driver_->release(chunk[0], chunk_bytes_), std::invalid_argument);
  driver_->unmap(at(0), chunk_bytes_, chunk_bytes_);
  EXPECT_THROW(driver_->release(chunk[0], chunk_bytes_), std::invalid_argument);
  driver_->unmap(at(1), chunk_bytes_, chunk_bytes_);
  EXPECT_NO_THROW(driver_->release(chunk[0], chunk_bytes_));
}

TEST_P(DriverConformance, a_fresh_chunk_reads_as_zeros_also_where_an_old_one_was) {
  Handle handle = driver_->create(chunk_bytes_);
  driver_->fill(handle, 0, chunk_bytes_, std::byte{0xff});
  driver_->release(handle, chunk_bytes_);
  handle = driver_->create(chunk_bytes_);
  std::vector<std::byte> bytes(chunk_bytes_, std::byte{1});
  driver_->read(handle, 0, bytes);
  EXPECT_EQ(std::ranges::count(bytes, std::byte{0}), static_cast<int64_t>(chunk_bytes_));
}

// --- map, set_access, unmap ---

TEST_P(DriverConformance, map_refuses_addresses_that_are_mapped) {
  map_rw(2, create(2));
  const auto more = create(3);
  EXPECT_THROW(driver_->map(at(1), more, chunk_bytes_), std::invalid_argument);
  EXPECT_THROW(driver_->map(at(3), more, chunk_bytes_), std::invalid_argument);
  EXPECT_NO_THROW(driver_->map(at(4), more, chunk_bytes_));
}

TEST_P(DriverConformance, map_refuses_addresses_outside_one_reserved_range) {
  const auto chunks = create(2);
  EXPECT_THROW(driver_->map(at(7), chunks, chunk_bytes_), std::invalid_argument);
  EXPECT_THROW(driver_->map(range_ - chunk_bytes_, chunks, chunk_bytes_), std::invalid_argument);
}

TEST_P(DriverConformance, map_refuses_a_released_chunk_and_maps_none_of_the_others) {
  auto chunks = create(3);
  driver_->release(chunks[2], chunk_bytes_);
  EXPECT_THROW(driver_->map(at(0), chunks, chunk_bytes_), std::invalid_argument);
  EXPECT_NO_THROW(driver_->release(chunks[0], chunk_bytes_));
  EXPECT_NO_THROW(driver_->free(range_, 8 * chunk_bytes_));
}

TEST_P(DriverConformance, map_of_no_chunks_does_nothing) {
  driver_->map(range_, {}, chunk_bytes_);
  EXPECT_NO_THROW(driver_->free(range_, 8 * chunk_bytes_));
}

TEST_P(DriverConformance, set_access_refuses_addresses_that_are_not_mapped) {
  driver_->map(at(0), create(2), chunk_bytes_);
  EXPECT_THROW(driver_->set_access(at(0), 3 * chunk_bytes_, Access::kReadWrite),
               std::invalid_argument);
  EXPECT_THROW(driver_->set_access(at(4), chunk_bytes_, Access::kReadWrite), std::invalid_argument);
}

TEST_P(DriverConformance, set_access_spans_chunks_of_several_map_calls) {
  const auto chunks = create(4);
  for (size_t i = 0; i < 4; ++i) driver_->map(at(i), {&chunks[3 - i], 1}, chunk_bytes_);
  EXPECT_NO_THROW(driver_->set_access(at(0), 4 * chunk_bytes_, Access::kReadWrite));
}

TEST_P(DriverConformance, unmap_refuses_holes_and_parts_of_chunks) {
  map_rw(0, create(2));
  EXPECT_THROW(driver_->unmap(at(0), 3 * chunk_bytes_, chunk_bytes_), std::invalid_argument);
  EXPECT_THROW(driver_->unmap(at(4), chunk_bytes_, chunk_bytes_), std::invalid_argument);
  if (driver_->granularity() < chunk_bytes_) {
    const size_t part = driver_->granularity();
    EXPECT_THROW(driver_->unmap(at(0), part, chunk_bytes_), std::invalid_argument);
    EXPECT_THROW(driver_->unmap(at(0) + part, chunk_bytes_, chunk_bytes_), std::invalid_argument);
  }
  EXPECT_NO_THROW(driver_->unmap(at(0), 2 * chunk_bytes_, chunk_bytes_));
}

TEST_P(DriverConformance, unmap_takes_any_run_out_of_a_larger_mapping) {
  map_rw(0, create(6));
  driver_->unmap(at(2), 2 * chunk_bytes_, chunk_bytes_);
  EXPECT_THROW(driver_->unmap(at(0), 6 * chunk_bytes_, chunk_bytes_), std::invalid_argument);
  driver_->unmap(at(0), 2 * chunk_bytes_, chunk_bytes_);
  driver_->unmap(at(4), 2 * chunk_bytes_, chunk_bytes_);
  EXPECT_NO_THROW(driver_->free(range_, 8 * chunk_bytes_));
}

TEST_P(DriverConformance, a_range_is_mapped_again_after_unmap) {
  const auto chunks = create(4);
  for (int round = 0; round < 3; ++round) {
    map_rw(0, chunks);
    driver_->unmap(at(0), 4 * chunk_bytes_, chunk_bytes_);
  }
  EXPECT_NO_THROW(driver_->free(range_, 8 * chunk_bytes_));
}

// --- contents ---

TEST_P(DriverConformance, contents_survive_unmap_and_map_elsewhere) {
  REQUIRE_MEMORY();
  const auto chunk = create(1);
  const std::byte mark{42};
  map_rw(0, chunk);
  driver_->write(chunk[0], 0, {&mark, 1});
  driver_->unmap(at(0), chunk_bytes_, chunk_bytes_);
  map_rw(5, chunk);
  EXPECT_EQ(first_byte(chunk[0]), mark);
}

TEST_P(DriverConformance, copy_moves_bytes_between_chunks_at_any_offset) {
  REQUIRE_MEMORY();
  const auto chunks = create(2);
  const std::vector<std::byte> in = {std::byte{1}, std::byte{2}, std::byte{3}};
  std::vector<std::byte> out(4);
  driver_->write(chunks[0], 5, in);
  driver_->copy(chunks[1], chunk_bytes_ - 3, chunks[0], 5, 3);
  driver_->read(chunks[1], chunk_bytes_ - 4, out);
  EXPECT_EQ(out, (std::vector<std::byte>{std::byte{0}, in[0], in[1], in[2]}));
}

TEST_P(DriverConformance, fill_writes_the_bytes_it_was_given_and_no_others) {
  REQUIRE_MEMORY();
  const Handle chunk = create(1)[0];
  std::vector<std::byte> out(4);
  driver_->fill(chunk, 1, 2, std::byte{9});
  driver_->read(chunk, 0, out);
  EXPECT_EQ(out, (std::vector<std::byte>{std::byte{0}, std::byte{9}, std::byte{9}, std::byte{0}}));
}

TEST_P(DriverConformance, contents_outside_a_chunk_are_refused) {
  const auto chunks = create(2);
  std::vector<std::byte> bytes(2);
  EXPECT_THROW(driver_->read(chunks[0], chunk_bytes_ - 1, bytes), std::invalid_argument);
  EXPECT_THROW(driver_->write(chunks[0], chunk_bytes_ + 1, bytes), std::invalid_argument);
  EXPECT_THROW(driver_->fill(chunks[0], 1, SIZE_MAX, std::byte{0}), std::invalid_argument);
  EXPECT_THROW(driver_->copy(chunks[0], 1, chunks[1], 0, chunk_bytes_), std::invalid_argument);
}

TEST_P(DriverConformance, contents_of_a_released_chunk_are_refused) {
  const Handle chunk = create(1)[0];
  driver_->release(chunk, chunk_bytes_);
  std::vector<std::byte> bytes(1);
  EXPECT_THROW(driver_->read(chunk, 0, bytes), std::invalid_argument);
  EXPECT_THROW(driver_->fill(chunk, 0, 1, std::byte{0}), std::invalid_argument);
}

// --- through addresses ---

TEST_P(DriverConformance, a_chunk_mapped_twice_shows_the_same_bytes_at_both_addresses) {
  REQUIRE_CPU_ADDRESSES();
  const auto chunk = create(1);
  map_rw(0, chunk);
  map_rw(4, chunk);
  byte_at(at(0) + 7) = 42;
  EXPECT_EQ(byte_at(at(4) + 7), 42);
  byte_at(at(4) + 7) = 43;
  EXPECT_EQ(byte_at(at(0) + 7), 43);
}

TEST_P(DriverConformance, bytes_at_an_address_and_bytes_of_the_chunk_are_the_same) {
  REQUIRE_CPU_ADDRESSES();
  const auto chunk = create(1);
  map_rw(0, chunk);
  byte_at(at(0)) = 42;
  EXPECT_EQ(first_byte(chunk[0]), std::byte{42});
}

TEST_P(DriverConformance, the_handles_of_one_map_call_appear_in_their_order) {
  REQUIRE_CPU_ADDRESSES();
  auto chunks = create(4);
  for (size_t i = 0; i < 4; ++i) driver_->fill(chunks[i], 0, 1, std::byte(i));
  const std::vector<size_t> order = {2, 3, 0, 3};
  driver_->map(at(0), std::vector{chunks[2], chunks[3], chunks[0], chunks[3]}, chunk_bytes_);
  driver_->set_access(at(0), 4 * chunk_bytes_, Access::kRead);
  for (size_t i = 0; i < 4; ++i) EXPECT_EQ(byte_at(at(i)), order[i]);
}

TEST_P(DriverConformance, a_mapped_chunk_can_not_be_reached_before_set_access) {
  REQUIRE_CPU_ADDRESSES();
  const auto chunk = create(1);
  driver_->fill(chunk[0], 0, chunk_bytes_, std::byte{42});
  driver_->map(at(0), chunk, chunk_bytes_);
  EXPECT_FALSE(is_writable(at(0)));
  if (is_readable(at(0))) {
    EXPECT_EQ(byte_at(at(0)), 0);  // the zero tail
  }
}

TEST_P(DriverConformance, access_can_be_narrowed_and_widened) {
  REQUIRE_CPU_ADDRESSES();
  map_rw(0, create(3));
  driver_->set_access(at(1), chunk_bytes_, Access::kRead);
  EXPECT_TRUE(is_writable(at(0)) && is_readable(at(1)) && is_writable(at(2)));
  EXPECT_FALSE(is_writable(at(1)));
  driver_->set_access(at(0), 3 * chunk_bytes_, Access::kNone);
  EXPECT_FALSE(is_readable(at(0)) || is_readable(at(1)) || is_readable(at(2)));
  driver_->set_access(at(0), 3 * chunk_bytes_, Access::kReadWrite);
  EXPECT_TRUE(is_writable(at(0)) && is_writable(at(1)) && is_writable(at(2)));
}

TEST_P(DriverConformance, unmapped_addresses_show_the_tail_before_and_after_a_mapping) {
  REQUIRE_CPU_ADDRESSES();
  const auto expect_tail = [&](uintptr_t addr) {
    EXPECT_FALSE(is_writable(addr));
    EXPECT_EQ(is_readable(addr), GetParam().unmapped == UnmappedPolicy::kZero);
    if (GetParam().unmapped == UnmappedPolicy::kZero) {
      EXPECT_EQ(byte_at(addr), 0);
    }
  };
  expect_tail(at(1));
  map_rw(0, create(2));
  byte_at(at(1)) = 42;
  expect_tail(at(2));
  driver_->unmap(at(1), chunk_bytes_, chunk_bytes_);
  expect_tail(at(1));
  EXPECT_TRUE(is_writable(at(0)));
}

TEST_P(DriverConformance, a_mapped_chunk_is_committed_to_its_last_byte) {
  REQUIRE_CPU_ADDRESSES();
  const auto chunks = create(2);
  map_rw(0, chunks);
  byte_at(at(2) - 1) = 42;
  std::byte last{};
  driver_->read(chunks[1], chunk_bytes_ - 1, {&last, 1});
  EXPECT_EQ(last, std::byte{42});
}

// --- threads ---

TEST_P(DriverConformance, threads_on_their_own_ranges_and_chunks_do_not_disturb_each_other) {
  const auto work = [&](size_t thread_idx) {
    const uintptr_t range = driver_->reserve(4 * chunk_bytes_, driver_->granularity());
    for (int round = 0; round < 10; ++round) {
      std::vector<Handle> chunks;
      for (int i = 0; i < 4; ++i) chunks.push_back(driver_->create(chunk_bytes_));
      driver_->map(range, chunks, chunk_bytes_);
      driver_->set_access(range, 4 * chunk_bytes_, Access::kReadWrite);
      for (const Handle chunk : chunks) driver_->fill(chunk, 0, 1, std::byte(thread_idx));
      for (const Handle chunk : chunks) {
        EXPECT_EQ(first_byte(chunk), std::byte(driver_->has_memory() ? thread_idx : 0));
      }
      driver_->unmap(range, 4 * chunk_bytes_, chunk_bytes_);
      for (const Handle chunk : chunks) driver_->release(chunk, chunk_bytes_);
    }
    driver_->free(range, 4 * chunk_bytes_);
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < 4; ++i) threads.emplace_back(work, i + 1);
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace vtensor
