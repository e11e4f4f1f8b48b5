#include "vtensor/driver/host/host_driver.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/support/drivers.h"
#include "tests/cpp/support/fake_system.h"
#include "vtensor/driver/host/host_memory.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

constexpr size_t kChunk = 2 * kMiB;

HostOptions options(UnmappedPolicy unmapped = UnmappedPolicy::kGuard) {
  return {.capacity_bytes = 64 * kMiB, .unmapped = unmapped};
}

std::vector<Handle> create(Driver& driver, size_t num_chunks, size_t chunk_bytes = kChunk) {
  std::vector<Handle> handles;
  for (size_t i = 0; i < num_chunks; ++i) handles.push_back(driver.create(chunk_bytes));
  return handles;
}

void map_rw(Driver& driver, uintptr_t addr, const std::vector<Handle>& handles,
            size_t chunk_bytes = kChunk) {
  driver.map(addr, handles, chunk_bytes);
  driver.set_access(addr, handles.size() * chunk_bytes, Access::kReadWrite);
}

// --- memory ---

class HostDriverChunkSizes : public testing::TestWithParam<size_t> {};

INSTANTIATE_TEST_SUITE_P(Sizes, HostDriverChunkSizes,
                         testing::Values(4 * kKiB, 12 * kKiB, 64 * kKiB, 2 * kMiB,
                                         2 * kMiB + 4 * kKiB, 3 * kMiB, 4 * kMiB),
                         testing::PrintToStringParamName());

TEST_P(HostDriverChunkSizes, memory_is_taken_at_create_and_goes_back_at_release) {
  HostDriver driver(options());
  const auto chunks = create(driver, 4, GetParam());
  EXPECT_EQ(driver.resident_bytes(), 4 * GetParam());
  for (const Handle chunk : chunks) driver.release(chunk, GetParam());
  EXPECT_EQ(driver.resident_bytes(), 0u);
  EXPECT_EQ(driver.created_bytes(), 0u);
}

TEST_P(HostDriverChunkSizes, touching_every_byte_takes_no_more_memory) {
  HostDriver driver(options());
  const auto chunks = create(driver, 3, GetParam());
  const uintptr_t range = driver.reserve(3 * GetParam(), kChunk);
  map_rw(driver, range, chunks, GetParam());
  std::fill_n(&byte_at(range), 3 * GetParam(), static_cast<unsigned char>(7));
  EXPECT_EQ(driver.resident_bytes(), 3 * GetParam());
}

TEST_P(HostDriverChunkSizes, small_pages_serve_every_size_too) {
  HostOptions small = options();
  small.huge_pages = false;
  HostDriver driver(small);
  const auto chunks = create(driver, 2, GetParam());
  EXPECT_EQ(driver.resident_bytes(), 2 * GetParam());
  driver.release(chunks[0], GetParam());
  EXPECT_EQ(driver.resident_bytes(), GetParam());
}

TEST(HostDriver, chunks_of_another_size_are_refused) {
  HostDriver driver(options());
  const Handle chunk = driver.create(64 * kKiB);
  EXPECT_THROW(driver.create(4 * kKiB), std::invalid_argument);
  EXPECT_THROW(driver.release(chunk, 4 * kKiB), std::invalid_argument);
}

TEST(HostDriver, unmapping_gives_no_memory_back) {
  HostDriver driver(options());
  const uintptr_t range = driver.reserve(kChunk, kChunk);
  map_rw(driver, range, create(driver, 1));
  driver.unmap(range, kChunk, kChunk);
  EXPECT_EQ(driver.resident_bytes(), kChunk);
}

TEST(HostDriver, places_given_back_are_used_again_up_to_the_capacity) {
  HostDriver driver({.capacity_bytes = 8 * kMiB});
  const auto chunks = create(driver, 8 * kMiB / (64 * kKiB), 64 * kKiB);
  for (size_t i = 0; i < chunks.size(); i += 2) driver.release(chunks[i], 64 * kKiB);
  EXPECT_NO_THROW(create(driver, chunks.size() / 2, 64 * kKiB));
  EXPECT_THROW(driver.create(64 * kKiB), OutOfMemoryError);
}

TEST(HostDriver, huge_pages_are_active_where_the_kernel_collapses) {
  HostDriver driver(options());
  if (!driver.huge_pages_active()) GTEST_SKIP() << "this kernel does not";
  const auto huge_kib = [] {
    std::ifstream file("/proc/meminfo");
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("ShmemHugePages:")) return std::stoull(line.substr(15));
    }
    return 0ull;
  };
  const auto before = huge_kib();
  create(driver, 16);
  EXPECT_GE(huge_kib(), before + 8 * 2048);  // half of them: other processes come and go
}

TEST(HostDriver, a_huge_chunk_is_in_the_resident_set_once_for_each_mapping_and_no_more) {
  HostDriver driver(options());
  if (!driver.huge_pages_active()) GTEST_SKIP() << "small pages stay in the window once touched";
  const auto resident_bytes = [] {
    std::ifstream file("/proc/self/status");
    for (std::string line; std::getline(file, line);) {
      if (line.starts_with("RssShmem:")) return std::stoul(line.substr(9)) * kKiB;
    }
    return size_t{0};
  };
  const size_t before = resident_bytes();
  const auto chunks = create(driver, 16);
  std::vector<std::byte> bytes(kKiB, std::byte{2});
  for (const Handle chunk : chunks) {
    driver.fill(chunk, 0, kChunk / 2, std::byte{1});
    driver.copy(chunk, kChunk / 2, chunk, 0, kKiB);
    driver.write(chunk, kKiB, bytes);
    driver.read(chunk, kKiB, bytes);
  }
  EXPECT_LT(resident_bytes(), before + 2 * kChunk);

  const uintptr_t range = driver.reserve(16 * kChunk, kChunk);
  map_rw(driver, range, chunks);
  for (size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(reinterpret_cast<std::byte*>(range)[i * kChunk + kKiB], std::byte{2});
  }
  EXPECT_NEAR(static_cast<double>(resident_bytes() - before), 16.0 * kChunk, 2.0 * kChunk);
}

TEST(HostDriver, huge_pages_are_not_active_when_switched_off) {
  HostOptions small = options();
  small.huge_pages = false;
  EXPECT_FALSE(HostDriver(small).huge_pages_active());
}

// --- shortage ---

TEST(HostDriver, create_beyond_the_cap_names_what_was_asked_and_what_is_left) {
  HostDriver driver({.capacity_bytes = 2 * kChunk + kChunk / 2});
  const auto chunks = create(driver, 2);
  try {
    driver.create(kChunk);
    FAIL() << "created beyond the cap";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.asked_bytes(), kChunk);
    EXPECT_EQ(error.free_bytes(), kChunk / 2);
    EXPECT_EQ(error.budget_bytes(), 2 * kChunk + kChunk / 2);
  }
  driver.release(chunks[0], kChunk);
  EXPECT_NO_THROW(driver.create(kChunk));
}

TEST(HostDriver, create_leaves_the_system_its_headroom) {
  FakeSystem system;
  system.set_available(100 * kMiB);
  HostDriver driver(
      {.capacity_bytes = kGiB, .reserve_headroom_bytes = 99 * kMiB, .system_root = system.root()});
  EXPECT_THROW(driver.create(kChunk), OutOfMemoryError);
  EXPECT_EQ(driver.resident_bytes(), 0u);
  system.set_available(200 * kMiB);
  EXPECT_NO_THROW(driver.create(kChunk));
}

TEST(HostDriver, create_sees_memory_shrink_while_it_grows) {
  FakeSystem system;
  system.set_available(kGiB);
  HostDriver driver(
      {.capacity_bytes = kGiB, .reserve_headroom_bytes = 0, .system_root = system.root()});
  driver.create(kChunk);
  system.set_available(kMiB);
  size_t num_created = 1;
  EXPECT_THROW(
      {
        for (; num_created < 100; ++num_created) driver.create(kChunk);
      },
      OutOfMemoryError);
  EXPECT_EQ(num_created, 32u);  // one reading is good for 64 MiB
}

TEST(HostDriver, the_derived_capacity_is_three_quarters_of_what_is_available) {
  FakeSystem system;
  system.set_available(kGiB);
  const HostDriver driver({.system_root = system.root()});
  EXPECT_EQ(driver.capacity_bytes(), kGiB / 4 * 3);
}

// --- mappings ---

TEST(HostDriver, consecutive_chunks_are_one_mapping) {
  HostDriver driver(options());
  const uintptr_t range = driver.reserve(32 * kChunk, kChunk);
  const size_t before = driver.num_mappings();
  const size_t kernel_before = current_map_count();
  for (size_t i = 0; i < 16; ++i) map_rw(driver, range + i * kChunk, create(driver, 1));
  EXPECT_EQ(driver.num_mappings(), before + 1);
  EXPECT_LE(current_map_count(), kernel_before + 2);
}

TEST(HostDriver, a_run_of_consecutive_chunks_in_one_call_is_one_mapping) {
  HostDriver driver(options());
  const uintptr_t range = driver.reserve(32 * kChunk, kChunk);
  const size_t before = driver.num_mappings();
  map_rw(driver, range, create(driver, 16));
  EXPECT_EQ(driver.num_mappings(), before + 1);
}

class HostDriverTails : public testing::TestWithParam<UnmappedPolicy> {};

INSTANTIATE_TEST_SUITE_P(Tails, HostDriverTails,
                         testing::Values(UnmappedPolicy::kGuard, UnmappedPolicy::kZero),
                         [](const auto& tested) {
                           return tested.param == UnmappedPolicy::kGuard ? "Guard" : "Zero";
                         });

TEST_P(HostDriverTails, mappings_are_never_counted_below_the_kernels_number) {
  HostDriver driver(options(GetParam()));
  const size_t others = current_map_count() - driver.num_mappings();
  const uintptr_t range = driver.reserve(64 * 64 * kKiB, kChunk);
  auto chunks = create(driver, 32, 64 * kKiB);
  for (size_t i = 0; i < chunks.size(); i += 2) std::swap(chunks[i], chunks[31 - i]);
  map_rw(driver, range, chunks, 64 * kKiB);
  EXPECT_GT(driver.num_mappings(), 16u);
  EXPECT_LE(current_map_count(), driver.num_mappings() + others + 4);  // malloc's own
}

TEST_P(HostDriverTails, the_mapping_limit_refuses_names_the_remedy_and_recovers) {
  HostOptions few = options(GetParam());
  few.mapping_limit = 10;
  HostDriver driver(few);
  const uintptr_t range = driver.reserve(64 * kChunk, kChunk);
  auto chunks = create(driver, 16);
  std::ranges::reverse(chunks);  // nothing merges
  try {
    driver.map(range, chunks, kChunk);
    FAIL() << "mapped beyond the limit";
  } catch (const MappingLimitError& error) {
    EXPECT_NE(std::string(error.what()).find("vm.max_map_count"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("limit of 10"), std::string::npos);
  }
  EXPECT_EQ(driver.num_mappings(), 2u);  // window and range: all or nothing
  std::ranges::reverse(chunks);
  EXPECT_NO_THROW(map_rw(driver, range, chunks));
}

TEST_P(HostDriverTails, splitting_by_access_respects_the_mapping_limit) {
  HostOptions few = options(GetParam());
  few.mapping_limit = 3;  // window, chunks, tail
  HostDriver driver(few);
  const uintptr_t range = driver.reserve(8 * kChunk, kChunk);
  map_rw(driver, range, create(driver, 4));
  EXPECT_THROW(driver.set_access(range, kChunk, Access::kRead), MappingLimitError);
  EXPECT_TRUE(is_writable(range));
}

// Whether a test can fill the process's mapping table: TSan's own memory does not survive that.
bool system_limit_in_reach() {
#ifdef __SANITIZE_THREAD__
  return false;
#else
  return max_map_count() <= 100'000;
#endif
}

TEST(HostDriver, the_systems_own_limit_is_reported_and_survived) {
  if (!system_limit_in_reach()) GTEST_SKIP();
  HostOptions unlimited = options();
  unlimited.mapping_limit = SIZE_MAX;
  HostDriver driver(unlimited);
  const size_t num_maps = max_map_count();
  const uintptr_t range = driver.reserve(num_maps * 4 * kKiB, 4 * kKiB);
  const std::vector<Handle> same(num_maps, driver.create(4 * kKiB));  // nothing merges
  driver.map(range, same, 4 * kKiB);
  EXPECT_THROW(driver.set_access(range, num_maps * 4 * kKiB, Access::kReadWrite),
               MappingLimitError);
  EXPECT_FALSE(is_readable(range));
  driver.unmap(range, num_maps * 4 * kKiB, 4 * kKiB);
  EXPECT_LT(current_map_count(), num_maps / 2);
}

TEST(HostDriver, at_the_systems_limit_unmap_still_takes_the_chunk_away) {
  if (!system_limit_in_reach()) GTEST_SKIP();
  HostDriver driver(options(UnmappedPolicy::kZero));
  const auto chunk = create(driver, 1);
  const uintptr_t range = driver.reserve(2 * kChunk, kChunk);
  map_rw(driver, range, chunk);
  byte_at(range) = 42;

  // Pages of alternating protection do not merge: fill the process's table with them.
  const size_t page = driver.granularity();
  const size_t size_bytes = (max_map_count() + 1) * page;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char* filler = static_cast<char*>(mmap(nullptr, size_bytes, PROT_NONE, flags, -1, 0));
  for (char* p = filler; p < filler + size_bytes; p += 2 * page) {
    if (mmap(p, page, PROT_READ, flags | MAP_FIXED, -1, 0) == MAP_FAILED) break;
  }
  driver.unmap(range, kChunk, kChunk);
  munmap(filler, size_bytes);

  EXPECT_FALSE(is_readable(range) && byte_at(range) == 42);
  map_rw(driver, range, chunk);
  EXPECT_EQ(byte_at(range), 42);
}

TEST(HostDriver, the_derived_mapping_limit_leaves_the_process_a_quarter) {
  const HostDriver driver(options());
  EXPECT_LT(driver.mapping_limit(), max_map_count() / 4 * 3);
  EXPECT_GT(driver.mapping_limit(), max_map_count() / 4);
}

// --- tails ---

TEST(HostDriver, a_zero_tail_reads_as_zeros_and_takes_no_memory) {
  HostDriver driver(options(UnmappedPolicy::kZero));
  const size_t size_bytes = 64 * kMiB;
  const uintptr_t range = driver.reserve(size_bytes, kChunk);
  const auto* bytes = reinterpret_cast<const unsigned char*>(range);
  EXPECT_EQ(std::count(bytes, bytes + size_bytes, 0), static_cast<int64_t>(size_bytes));
  EXPECT_EQ(driver.resident_bytes(), 0u);
}

TEST(HostDriver, a_zero_tail_hides_what_the_unmapped_chunk_held) {
  HostDriver driver(options(UnmappedPolicy::kZero));
  const uintptr_t range = driver.reserve(4 * kChunk, kChunk);
  map_rw(driver, range, create(driver, 2));
  std::fill_n(&byte_at(range), 2 * kChunk, static_cast<unsigned char>(7));
  driver.unmap(range + kChunk, kChunk, kChunk);
  EXPECT_EQ(byte_at(range + kChunk - 1), 7);
  EXPECT_EQ(byte_at(range + kChunk), 0);
}

TEST(HostDriverDeathTest, reading_a_guard_tail_ends_the_process) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  HostDriver driver(options(UnmappedPolicy::kGuard));
  const uintptr_t range = driver.reserve(kChunk, kChunk);
  EXPECT_DEATH(EXPECT_EQ(byte_at(range), 0), "");
}

// --- fork ---

TEST(HostDriver, a_forked_child_has_no_chunks_and_frees_none_of_its_parents) {
  HostDriver driver(options());
  const auto chunk = create(driver, 1);
  const uintptr_t range = driver.reserve(kChunk, kChunk);
  map_rw(driver, range, chunk);
  byte_at(range) = 42;
  const auto unmapped = create(driver, 1);
  driver.fill(unmapped[0], 0, 1, std::byte{43});
  const pid_t child = fork();
  if (child == 0) {
    const bool reachable = is_readable(range);
    driver.release(unmapped[0], kChunk);
    _exit(reachable ? 1 : 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(byte_at(range), 42);
  EXPECT_EQ(driver.resident_bytes(), 2 * kChunk);
}

// --- threads ---

TEST(HostDriver, threads_create_and_release_without_a_leak) {
  HostDriver driver(options());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 20; ++round) {
        for (const Handle chunk : create(driver, 4)) driver.release(chunk, kChunk);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(driver.resident_bytes(), 0u);
  EXPECT_EQ(driver.created_bytes(), 0u);
}

}  // namespace
}  // namespace vtensor
