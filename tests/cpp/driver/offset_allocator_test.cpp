#include "vtensor/driver/offset_allocator.h"

#include <gtest/gtest.h>

#include <random>
#include <vector>

namespace vtensor {
namespace {

TEST(OffsetAllocator, extents_come_lowest_first) {
  OffsetAllocator space(100);
  EXPECT_EQ(space.take(10, 1), 0u);
  EXPECT_EQ(space.take(10, 1), 10u);
  space.give_back(0, 10);
  EXPECT_EQ(space.take(5, 1), 0u);
}

TEST(OffsetAllocator, alignment_leaves_the_skipped_bytes_free) {
  OffsetAllocator space(100);
  space.take(3, 1);
  EXPECT_EQ(space.take(16, 16), 16u);
  EXPECT_EQ(space.take(13, 1), 3u);
}

TEST(OffsetAllocator, a_full_space_gives_nothing) {
  OffsetAllocator space(10);
  EXPECT_EQ(space.take(11, 1), std::nullopt);
  EXPECT_EQ(space.take(10, 1), 0u);
  EXPECT_EQ(space.take(1, 1), std::nullopt);
}

TEST(OffsetAllocator, neighbours_given_back_in_any_order_become_one_extent) {
  OffsetAllocator space(30);
  for (int i = 0; i < 3; ++i) space.take(10, 1);
  space.give_back(0, 10);
  space.give_back(20, 10);
  EXPECT_EQ(space.num_free_extents(), 2u);
  space.give_back(10, 10);
  EXPECT_EQ(space.num_free_extents(), 1u);
}

TEST(OffsetAllocator, random_use_never_overlaps_and_ends_in_one_extent) {
  constexpr size_t kSpace = 256;
  OffsetAllocator space(kSpace);
  std::mt19937 random(7);
  std::vector<bool> used(kSpace);
  std::vector<std::pair<uint64_t, size_t>> taken;
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0) {
      const size_t size = 1 + random() % 20;
      const auto offset = space.take(size, size_t{1} << (random() % 4));
      if (!offset) continue;
      for (size_t i = 0; i < size; ++i) {
        ASSERT_FALSE(used[*offset + i]);
        used[*offset + i] = true;
      }
      taken.emplace_back(*offset, size);
    } else if (!taken.empty()) {
      std::swap(taken[random() % taken.size()], taken.back());
      const auto [offset, size] = taken.back();
      taken.pop_back();
      for (size_t i = 0; i < size; ++i) used[offset + i] = false;
      space.give_back(offset, size);
    }
  }
  for (const auto& [offset, size] : taken) space.give_back(offset, size);
  EXPECT_EQ(space.num_free_extents(), 1u);
}

}  // namespace
}  // namespace vtensor
