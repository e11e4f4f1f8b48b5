#include "vtensor/pool/vset.h"

#include <gtest/gtest.h>

#include <set>

#include "tests/cpp/support/core_fixture.h"

namespace vtensor {
namespace {

class VSetTest : public DriverTest {};

TEST_P(VSetTest, slots_lie_side_by_side_in_each_plane) {
  FaultyPool faulty;
  const VSet& vset = faulty.pool.vset;
  const size_t stride = faulty.pool.geometry.slot_stride_bytes();
  EXPECT_EQ(vset.address(1, 2, 3), vset.address(1, 0, 0) + 2 * stride + 3 * kChunk);
  EXPECT_EQ(vset.reserved_bytes(), 2 * 4 * 64 * kKiB);
}

TEST_P(VSetTest, planes_do_not_overlap) {
  FaultyPool faulty;
  const VSet& vset = faulty.pool.vset;
  const uintptr_t a = vset.address(0, 0, 0);
  const uintptr_t b = vset.address(1, 0, 0);
  EXPECT_GE(a > b ? a - b : b - a, vset.reserved_bytes() / 2);
}

TEST_P(VSetTest, the_lowest_free_slot_is_taken_first) {
  FaultyPool faulty;
  VSet& vset = faulty.pool.vset;
  EXPECT_EQ(vset.take_free(), 0U);
  EXPECT_EQ(vset.take_free(), 1U);
  vset.make_free(0);
  EXPECT_EQ(vset.take_free(), 0U);
}

TEST_P(VSetTest, each_life_of_a_slot_has_a_generation_of_its_own) {
  FaultyPool faulty;
  VSet& vset = faulty.pool.vset;
  const SlotId slot = vset.take_free();
  const uint64_t first = vset[slot].generation;
  vset.park(slot);
  vset.make_live(slot);
  EXPECT_GT(vset[slot].generation, first);
}

TEST_P(VSetTest, parked_slots_stand_in_the_order_of_parking) {
  FaultyPool faulty;
  VSet& vset = faulty.pool.vset;
  for (int i = 0; i < 3; ++i) vset.take_free();
  for (const SlotId slot : {2U, 0U, 1U}) vset.park(slot);
  vset.make_live(0);
  EXPECT_EQ(vset.parked(), (std::list<SlotId>{2, 1}));
}

TEST_P(VSetTest, a_broken_slot_is_never_used_again) {
  FaultyPool faulty;
  VSet& vset = faulty.pool.vset;
  const SlotId broken = vset.take_free();
  vset.park(broken);
  vset.make_broken(broken);
  std::set<SlotId> rest;
  while (vset.num_free() > 0) rest.insert(vset.take_free());
  EXPECT_EQ(rest, (std::set<SlotId>{1, 2, 3}));
  EXPECT_TRUE(vset.parked().empty());
}

TEST_P(VSetTest, a_failed_reservation_leaves_nothing_reserved) {
  for (int64_t k = 1; k <= 3; ++k) {
    FaultyDriver driver(param_driver(), {.fail_at = k});
    EXPECT_THROW(VSet(driver, small_geometry(kKiB, 3)), DriverError);
    EXPECT_EQ(driver.num_calls(CallKind::kFree), k - 1);
  }
}

TEST_P(VSetTest, an_arena_beyond_the_address_space_is_refused) {
  Geometry geometry = small_geometry();
  geometry.max_slots = SIZE_MAX / 2;
  EXPECT_THROW(FaultyPool{geometry}, std::exception);
}

TEST(Geometry, counts_rows_of_tokens_that_straddle_chunks) {
  const Geometry geometry = small_geometry(/*token_bytes=*/3000);
  EXPECT_EQ(geometry.rows_for(0), 0U);
  EXPECT_EQ(geometry.rows_for(1), 1U);
  EXPECT_EQ(geometry.rows_for(2), 2U);
  EXPECT_EQ(geometry.full_rows(2), 1U);
  EXPECT_EQ(geometry.tokens_in(2), 2U);
  const size_t row = geometry.row_chunks;  // entries of a page table
  EXPECT_EQ(geometry.bytes_used(0, 2), kChunk);
  EXPECT_EQ(geometry.bytes_used(row, 2), 6000U - kChunk);
  EXPECT_EQ(geometry.bytes_used(2 * row, 2), 0U);
}

TEST(Geometry, a_row_has_the_same_tokens_in_planes_of_different_sizes) {
  Geometry geometry = small_geometry(/*token_bytes=*/kKiB, /*num_planes=*/1);
  geometry.add_plane(3);  // tokens of 3 KiB: the four of a row take three chunks
  EXPECT_EQ(geometry.row_chunks, 4U);
  EXPECT_EQ(geometry.rows_for(5), 2U);
  for (const size_t row : {size_t{0}, size_t{1}}) {
    const size_t first = row * geometry.row_chunks;
    EXPECT_EQ(geometry.bytes_used(first, 4 * row + 2), 2 * kKiB);
    EXPECT_EQ(geometry.bytes_used(first + 1, 4 * row + 2), kChunk);  // 6 KiB from the row's start
    EXPECT_EQ(geometry.bytes_used(first + 2, 4 * row + 2), 2 * kKiB);
    EXPECT_EQ(geometry.bytes_used(first + 3, 4 * row + 2), 0U);
  }
}

TEST_P(VSetTest, the_columns_of_a_plane_lie_side_by_side) {
  Geometry geometry = small_geometry(/*token_bytes=*/kKiB, /*num_planes=*/1);
  geometry.add_plane(3);
  const FaultyPool faulty(geometry);
  const VSet& vset = faulty.pool.vset;
  EXPECT_EQ(vset.address(3, 0, 1), vset.address(1, 0, 0) + 5 * kChunk);
  EXPECT_EQ(vset.slot_stride_bytes(1), 3 * vset.slot_stride_bytes(0));
}

TEST(Geometry, a_token_may_be_larger_than_a_chunk) {
  const Geometry geometry = small_geometry(/*token_bytes=*/10000);
  EXPECT_EQ(geometry.rows_for(1), 3U);
  EXPECT_EQ(geometry.tokens_in(2), 0U);
  EXPECT_EQ(geometry.tokens_in(3), 1U);
}

VTENSOR_ON_EVERY_DRIVER(VSetTest);

}  // namespace
}  // namespace vtensor
