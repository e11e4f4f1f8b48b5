#include "vtensor/pool/rtree.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <string>

#include "tests/cpp/support/core_fixture.h"

namespace vtensor {
namespace {

// A tree over chunks whose contents are known: who wrote a chunk, and up to which tokens.
class RTreeTest : public testing::Test {
 protected:
  explicit RTreeTest(const Geometry& geometry = small_geometry(kKiB, 2))
      : geometry_(geometry), pset_(4096), tree_(geometry, pset_) {}

  // Fresh chunks for all of `tokens`, or those of `shared` first.
  std::vector<ChunkId> table_for(const Tokens& tokens, std::vector<ChunkId> shared = {}) {
    const size_t wanted = geometry_.rows_for(tokens.size()) * geometry_.row_chunks;
    for (const ChunkId id : shared) pset_.add_table_ref(id);
    while (shared.size() < wanted) {
      shared.push_back(pset_.claim());
      pset_[shared.back()].created = true;
    }
    for (const ChunkId id : shared) path_[id] = tokens;
    return shared;
  }

  // Records `tokens` in chunks that nobody maps afterwards.
  std::vector<ChunkId> record(const Tokens& tokens, std::vector<ChunkId> shared = {},
                              const std::string& salt = "") {
    const std::vector<ChunkId> table = table_for(tokens, std::move(shared));
    tree_.push(salt, tokens, table);
    unmap(table);
    return table;
  }

  void unmap(const std::vector<ChunkId>& table) {
    for (const ChunkId id : table) pset_.drop_table_ref(id);
  }

  size_t matched(const Tokens& tokens, const std::string& salt = "") {
    return tree_.match(salt, tokens).num_tokens;
  }

  void check_invariants() const {
    std::map<ChunkId, uint32_t> refs;
    std::map<ChunkId, uint32_t> pins;
    size_t num_tokens = 0;
    tree_.for_each([&](const RNode& node, const std::string&) {
      ASSERT_FALSE(node.tokens.empty());
      ASSERT_EQ(node.start, node.parent->parent == nullptr ? 0 : node.parent->end());
      const size_t rows = geometry_.rows_for(node.end()) - geometry_.full_rows(node.start);
      ASSERT_EQ(node.rows.size(), rows * geometry_.row_chunks);
      for (const auto& [token, child] : node.children) ASSERT_EQ(child->tokens.front(), token);
      num_tokens += node.tokens.size();
      for (const ChunkId id : node.rows) ++refs[id];
      if (node.num_pins > 0) {
        for (const ChunkId id : node.rows) ++pins[id];
      }
    });
    ASSERT_EQ(num_tokens, tree_.num_tokens());
    for (ChunkId id = 0; id < pset_.num_ids(); ++id) {
      ASSERT_EQ(pset_[id].tree_refs, refs[id]) << "chunk " << id;
      ASSERT_EQ(pset_[id].pins, pins[id]) << "chunk " << id;
    }
  }

  // Every chunk of a match holds the KV of the matched tokens that touch its row.
  void check_contents(const RTree::Match& match, const Tokens& tokens) const {
    ASSERT_EQ(match.table.size(), geometry_.rows_for(match.num_tokens) * geometry_.row_chunks);
    for (size_t i = 0; i < match.table.size(); ++i) {
      const size_t row_end = (i / geometry_.row_chunks + 1) * geometry_.chunk_bytes;
      const size_t needed = std::min(match.num_tokens, ceil_div(row_end, geometry_.token_bytes));
      const Tokens& path = path_.at(match.table[i]);
      ASSERT_GE(path.size(), needed);
      ASSERT_TRUE(
          std::equal(path.begin(), path.begin() + static_cast<ptrdiff_t>(needed), tokens.begin()))
          << "row " << i / geometry_.row_chunks << " shows other tokens";
    }
  }

  Geometry geometry_;
  PSet pset_;
  RTree tree_;
  std::map<ChunkId, Tokens> path_;  // the tokens that the last writer of a chunk had
};

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

struct Shape {
  std::string name;
  size_t token_bytes;
  size_t num_planes;
};

class RTreeRandomTest : public RTreeTest, public testing::WithParamInterface<Shape> {
 protected:
  RTreeRandomTest() : RTreeTest(small_geometry(GetParam().token_bytes, GetParam().num_planes)) {}

  Tokens random_tokens() {
    Tokens tokens(random_() % 20 + 1);
    for (Token& token : tokens) token = static_cast<Token>(random_() % 3 == 0);
    if (!recorded_.empty() && random_() % 2 == 0) {  // go on from a known prefix
      const auto& [salt, known] = recorded_[random_() % recorded_.size()];
      tokens = joined(
          {known.begin(), known.begin() + static_cast<ptrdiff_t>(random_() % (known.size() + 1))},
          tokens);
    }
    tokens.resize(std::min<size_t>(tokens.size(), geometry_.max_tokens));
    return tokens;
  }

  size_t expected_match(const std::string& salt, const Tokens& tokens) const {
    size_t longest = 0;
    for (const auto& [known_salt, known] : recorded_) {
      if (known_salt != salt) continue;
      const auto end = std::ranges::mismatch(known, tokens).in2;
      longest = std::max(longest, static_cast<size_t>(end - tokens.begin()));
    }
    return longest;
  }

  // What a vTensor does: alias whole rows, go on in the tail chunks or in a copy of them, record.
  void serve(const std::string& salt, const Tokens& tokens) {
    const RTree::Match match = tree_.match(salt, tokens);
    std::vector<ChunkId> shared = match.table;
    const size_t full = geometry_.full_rows(match.num_tokens) * geometry_.row_chunks;
    const bool goes_on =
        std::all_of(shared.begin() + static_cast<ptrdiff_t>(full), shared.end(), [&](ChunkId id) {
          return path_[id].size() == match.num_tokens && pset_[id].table_refs == 0;
        });
    if (!goes_on || random_() % 3 == 0) shared.resize(full);
    std::vector<ChunkId> table = shared;
    for (const ChunkId id : table) pset_.add_table_ref(id);
    while (table.size() < geometry_.rows_for(tokens.size()) * geometry_.row_chunks) {
      table.push_back(pset_.claim());
      pset_[table.back()].created = true;
    }
    for (size_t i = full; i < table.size(); ++i) path_[table[i]] = tokens;
    ASSERT_EQ(tree_.push(salt, tokens, table), tokens.size() - expected_match(salt, tokens));
    recorded_.emplace_back(salt, tokens);
    if (random_() % 4 == 0) {
      mapped_.push_back(table);
    } else {
      unmap(table);
    }
  }

  // After an eviction: what is left of each sequence, which only ever gets shorter.
  void forget_evicted() {
    for (auto& [salt, known] : recorded_) {
      const size_t left = matched(known, salt);
      ASSERT_LE(left, known.size());
      known.resize(left);
    }
  }

  std::mt19937 random_{7};
  std::vector<std::pair<std::string, Tokens>> recorded_;
  std::vector<std::vector<ChunkId>> mapped_;
};

TEST_P(RTreeRandomTest, agrees_with_a_list_of_recorded_sequences) {
  for (int i = 0; i < 200; ++i) {
    const std::string salt = random_() % 4 == 0 ? "other" : "";
    const Tokens tokens = random_tokens();
    const auto operation = random_() % 12;
    if (operation < 5) {
      serve(salt, tokens);
    } else if (operation < 9) {
      const RTree::Match match = tree_.match(salt, tokens);
      ASSERT_EQ(match.num_tokens, expected_match(salt, tokens));
      check_contents(match, tokens);
    } else if (operation == 9) {
      const size_t evictable = pset_.num_idle();
      const size_t free = pset_.num_free();
      const size_t wanted = random_() % 8 + 1;
      const size_t freed = tree_.evict(wanted, nullptr, random_() % 4 == 0);
      ASSERT_EQ(pset_.num_free(), free + freed);
      ASSERT_LE(freed, evictable);
      forget_evicted();
    } else if (operation == 10 && !mapped_.empty()) {
      unmap(mapped_.back());
      mapped_.pop_back();
    } else if (operation == 11) {
      if (random_() % 2 == 0) {
        ASSERT_EQ(tree_.pin(salt, tokens, "owner", 0), expected_match(salt, tokens));
      } else {
        tree_.unpin("owner");
      }
    }
    check_invariants();
    if (HasFatalFailure()) return;
  }
  tree_.unpin("owner");
  for (const auto& table : mapped_) unmap(table);
  tree_.clear();
  EXPECT_EQ(tree_.num_tokens(), 0U);
  EXPECT_EQ(pset_.num_referenced(), 0U);
}

TEST_P(RTreeRandomTest, eviction_reaches_every_chunk_that_counts_as_evictable) {
  for (int i = 0; i < 60; ++i) serve("", random_tokens());
  const size_t evictable = pset_.num_idle();
  const size_t freed = tree_.evict(SIZE_MAX);
  EXPECT_EQ(freed + tree_.evict(SIZE_MAX, nullptr, /*any=*/true), evictable);
  EXPECT_EQ(pset_.num_idle(), 0U);
}

INSTANTIATE_TEST_SUITE_P(
    Shapes, RTreeRandomTest,
    testing::Values(Shape{"FourTokensAChunk", kKiB, 2}, Shape{"OneTokenAChunk", kChunk, 1},
                    Shape{"TokensStraddleChunks", 1500, 3}, Shape{"TokensStraddleOften", 3000, 1},
                    Shape{"TokensLargerThanAChunk", 10000, 2}, Shape{"ManyTokensAChunk", 256, 1}),
    [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace vtensor
