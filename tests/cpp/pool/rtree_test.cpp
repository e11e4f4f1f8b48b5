#include "vtensor/pool/rtree.h"

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/cpp/support/rtree_world.h"

namespace vtensor {
namespace {

TEST_F(RTreeTest, an_empty_tree_matches_nothing) {
  EXPECT_EQ(matched(tokens_from(0, 5)), 0U);
  EXPECT_EQ(tree_.push("", {}, {}), 0U);
}

TEST_F(RTreeTest, a_match_is_token_exact) {
  const std::vector<ChunkId> table = record(tokens_from(0, 10));
  const RTree::Match match = tree_.match("", joined(tokens_from(0, 7), {99}));
  EXPECT_EQ(match.num_tokens, 7U);
  EXPECT_EQ(match.table, (std::vector<ChunkId>(table.begin(), table.begin() + 4)));
}

TEST_F(RTreeTest, salts_have_trees_of_their_own) {
  record(tokens_from(0, 10), {}, "a");
  EXPECT_EQ(matched(tokens_from(0, 10), "b"), 0U);
  EXPECT_EQ(matched(tokens_from(0, 10), "a"), 10U);
}

TEST_F(RTreeTest, push_returns_how_many_tokens_are_new) {
  const Tokens tokens = tokens_from(0, 10);
  const std::vector<ChunkId> table = table_for(tokens);
  EXPECT_EQ(tree_.push("", std::span(tokens).first(6), table), 6U);
  EXPECT_EQ(tree_.push("", tokens, table), 4U);
  EXPECT_EQ(tree_.push("", tokens, table), 0U);
  EXPECT_EQ(tree_.push("", std::span(tokens).first(3), table), 0U);
  check_invariants();
}

TEST_F(RTreeTest, a_leaf_grows_in_place_when_its_tail_chunks_go_on) {
  const Tokens tokens = tokens_from(0, 10);
  const std::vector<ChunkId> table = table_for(tokens);
  tree_.push("", std::span(tokens).first(6), table);
  tree_.push("", tokens, table);
  size_t num_nodes = 0;
  tree_.for_each([&](const RNode&, const std::string&) { ++num_nodes; });
  EXPECT_EQ(num_nodes, 1U);
}

TEST_F(RTreeTest, a_copied_tail_stands_in_a_child_and_wins_there) {
  const Tokens first = tokens_from(0, 6);
  const std::vector<ChunkId> table = record(first);
  const Tokens longer = joined(first, tokens_from(50, 4));
  const std::vector<ChunkId> copied = record(longer, {table[0], table[1]});
  EXPECT_EQ(tree_.match("", longer).table, copied);
  EXPECT_EQ(tree_.match("", first).table, table);
  check_invariants();
}

TEST_F(RTreeTest, sequences_that_part_split_a_node) {
  const Tokens common = tokens_from(0, 6);
  const Tokens a = joined(common, tokens_from(100, 4));
  const Tokens b = joined(common, tokens_from(200, 4));
  const std::vector<ChunkId> table_a = record(a);
  const std::vector<ChunkId> table_b = record(b, {table_a[0], table_a[1]});
  EXPECT_EQ(tree_.match("", a).table, table_a);
  EXPECT_EQ(tree_.match("", b).table, table_b);
  EXPECT_EQ(tree_.num_tokens(), 14U);
  check_invariants();
}

TEST_F(RTreeTest, eviction_takes_the_least_recently_used_leaf_first) {
  record(tokens_from(0, 4));
  record(tokens_from(100, 4));
  record(tokens_from(200, 4));
  matched(tokens_from(0, 4));
  EXPECT_EQ(tree_.evict(2), 2U);
  EXPECT_EQ(matched(tokens_from(100, 4)), 0U);
  EXPECT_EQ(matched(tokens_from(0, 4)) + matched(tokens_from(200, 4)), 8U);
}

// Whichever it is: neither the order of recording nor the place in memory decides.
TEST_F(RTreeTest, a_hit_makes_a_prefix_recent) {
  const std::vector<Token> firsts = {0, 100, 200};
  for (const Token first : firsts) record(tokens_from(first, 4));
  for (const Token oldest : {0, 100, 200, 200, 0, 100, 100, 0}) {
    for (const Token first : firsts) {
      if (first != oldest) matched(tokens_from(first, 4));
    }
    EXPECT_EQ(tree_.evict(2), 2U);
    for (const Token first : firsts) {
      EXPECT_EQ(matched(tokens_from(first, 4)), first == oldest ? 0U : 4U) << oldest;
    }
    record(tokens_from(oldest, 4));
  }
}

TEST_F(RTreeTest, eviction_shortens_a_leaf_from_its_end_by_whole_rows) {
  record(tokens_from(0, 16));
  EXPECT_EQ(tree_.evict(3), 4U) << "a row of two planes at a time";
  EXPECT_EQ(matched(tokens_from(0, 16)), 8U);
  check_invariants();
}

TEST_F(RTreeTest, eviction_reaches_a_parent_once_its_children_are_gone) {
  const Tokens common = tokens_from(0, 8);
  const std::vector<ChunkId> table = record(joined(common, tokens_from(100, 4)));
  record(joined(common, tokens_from(200, 4)), {table.begin(), table.begin() + 4});
  EXPECT_EQ(tree_.evict(100), 8U);
  EXPECT_EQ(tree_.num_tokens(), 0U);
  check_invariants();
}

TEST_F(RTreeTest, leaves_that_free_nothing_are_passed_over) {
  const Tokens mapped = tokens_from(0, 8);
  const std::vector<ChunkId> table = table_for(mapped);
  tree_.push("", mapped, table);
  record(tokens_from(100, 4));
  EXPECT_EQ(tree_.evict(100), 2U);
  EXPECT_EQ(matched(mapped), 8U);
  EXPECT_EQ(tree_.evict(1, nullptr, /*any=*/true), 0U) << "forgotten, but its chunks are mapped";
  EXPECT_EQ(matched(mapped), 0U);
}

TEST_F(RTreeTest, a_pin_keeps_its_whole_path) {
  const Tokens tokens = tokens_from(0, 16);
  record(tokens);
  EXPECT_EQ(tree_.pin("", std::span(tokens).first(6), "me", 0), 6U);
  check_invariants();
  EXPECT_EQ(tree_.evict(100), 4U) << "the shared row 1 is pinned";
  EXPECT_EQ(matched(tokens), 6U);
  EXPECT_EQ(tree_.clear(), 0U);
  EXPECT_EQ(tree_.unpin("me"), 1U);
  EXPECT_EQ(tree_.clear(), 6U);
  check_invariants();
}

TEST_F(RTreeTest, pins_end_when_their_time_is_over) {
  const Tokens tokens = tokens_from(0, 8);
  record(tokens);
  tree_.pin("", tokens, "me", /*expires_ns=*/100);
  tree_.expire_pins(99);
  EXPECT_EQ(tree_.evict(1), 0U);
  tree_.expire_pins(100);
  EXPECT_EQ(tree_.evict(4), 4U);
}

TEST_F(RTreeTest, each_pin_ends_at_its_own_time) {
  const Tokens early = tokens_from(0, 8);
  const Tokens late = tokens_from(100, 8);
  const Tokens for_ever = tokens_from(200, 8);
  for (const Tokens& tokens : {early, late, for_ever}) record(tokens);
  tree_.pin("", late, "me", /*expires_ns=*/200);
  tree_.pin("", early, "me", /*expires_ns=*/100);
  tree_.pin("", for_ever, "me", /*expires_ns=*/0);
  for (const auto& [now_ns, num_pins] : {std::pair{99, 3U}, {100, 2U}, {199, 2U}, {1000, 1U}}) {
    tree_.expire_pins(now_ns);
    EXPECT_EQ(tree_.pins().size(), num_pins) << now_ns;
    check_invariants();
  }
  EXPECT_EQ(tree_.evict(100), 8U);
  EXPECT_EQ(matched(for_ever), 8U);
}

TEST_F(RTreeTest, a_pin_stays_where_it_is_when_its_node_is_split) {
  const Tokens a = joined(tokens_from(0, 6), tokens_from(100, 6));
  const std::vector<ChunkId> table = record(a);
  tree_.pin("", a, "me", 0);
  record(joined(tokens_from(0, 6), tokens_from(200, 6)), {table[0], table[1]});
  check_invariants();
  tree_.evict(100);
  EXPECT_EQ(matched(a), 12U);
  EXPECT_EQ(matched(joined(tokens_from(0, 6), tokens_from(200, 6))), 6U);
  check_invariants();
}

TEST_F(RTreeTest, a_very_deep_tree_is_destroyed_without_recursion) {
  Tokens tokens;
  std::vector<ChunkId> table;
  for (Token depth = 0; depth < 60; ++depth) {  // bounded by chunks, not by the stack
    tokens.push_back(depth);
    table = table_for(tokens);
    tree_.push("", tokens, table);  // new chunks each time: a child each time
  }
  EXPECT_EQ(matched(tokens), 60U);
  check_invariants();
}

// Two trees with the same history: the one evicts at once, the other chunk by chunk, each time from
// the oldest leaf on.
TEST(RTreeEvictionTest, evicting_many_at_once_takes_what_evicting_them_one_by_one_takes) {
  const Geometry geometry = small_geometry(kKiB, 1);
  struct Side {
    explicit Side(const Geometry& geometry) : pset(4096), tree(geometry, pset) {}
    PSet pset;
    RTree tree;
  };
  for (uint32_t seed = 0; seed < 40; ++seed) {
    Side at_once(geometry);
    Side one_by_one(geometry);
    std::vector<Tokens> recorded;
    const auto on_both = [&](const auto& action) {
      action(at_once);
      action(one_by_one);
    };
    std::mt19937 random(seed);
    for (int i = 0; i < 40; ++i) {
      Tokens tokens = tokens_from(static_cast<Token>(random() % 3) * 100, random() % 24 + 1);
      for (Token& token : tokens) token += static_cast<Token>(random() % 12 == 0);
      const bool stays_mapped = random() % 5 == 0;
      on_both([&](Side& side) {
        std::vector<ChunkId> table = side.tree.match("", tokens).table;
        table.resize(geometry.full_rows(side.tree.match("", tokens).num_tokens));
        for (const ChunkId id : table) side.pset.add_table_ref(id);
        while (table.size() < geometry.rows_for(tokens.size())) {
          table.push_back(side.pset.claim());
          side.pset[table.back()].created = true;
        }
        side.tree.push("", tokens, table);
        for (const ChunkId id : table) {
          if (!stays_mapped) side.pset.drop_table_ref(id);
        }
      });
      if (random() % 6 == 0) {
        on_both([&](Side& side) { side.tree.pin("", tokens, "pin", 0); });
      }
      recorded.push_back(tokens);
    }
    const size_t wanted = random() % 60;
    size_t freed = 0;
    while (freed < wanted && one_by_one.tree.evict(1) == 1) ++freed;
    EXPECT_EQ(at_once.tree.evict(wanted), freed);
    for (const Tokens& tokens : recorded) {
      ASSERT_EQ(at_once.tree.match("", tokens).num_tokens,
                one_by_one.tree.match("", tokens).num_tokens)
          << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace vtensor
