// What tests of the radix tree share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/pool/rtree.h"

namespace vtensor {

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

}  // namespace vtensor
