// HostMemfd: memory is there once committed, zero, shared by all that show it, and given back.
#include "vtensor/driver/host/host_memfd.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>

#include "vtensor/driver/host/host_call.h"
#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

const size_t kPage = static_cast<size_t>(sysconf(_SC_PAGESIZE));

bool is_zero(const std::byte* start, size_t size_bytes) {
  return std::all_of(start, start + size_bytes, [](std::byte b) { return b == std::byte{0}; });
}

TEST(HostMemfd, only_committed_extents_take_memory) {
  HostMemfd memfd(64 * kMiB, kPage);
  EXPECT_GE(memfd.space_bytes(), 64 * kMiB);
  EXPECT_EQ(memfd.resident_bytes(), 0);
  memfd.commit_small(8 * kPage, 3 * kPage);
  EXPECT_EQ(memfd.resident_bytes(), 3 * kPage);
  memfd.punch(8 * kPage, 2 * kPage);
  EXPECT_EQ(memfd.resident_bytes(), kPage);
}

TEST(HostMemfd, what_was_punched_comes_back_as_zeros) {
  HostMemfd memfd(4 * kMiB, kPage);
  memfd.commit_small(0, 2 * kPage);
  std::fill_n(memfd.at(0), 2 * kPage, std::byte{7});
  memfd.punch(0, 2 * kPage);
  memfd.commit_small(0, 2 * kPage);
  EXPECT_TRUE(is_zero(memfd.at(0), 2 * kPage));
}

TEST(HostMemfd, huge_pages_are_whole_or_refused) {
  HostMemfd memfd(8 * kMiB, kPage);
  if (!memfd.commit_huge(0, kHugePageBytes)) GTEST_SKIP() << "no huge pages here";
  EXPECT_EQ(memfd.resident_bytes(), kHugePageBytes);
  EXPECT_TRUE(is_zero(memfd.at(0), kHugePageBytes));
  memfd.punch(0, kHugePageBytes);
  EXPECT_EQ(memfd.resident_bytes(), 0);
}

TEST(HostMemfd, an_extent_at_another_address_is_the_same_memory) {
  HostMemfd memfd(4 * kMiB, kPage);
  memfd.commit_small(kPage, 2 * kPage);
  const uintptr_t addr = reserve_aligned(2 * kPage, kPage, PROT_NONE, kPage);
  memfd.map_at(addr, kPage, 2 * kPage);
  auto* shown = static_cast<std::byte*>(pointer(addr));
  shown[kPage] = std::byte{3};
  EXPECT_EQ(*memfd.at(2 * kPage), std::byte{3});
  memfd.leave_window(kPage, 2 * kPage);
  EXPECT_EQ(*memfd.at(2 * kPage), std::byte{3});
  EXPECT_EQ(munmap(shown, 2 * kPage), 0);
}

TEST(HostMemfd, a_capacity_that_no_address_space_holds_is_an_error) {
  EXPECT_THROW(HostMemfd(size_t{1} << 60, kPage), DriverError);
}

TEST(HostCall, reserved_addresses_are_aligned) {
  for (const size_t alignment : {kPage, 64 * kPage, kHugePageBytes}) {
    const uintptr_t addr = reserve_aligned(3 * kPage, alignment, PROT_NONE, kPage);
    EXPECT_EQ(addr % alignment, 0);
    EXPECT_EQ(munmap(pointer(addr), 3 * kPage), 0);
  }
}

}  // namespace
}  // namespace vtensor
