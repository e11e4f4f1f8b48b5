// The radix tree against a plain list of recorded sequences, on random ones.
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/support/rtree_world.h"

namespace vtensor {
namespace {

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
