// Shared ranges against the definition, token by token and pair by pair, on random page tables.
#include "vtensor/ops/sharing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/ops/alloc.h"

namespace vtensor {
namespace {

// Page tables without a driver behind them.
struct Tables {
  explicit Tables(const Geometry& geometry)
      : faulty(geometry, /*budget_chunks=*/4096, make_driver(On::kSim)) {}

  Pool& pool() { return faulty.pool; }

  SlotId add_slot() { return *v_alloc(pool()); }

  void append(SlotId slot, ChunkId id) { pool().vset[slot].table.push_back(id); }

  void append_fresh_row(SlotId slot) {
    for (size_t plane = 0; plane < pool().geometry.row_chunks; ++plane) {
      append(slot, pool().pset.claim());
    }
  }

  // A slot whose first rows are another's.
  SlotId fork(SlotId parent, size_t num_rows) {
    const SlotId slot = add_slot();
    const std::vector<ChunkId> table = pool().vset[parent].table;
    for (size_t i = 0; i < num_rows * pool().geometry.row_chunks; ++i) alias(slot, table[i]);
    return slot;
  }

  void alias(SlotId slot, ChunkId id) {
    pool().pset.add_table_ref(id);
    append(slot, id);
  }

  FaultyPool faulty;
};

// Whether token `token` of both lies in full rows, and they share every row up to its end.
bool shares_token(const Pool& pool, const ReadExtent& a, const ReadExtent& b, size_t token) {
  const Geometry& geometry = pool.geometry;
  const size_t rows = geometry.rows_for(token + 1);
  for (const ReadExtent& reader : {a, b}) {
    if (rows > std::min(pool.vset.mapped_rows(reader.slot), geometry.full_rows(reader.num_tokens)))
      return false;
  }
  const std::vector<ChunkId>& table = pool.vset[a.slot].table;
  return std::equal(table.begin(),
                    table.begin() + static_cast<ptrdiff_t>(rows * geometry.row_chunks),
                    pool.vset[b.slot].table.begin());
}

const SharedRange* range_of(std::span<const SharedRange> ranges, int64_t member, int64_t token) {
  const SharedRange* found = nullptr;
  for (const SharedRange& range : ranges) {
    if (token < range.start || token >= range.end) continue;
    if (std::ranges::find(range.members, member) == range.members.end()) continue;
    EXPECT_EQ(found, nullptr) << "two ranges of one reader overlap";
    found = &range;
  }
  return found;
}

void check_ranges(const Pool& pool, std::span<const ReadExtent> readers) {
  const std::vector<SharedRange> ranges = shared_ranges(pool, readers);
  for (const SharedRange& range : ranges) {
    EXPECT_LT(range.start, range.end);
    EXPECT_GE(range.members.size(), 2U);
    EXPECT_TRUE(std::ranges::is_sorted(range.members));
    EXPECT_EQ(range.slot, readers[static_cast<size_t>(range.members.front())].slot);
  }
  for (uint32_t i = 0; i < readers.size(); ++i) {
    int64_t end = 0;
    std::vector<int64_t> before;
    for (const SharedRange& range : ranges) {
      if (std::ranges::find(range.members, i) == range.members.end()) continue;
      EXPECT_EQ(range.start, end) << "the ranges of reader " << i << " touch and stand in order";
      EXPECT_NE(range.members, before) << "two ranges of the same members are one";
      before = range.members;
      end = range.end;
    }
    for (size_t token = 0; token < pool.geometry.max_tokens; ++token) {
      const SharedRange* range = range_of(ranges, i, static_cast<int64_t>(token));
      std::vector<int64_t> sharers;
      for (uint32_t j = 0; j < readers.size(); ++j) {
        if (j == i || shares_token(pool, readers[i], readers[j], token)) sharers.push_back(j);
      }
      if (sharers.size() < 2) {
        EXPECT_EQ(range, nullptr) << "reader " << i << " is alone at token " << token;
      } else {
        ASSERT_NE(range, nullptr) << "reader " << i << ", token " << token;
        EXPECT_EQ(range->members, sharers) << "reader " << i << ", token " << token;
      }
    }
  }
}

TEST(Sharing, nothing_is_shared_while_no_chunk_has_two_entries) {
  Tables tables(small_geometry());
  const SlotId a = tables.add_slot();
  const SlotId b = tables.add_slot();
  tables.append_fresh_row(a);
  tables.append_fresh_row(b);
  const std::vector<ReadExtent> readers{{a, 4}, {b, 4}};
  EXPECT_TRUE(shared_ranges(tables.pool(), readers).empty());
}

TEST(Sharing, a_tree_of_prefixes_gives_a_range_a_node_parents_first) {
  Tables tables(small_geometry());  // four tokens per row
  const SlotId a = tables.add_slot();
  for (int row = 0; row < 3; ++row) tables.append_fresh_row(a);
  const SlotId b = tables.fork(a, 3);
  const SlotId c = tables.fork(a, 2);
  const std::vector<ReadExtent> readers{{a, 12}, {c, 9}, {b, 12}};
  const std::vector<SharedRange> ranges = shared_ranges(tables.pool(), readers);
  ASSERT_EQ(ranges.size(), 2U);
  EXPECT_EQ(ranges[0].members, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(ranges[0].end, 8U);
  EXPECT_EQ(ranges[1].members, (std::vector<int64_t>{0, 2}));
  EXPECT_EQ(ranges[1].start, 8U);
  EXPECT_EQ(ranges[1].end, 12U);
}

TEST(Sharing, a_row_counts_only_when_it_is_full_of_tokens_that_all_members_read) {
  Tables tables(small_geometry());
  const SlotId a = tables.add_slot();
  for (int row = 0; row < 2; ++row) tables.append_fresh_row(a);
  const SlotId b = tables.fork(a, 2);
  const std::vector<ReadExtent> readers{{a, 8}, {b, 7}};
  const std::vector<SharedRange> ranges = shared_ranges(tables.pool(), readers);
  ASSERT_EQ(ranges.size(), 1U);
  EXPECT_EQ(ranges[0].end, 4U);
}

TEST(Sharing, a_row_is_shared_only_in_all_planes) {
  Tables tables(small_geometry());
  const SlotId a = tables.add_slot();
  for (int row = 0; row < 2; ++row) tables.append_fresh_row(a);
  const SlotId b = tables.fork(a, 1);
  tables.alias(b, tables.pool().vset[a].table[2]);
  tables.append(b, tables.pool().pset.claim());
  const std::vector<ReadExtent> readers{{a, 8}, {b, 8}};
  const std::vector<SharedRange> ranges = shared_ranges(tables.pool(), readers);
  ASSERT_EQ(ranges.size(), 1U);
  EXPECT_EQ(ranges[0].end, 4U);
}

struct Shape {
  std::string name;
  size_t token_bytes;
  size_t num_planes;
};

class RandomSharing : public testing::TestWithParam<Shape> {};

// 1536 bytes: tokens straddle rows. 6000: a token is larger than a row. 70 planes: long rows.
TEST_P(RandomSharing, equals_the_definition_on_random_forests) {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const size_t num_slots = 2 + random() % 12;
    Tables tables(small_geometry(GetParam().token_bytes, GetParam().num_planes, num_slots));
    const Geometry& geometry = tables.pool().geometry;
    std::vector<ReadExtent> readers;
    for (size_t i = 0; i < num_slots; ++i) {
      SlotId slot = 0;
      if (i == 0 || random() % 4 == 0) {
        slot = tables.add_slot();
      } else {
        const SlotId parent = readers[random() % i].slot;
        slot = tables.fork(parent, random() % (tables.pool().vset.mapped_rows(parent) + 1));
      }
      const size_t room = geometry.max_rows() - tables.pool().vset.mapped_rows(slot);
      for (size_t row = random() % (std::min<size_t>(room, 4) + 1); row > 0; --row) {
        tables.append_fresh_row(slot);
      }
      const size_t num_tokens = geometry.tokens_in(tables.pool().vset.mapped_rows(slot));
      readers.push_back({slot, num_tokens - std::min<size_t>(num_tokens, random() % 5)});
    }
    std::ranges::shuffle(readers, random);
    check_ranges(tables.pool(), readers);
  }
}

INSTANTIATE_TEST_SUITE_P(Shapes, RandomSharing,
                         testing::Values(Shape{"one_plane", kKiB, 1}, Shape{"two_planes", kKiB, 2},
                                         Shape{"straddling", 1536, 2},
                                         Shape{"token_larger_than_row", 6000, 1},
                                         Shape{"many_planes", 2 * kKiB, 70}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace vtensor
