#include "vtensor/pool/pset.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <vector>

#include "vtensor/util/id_set.h"

namespace vtensor {
namespace {

ChunkId claim_created(PSet& pset) {
  const ChunkId id = pset.claim();
  pset[id].created = true;
  return id;
}

TEST(IdSet, pops_the_lowest_and_the_highest) {
  IdSet ids;
  for (const uint32_t id : {200U, 3U, 64U, 63U}) ids.insert(id);
  EXPECT_EQ(ids.pop_lowest(), 3U);
  EXPECT_EQ(ids.pop_highest(), 200U);
  ids.insert(1);
  EXPECT_EQ(ids.pop_lowest(), 1U);
  EXPECT_EQ(ids.size(), 2U);
}

TEST(IdSet, agrees_with_a_std_set_over_random_operations) {
  std::mt19937 random(1);
  IdSet ids;
  std::set<uint32_t> model;
  for (int i = 0; i < 4000; ++i) {
    const auto id = static_cast<uint32_t>(random() % 300);
    switch (random() % 4) {
      case 0:
      case 1:
        if (model.insert(id).second) ids.insert(id);
        break;
      case 2:
        if (model.erase(id) == 1) ids.erase(id);
        break;
      default:
        if (model.empty()) break;
        const bool low = random() % 2 == 0;
        const uint32_t expected = low ? *model.begin() : *model.rbegin();
        ASSERT_EQ(low ? ids.pop_lowest() : ids.pop_highest(), expected);
        model.erase(expected);
    }
    ASSERT_EQ(ids.size(), model.size());
    ASSERT_EQ(ids.contains(id), model.contains(id));
  }
}

TEST(PSet, a_claim_counts_against_the_budget_before_its_memory_exists) {
  PSet pset(2);
  const ChunkId id = pset.claim();
  EXPECT_FALSE(pset[id].created);
  EXPECT_EQ(pset.num_created(), 1U);
  EXPECT_EQ(pset.num_claimable(), 1U);
}

TEST(PSet, a_chunk_without_references_is_free_and_claimed_first) {
  PSet pset(4);
  const ChunkId first = claim_created(pset);
  claim_created(pset);
  pset.drop_table_ref(first);
  EXPECT_EQ(pset.num_free(), 1U);
  EXPECT_EQ(pset.num_claimable(), 3U);
  EXPECT_EQ(pset.claim(), first);
}

TEST(PSet, a_chunk_lives_until_the_last_of_its_references) {
  PSet pset(1);
  const ChunkId id = claim_created(pset);
  pset.add_tree_ref(id);
  pset.add_table_ref(id);
  pset.drop_table_ref(id);
  pset.drop_table_ref(id);
  EXPECT_EQ(pset.num_free(), 0U);
  pset.drop_tree_ref(id);
  EXPECT_EQ(pset.num_free(), 1U);
}

TEST(PSet, a_free_chunk_has_no_appender) {
  PSet pset(1);
  const ChunkId id = claim_created(pset);
  pset[id].appender = 7;
  pset.drop_table_ref(id);
  EXPECT_EQ(pset[id].appender, kNoVTensor);
}

TEST(PSet, a_chunk_is_evictable_while_only_unpinned_tree_entries_name_it) {
  PSet pset(1);
  const ChunkId id = claim_created(pset);
  pset.add_tree_ref(id);
  EXPECT_EQ(pset.num_idle(), 0U);
  pset.drop_table_ref(id);
  EXPECT_EQ(pset.num_idle(), 1U);
  pset.add_pin(id);
  EXPECT_EQ(pset.num_idle(), 0U);
  pset.drop_pin(id);
  pset.drop_tree_ref(id);
  EXPECT_EQ(pset.num_idle(), 0U);
}

TEST(PSet, unclaiming_what_was_never_created_gives_the_budget_back) {
  PSet pset(1);
  pset.unclaim(pset.claim());
  EXPECT_EQ(pset.num_created(), 0U);
  EXPECT_EQ(pset.num_free(), 0U);
}

TEST(PSet, unclaiming_what_was_created_makes_it_free) {
  PSet pset(1);
  pset.unclaim(claim_created(pset));
  EXPECT_EQ(pset.num_created(), 1U);
  EXPECT_EQ(pset.num_free(), 1U);
}

TEST(PSet, a_chunk_taken_for_release_counts_until_it_is_forgotten) {
  PSet pset(2);
  const ChunkId id = claim_created(pset);
  pset.drop_table_ref(id);
  EXPECT_EQ(pset.take_free(), id);
  EXPECT_EQ(pset.num_created(), 1U);
  pset.forget(id);
  EXPECT_EQ(pset.num_created(), 0U);
  EXPECT_EQ(pset.claim(), id) << "ids are used again";
}

TEST(PSet, counts_agree_with_the_references_over_random_operations) {
  std::mt19937 random(2);
  PSet pset(40);
  std::vector<ChunkId> table;
  std::vector<ChunkId> tree;
  const auto take = [&](std::vector<ChunkId>& from) {
    std::swap(from[random() % from.size()], from.back());
    const ChunkId id = from.back();
    from.pop_back();
    return id;
  };
  for (int i = 0; i < 4000; ++i) {
    const auto operation = random() % 6;
    if (operation == 0 && pset.num_claimable() > 0) table.push_back(claim_created(pset));
    if (operation == 1 && !table.empty()) pset.drop_table_ref(take(table));
    if (operation == 2 && !table.empty()) {
      tree.push_back(table[random() % table.size()]);
      pset.add_tree_ref(tree.back());
    }
    if (operation == 3 && !tree.empty()) pset.drop_tree_ref(take(tree));
    if (operation == 4 && !tree.empty()) {
      table.push_back(tree[random() % tree.size()]);
      pset.add_table_ref(table.back());
    }
    if (operation == 5 && pset.num_free() > 0) pset.forget(pset.take_free());
    std::set<ChunkId> referenced(table.begin(), table.end());
    std::set<ChunkId> evictable;
    for (const ChunkId id : tree) {
      if (!referenced.contains(id)) evictable.insert(id);
    }
    referenced.insert(tree.begin(), tree.end());
    ASSERT_EQ(pset.num_referenced(), referenced.size());
    ASSERT_EQ(pset.num_idle(), evictable.size());
    const std::set<ChunkId> mapped(table.begin(), table.end());
    ASSERT_EQ(pset.num_saved(), table.size() - mapped.size());
    ASSERT_EQ(pset.num_shared(), std::ranges::count_if(mapped, [&](ChunkId id) {
                return std::ranges::count(table, id) > 1;
              }));
    ASSERT_LE(pset.num_created(), 40U);
  }
}

TEST(PSet, what_parked_slots_map_too_is_not_shared) {
  PSet pset(4);
  const ChunkId id = claim_created(pset);
  pset.add_table_ref(id);
  EXPECT_EQ(pset.num_shared(), 1U);
  pset.add_parked_ref(id);
  EXPECT_EQ(pset.num_shared(), 0U);
  EXPECT_EQ(pset.num_saved(), 0U);
}

}  // namespace
}  // namespace vtensor
