// Each operation is all-or-nothing: whichever driver call fails, nothing has changed.
#include <gtest/gtest.h>

#include <optional>
#include <span>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/ops/alloc.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/ops/prefix.h"

namespace vtensor {
namespace {

constexpr uint64_t kTenant = 1;

class Alloc : public DriverTest {};
class Mapping : public DriverTest {};
class Prefix : public DriverTest {};

std::vector<Handle> create(FaultyPool& faulty, size_t count) {
  std::vector<Handle> handles;
  while (handles.size() < count) handles.push_back(faulty.faults.create(kChunk));
  return handles;
}

std::vector<Claim> claim(FaultyPool& faulty, size_t count) {
  return *p_claim(faulty.pool, count, ScrubPolicy::kOwner, kTenant);
}

RowRange rows_from(FaultyPool& faulty, size_t first_row) {
  return {faulty.pool.vset, faulty.pool.geometry, 0, first_row};
}

// Whether `num_rows` rows may be mapped: nothing is there.
bool is_unmapped(FaultyPool& faulty, size_t num_rows) {
  const std::vector<Handle> handles = create(faulty, num_rows * 2);
  try {
    map(faulty.faults, rows_from(faulty, 0), handles);
  } catch (const std::exception&) {
    return false;
  }
  unmap(faulty.faults, rows_from(faulty, 0), handles);
  return true;
}

TEST_P(Alloc, v_alloc_gives_every_slot_once_and_then_nothing) {
  FaultyPool faulty;
  for (SlotId slot = 0; slot < 4; ++slot) EXPECT_EQ(v_alloc(faulty.pool), slot);
  EXPECT_EQ(v_alloc(faulty.pool), std::nullopt);
  v_free(faulty.pool, 2);
  EXPECT_EQ(v_alloc(faulty.pool), 2U);
}

TEST_P(Alloc, p_claim_beyond_the_budget_gives_nothing_and_changes_nothing) {
  FaultyPool faulty(small_geometry(), /*budget_chunks=*/3);
  EXPECT_FALSE(p_claim(faulty.pool, 4, ScrubPolicy::kOwner, kTenant));
  EXPECT_EQ(faulty.pool.pset.num_created(), 0U);
}

TEST_P(Alloc, a_create_that_fails_leaves_what_exists_as_free_chunks) {
  for (int64_t k = 1; k <= 4; ++k) {
    FaultyPool faulty;
    std::vector<Claim> claims = claim(faulty, 4);
    faulty.fail_at(k);
    EXPECT_THROW(p_create(faulty.faults, kChunk, claims), DriverError);
    p_unclaim(faulty.pool, claims);
    EXPECT_EQ(faulty.pool.pset.num_free(), static_cast<size_t>(k - 1));
    EXPECT_EQ(faulty.pool.pset.num_referenced(), 0U);
  }
}

TEST_P(Alloc, a_dirty_chunk_is_scrubbed_for_its_next_owner) {
  FaultyPool faulty(small_geometry(), 1);
  std::vector<Claim> claims = claim(faulty, 1);
  p_create(faulty.faults, kChunk, claims);
  p_commit(faulty.pool, claims, kTenant);
  const std::vector<std::byte> secret(100, std::byte{7});
  faulty.faults.write(claims[0].handle, 0, secret);
  faulty.pool.pset[claims[0].id].dirty_bytes = static_cast<uint32_t>(secret.size());
  p_free(faulty.pool, std::vector{claims[0].id});

  claims = claim(faulty, 1);
  EXPECT_TRUE(claims[0].scrub);
  p_create(faulty.faults, kChunk, claims);
  std::vector<std::byte> seen(100, std::byte{1});
  faulty.faults.read(claims[0].handle, 0, seen);
  EXPECT_EQ(seen, std::vector<std::byte>(100));
}

TEST_P(Alloc, a_scrub_that_fails_leaves_the_chunk_dirty) {
  FaultyPool faulty;
  std::vector<Claim> claims = claim(faulty, 1);
  p_create(faulty.faults, kChunk, claims);
  p_commit(faulty.pool, claims, kTenant);
  faulty.pool.pset[claims[0].id].dirty_bytes = 10;
  p_free(faulty.pool, std::vector{claims[0].id});
  claims = claim(faulty, 1);
  faulty.fail_at(1);
  EXPECT_THROW(p_create(faulty.faults, kChunk, claims), DriverError);
  p_unclaim(faulty.pool, claims);
  EXPECT_EQ(faulty.pool.pset[claims[0].id].dirty_bytes, 10U);
}

TEST_P(Alloc, the_scrub_policy_decides_who_must_not_see_whose_bytes) {
  const Chunk dirty{.dirty_bytes = 1, .tenant = 5};
  EXPECT_TRUE(needs_scrub(dirty, ScrubPolicy::kOwner, 5));
  EXPECT_FALSE(needs_scrub(dirty, ScrubPolicy::kTenant, 5));
  EXPECT_TRUE(needs_scrub(dirty, ScrubPolicy::kTenant, 6));
  EXPECT_FALSE(needs_scrub(dirty, ScrubPolicy::kOff, 6));
  EXPECT_FALSE(needs_scrub(Chunk{.tenant = 5}, ScrubPolicy::kOwner, 6));
}

TEST_P(Mapping, a_map_that_fails_leaves_nothing_mapped) {
  int64_t k = 1;
  for (bool failed = true; failed; ++k) {
    FaultyPool faulty;
    const std::vector<Handle> handles = create(faulty, 6);
    faulty.fail_at(k);
    try {
      map(faulty.faults, rows_from(faulty, 0), handles);
      failed = false;
    } catch (const DriverError&) {
      faulty.fail_never();
      EXPECT_TRUE(is_unmapped(faulty, 3)) << "call " << k;
    }
  }
  EXPECT_EQ(k, 6) << "map and set_access, in two planes";
}

TEST_P(Mapping, an_unmap_that_fails_leaves_everything_mapped) {
  for (int64_t k = 1; k <= 2; ++k) {
    FaultyPool faulty;
    const std::vector<Handle> handles = create(faulty, 6);
    map(faulty.faults, rows_from(faulty, 0), handles);
    faulty.fail_at(k);
    EXPECT_THROW(unmap(faulty.faults, rows_from(faulty, 0), handles), DriverError);
    faulty.fail_never();
    EXPECT_NO_THROW(unmap(faulty.faults, rows_from(faulty, 0), handles)) << "call " << k;
  }
}

TEST_P(Mapping, a_remap_that_fails_leaves_the_old_chunks_mapped) {
  int64_t k = 1;
  for (bool failed = true; failed; ++k) {
    FaultyPool faulty;
    const std::vector<Handle> before = create(faulty, 2);
    const std::vector<Handle> after = create(faulty, 2);
    map(faulty.faults, rows_from(faulty, 0), before);
    auto* bytes = reinterpret_cast<volatile char*>(faulty.pool.vset.address(1, 0, 0));
    *bytes = 'b';
    faulty.fail_at(k);
    try {
      remap(faulty.faults, rows_from(faulty, 0), {before}, {after});
      failed = false;
      EXPECT_EQ(*bytes, '\0');
    } catch (const DriverError&) {
      EXPECT_EQ(*bytes, 'b') << "call " << k;
    }
    faulty.fail_never();
    unmap(faulty.faults, rows_from(faulty, 0), failed ? before : after);
  }
  const bool in_place = FaultyPool().faults.remaps_in_place();
  EXPECT_EQ(k, in_place ? 4 : 8) << "two remaps, or two unmap, two map, two set_access";
}

TEST_P(Mapping, an_undo_that_fails_too_is_a_broken_mapping) {
  FaultyPool faulty;
  const std::vector<Handle> handles = create(faulty, 2);
  faulty.fail_at(3, /*persistent=*/true);  // the second plane, and whatever follows
  EXPECT_THROW(map(faulty.faults, rows_from(faulty, 0), handles), BrokenMapping);
}

TEST_P(Mapping, a_set_access_whose_undo_fails_is_a_broken_mapping) {
  FaultyPool faulty;
  const std::vector<Handle> handles = create(faulty, 2);
  faulty.fail_at(2, /*persistent=*/true);
  EXPECT_THROW(map(faulty.faults, rows_from(faulty, 0), handles), BrokenMapping);
}

TEST_P(Mapping, a_remap_that_cannot_go_back_is_a_broken_mapping) {
  FaultyPool faulty;
  const std::vector<Handle> before = create(faulty, 2);
  const std::vector<Handle> after = create(faulty, 2);
  map(faulty.faults, rows_from(faulty, 0), before);
  faulty.fail_at(faulty.faults.remaps_in_place() ? 2 : 3, /*persistent=*/true);
  EXPECT_THROW(remap(faulty.faults, rows_from(faulty, 0), {before}, {after}), BrokenMapping);
}

TEST_P(Mapping, no_rows_are_no_driver_call) {
  FaultyPool faulty;
  const int64_t calls = faulty.faults.num_calls();
  map(faulty.faults, rows_from(faulty, 0), {});
  unmap(faulty.faults, rows_from(faulty, 0), {});
  EXPECT_EQ(faulty.faults.num_calls(), calls);
}

TEST_P(Prefix, a_match_holds_its_chunks_until_they_are_freed) {
  FaultyPool faulty;
  const Tokens tokens = tokens_from(0, 8);
  const SlotId slot = *v_alloc(faulty.pool);
  std::vector<Claim> claims = claim(faulty, 4);
  p_create(faulty.faults, kChunk, claims);
  p_commit(faulty.pool, claims, kTenant);
  for (const Claim& made : claims) faulty.pool.vset[slot].table.push_back(made.id);
  EXPECT_EQ(r_push(faulty.pool, "", tokens, slot), 8U);
  const std::vector<ChunkId> table = std::move(faulty.pool.vset[slot].table);
  p_free(faulty.pool, table);

  const RTree::Match match = r_prefix_match(faulty.pool, "", tokens);
  EXPECT_EQ(match.table, table);
  EXPECT_EQ(faulty.pool.rtree.evict(100), 0U);
  p_free(faulty.pool, match.table);
  EXPECT_EQ(faulty.pool.rtree.evict(100), 4U);
}

VTENSOR_ON_EVERY_MEMORY(Alloc);
VTENSOR_ON_EVERY_MEMORY(Mapping);
VTENSOR_ON_EVERY_DRIVER(Prefix);

}  // namespace
}  // namespace vtensor
