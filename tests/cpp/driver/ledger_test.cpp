#include "vtensor/driver/ledger.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <stdexcept>
#include <vector>

namespace vtensor {
namespace {

constexpr uintptr_t kBase = 1000;

// A range of 100 pages of 1 byte, and chunks 0, 10, 20, ... of 10 bytes: the numbers read easily.
Ledger make_ledger() {
  Ledger ledger(1);
  ledger.add_range(kBase, 100);
  for (int i = 0; i < 10; ++i) ledger.add_chunk(10);
  return ledger;
}

std::vector<Handle> handles(std::initializer_list<uint64_t> numbers) {
  std::vector<Handle> result;
  for (const uint64_t number : numbers) result.push_back(Handle{number});
  return result;
}

void release(Ledger& ledger, Handle handle) {
  ledger.begin_release(handle, 10);
  ledger.finish_release(handle);
}

TEST(Ledger, chunks_come_lowest_first) {
  Ledger ledger = make_ledger();
  for (const uint64_t offset : {70, 30}) release(ledger, Handle{offset});
  EXPECT_EQ(ledger.add_chunk(10), Handle{30});
  EXPECT_EQ(ledger.add_chunk(10), Handle{70});
  EXPECT_EQ(ledger.add_chunk(10), Handle{100});
}

TEST(Ledger, a_chunk_whose_release_has_begun_is_gone_and_its_place_is_not_free_yet) {
  Ledger ledger = make_ledger();
  ledger.begin_release(Handle{30}, 10);
  EXPECT_THROW(ledger.map(kBase, handles({30}), 10), std::invalid_argument);
  EXPECT_EQ(ledger.add_chunk(10), Handle{100});
  ledger.undo_release(Handle{30});
  EXPECT_NO_THROW(ledger.map(kBase, handles({30}), 10));
}

TEST(Ledger, all_chunks_have_the_size_of_the_first) {
  Ledger ledger = make_ledger();
  EXPECT_THROW(ledger.add_chunk(20), std::invalid_argument);
  EXPECT_THROW(ledger.begin_release(Handle{0}, 20), std::invalid_argument);
}

TEST(Ledger, an_empty_range_is_one_mapping) { EXPECT_EQ(make_ledger().num_mappings(), 1u); }

TEST(Ledger, consecutive_chunks_are_one_mapping_and_others_are_not) {
  Ledger ledger = make_ledger();
  ledger.map(kBase, handles({0, 10, 20}), 10);
  EXPECT_EQ(ledger.num_mappings(), 2u);
  ledger.map(kBase + 30, handles({70, 60}), 10);
  EXPECT_EQ(ledger.num_mappings(), 4u);
}

TEST(Ledger, a_chunk_that_closes_a_gap_joins_both_sides) {
  Ledger ledger = make_ledger();
  ledger.map(kBase, handles({0}), 10);
  ledger.map(kBase + 20, handles({20}), 10);
  EXPECT_EQ(ledger.num_mappings(), 4u);
  ledger.map(kBase + 10, handles({10}), 10);
  EXPECT_EQ(ledger.num_mappings(), 2u);
}

TEST(Ledger, a_full_range_has_no_tail) {
  Ledger ledger = make_ledger();
  ledger.map(kBase, handles({0, 10, 20, 30, 40, 50, 60, 70, 80, 90}), 10);
  EXPECT_EQ(ledger.num_mappings(), 1u);
}

TEST(Ledger, neighbouring_ranges_do_not_join) {
  Ledger ledger = make_ledger();
  ledger.add_range(kBase + 100, 100);
  ledger.map(kBase + 90, handles({0}), 10);
  ledger.map(kBase + 100, handles({10}), 10);
  EXPECT_EQ(ledger.num_mappings(), 4u);
  EXPECT_THROW(ledger.unmap(kBase + 90, 20, 10), std::invalid_argument);
}

TEST(Ledger, set_access_returns_the_runs_that_were_there) {
  Ledger ledger = make_ledger();
  ledger.map(kBase, handles({0, 10, 50}), 10);
  const auto before = ledger.set_access(kBase + 10, 20, Access::kRead);
  ASSERT_EQ(before.size(), 2u);
  EXPECT_EQ(before[0].offset, 10u);
  EXPECT_EQ(before[1].offset, 50u);
  EXPECT_EQ(before[1].access, Access::kNone);
}

TEST(Ledger, undoing_an_unmap_brings_everything_back) {
  Ledger ledger = make_ledger();
  ledger.map(kBase, handles({0, 10, 50}), 10);
  ledger.undo_unmap(ledger.unmap(kBase + 10, 20, 10));
  EXPECT_EQ(ledger.num_mappings(), 3u);
  EXPECT_THROW(ledger.begin_release(Handle{50}, 10), std::invalid_argument);
}

TEST(Ledger, undoing_a_change_of_access_joins_what_it_split) {
  Ledger ledger = make_ledger();
  ledger.map(kBase, handles({0, 10, 20}), 10);
  const auto before = ledger.set_access(kBase + 10, 10, Access::kRead);
  EXPECT_EQ(ledger.num_mappings(), 4u);
  ledger.undo_set_access(before);
  EXPECT_EQ(ledger.num_mappings(), 2u);
}

TEST(Ledger, unmap_refuses_chunks_of_another_size) {
  Ledger ledger = make_ledger();
  ledger.map(kBase, handles({0, 10}), 10);
  EXPECT_THROW(ledger.unmap(kBase, 20, 20), std::invalid_argument);
}

struct Entry {
  uint64_t offset;
  Access access;
};
using Model = std::map<size_t, Entry>;  // position in the range -> what is mapped there

size_t num_mappings(const Model& model) {
  size_t count = 0;
  for (size_t i = 0; i < 10; ++i) {
    const auto entry = model.find(i);
    const auto last = i == 0 ? model.end() : model.find(i - 1);
    if (i == 0 || (entry == model.end()) != (last == model.end())) {
      ++count;
    } else if (entry != model.end() && (entry->second.offset != last->second.offset + 10 ||
                                        entry->second.access != last->second.access)) {
      ++count;
    }
  }
  return count;
}

// Against a plain model: one entry per chunk, mappings counted from scratch.
TEST(Ledger, random_use_agrees_with_a_model) {
  Ledger ledger = make_ledger();
  Model model;
  std::mt19937 random(11);
  for (int step = 0; step < 20000; ++step) {
    const size_t first = random() % 10;
    const size_t count = 1 + random() % (10 - first);
    const uintptr_t addr = kBase + 10 * first;
    size_t num_mapped = 0;
    for (size_t i = first; i < first + count; ++i) num_mapped += model.count(i);
    switch (random() % 3) {
      case 0: {
        std::vector<Handle> chunks;
        uint64_t offset = 10 * (random() % 10);
        for (size_t i = 0; i < count; ++i) {
          chunks.push_back(Handle{offset});
          offset = random() % 4 == 0 ? 10 * (random() % 10) : (offset + 10) % 100;
        }
        if (num_mapped > 0) {
          ASSERT_THROW(ledger.map(addr, chunks, 10), std::invalid_argument);
          break;
        }
        ledger.map(addr, chunks, 10);
        for (size_t i = 0; i < count; ++i) {
          model[first + i] = {static_cast<uint64_t>(chunks[i]), Access::kNone};
        }
        break;
      }
      case 1: {
        const Access access = random() % 2 == 0 ? Access::kRead : Access::kReadWrite;
        if (num_mapped < count) {
          ASSERT_THROW(ledger.set_access(addr, 10 * count, access), std::invalid_argument);
          break;
        }
        const auto before = ledger.set_access(addr, 10 * count, access);
        if (random() % 4 == 0) {
          ledger.undo_set_access(before);
        } else {
          for (size_t i = 0; i < count; ++i) model[first + i].access = access;
        }
        break;
      }
      default:
        if (num_mapped < count) {
          ASSERT_THROW(ledger.unmap(addr, 10 * count, 10), std::invalid_argument);
          break;
        }
        const auto before = ledger.unmap(addr, 10 * count, 10);
        if (random() % 4 == 0) {
          ledger.undo_unmap(before);
        } else {
          for (size_t i = 0; i < count; ++i) model.erase(first + i);
        }
    }
    ASSERT_EQ(ledger.num_mappings(), num_mappings(model)) << "step " << step;
  }
  for (const auto& [i, entry] : model) ledger.unmap(kBase + 10 * i, 10, 10);
  for (uint64_t i = 0; i < 10; ++i) release(ledger, Handle{10 * i});
  EXPECT_EQ(ledger.add_chunk(10), Handle{0}) << "all places are free again";
}

}  // namespace
}  // namespace vtensor
