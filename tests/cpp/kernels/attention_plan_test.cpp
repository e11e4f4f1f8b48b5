#include "kernels/attention/plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <stdexcept>
#include <vector>

#include "kernels/calls/attention.h"

namespace vtensor::kernels {
namespace {

struct Step {
  std::vector<Segment> segments;
  std::vector<SharedRange> shared;
};

// Requests of random lengths, decodes and prefills; those that are long enough share prefixes.
Step random_step(std::mt19937& random) {
  const auto upto = [&](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  Step step;
  const int64_t num_segments = 1 + upto(9);
  int64_t row = 0;
  for (int64_t i = 0; i < num_segments; ++i) {
    const int64_t start = upto(1) == 0 ? upto(50) : upto(3000);
    const int64_t count = upto(2) == 0 ? 1 + upto(300) : 1;
    step.segments.push_back({i, row, start, start + count});
    row += count;
  }
  int64_t begin = 0;
  for (const int64_t end : {64, 500, 1100}) {
    SharedRange range{0, begin, end, {}};
    for (int64_t i = 0; i < num_segments; ++i) {
      if (step.segments[static_cast<size_t>(i)].start >= end) range.members.push_back(i);
    }
    if (range.members.size() < 2) break;
    range.slot = range.members.front();
    step.shared.push_back(range);
    begin = end;
  }
  return step;
}

// How often each key is attended to, [tokens][keys up to the token's own].
std::vector<std::vector<int>> count_keys(const Plan& plan) {
  std::vector<std::vector<int>> counts;
  for (const int64_t position : plan.positions()) {
    counts.emplace_back(static_cast<size_t>(position + 1));
  }
  for (const PlannedTask& task : plan.tasks()) {
    for (int32_t i = 0; i < task.num_tokens; ++i) {
      const auto token =
          static_cast<size_t>(plan.task_tokens()[static_cast<size_t>(task.first_token + i)]);
      const int64_t position = plan.positions()[token];
      const int64_t last = std::min(task.end, position + 1);
      int* count = counts[token].data();
      for (int64_t key = std::max(task.begin, plan.firsts()[token]); key < last; ++key)
        ++count[key];
    }
  }
  return counts;
}

// How many of the batch's tokens, in their order, are stored once; none beside them.
int64_t tokens_stored(const Plan& plan) {
  std::vector<PlannedStore> stores = plan.stored_first();
  for (const PlannedTask& task : plan.tasks()) {
    if (task.stores_segment >= 0) stores.push_back({task.stores_segment});
  }
  std::vector<int64_t> stored;
  for (const PlannedStore& store : stores) {
    const Segment& segment = plan.segments()[static_cast<size_t>(store.segment)];
    EXPECT_LE(store.first + store.count, segment.num_tokens());
    for (int64_t i = 0; i < store.count; ++i) stored.push_back(segment.row + store.first + i);
  }
  std::sort(stored.begin(), stored.end());
  EXPECT_EQ(std::ssize(stored), plan.num_tokens());
  int64_t num_stored = 0;
  while (num_stored < std::ssize(stored) && stored[static_cast<size_t>(num_stored)] == num_stored) {
    ++num_stored;
  }
  return num_stored;
}

TEST(AttentionPlan, every_token_meets_every_visible_key_once) {
  std::mt19937 random(1);
  for (int round = 0; round < 60; ++round) {
    const Step step = random_step(random);
    const PlanOptions options{round % 3 == 0 ? 70 : kNoWindow, 1 << (round % 5), 2, 1 + round % 4,
                              round % 5 == 0 ? 96 : kNoWindow};
    const Plan plan(step.segments, step.shared, options);
    const auto counts = count_keys(plan);
    for (size_t token = 0; token < counts.size(); ++token) {
      const int64_t position = plan.positions()[token];
      const int64_t visible = std::min(position % options.chunk + 1, options.window);
      std::vector<int> expected(static_cast<size_t>(position + 1), 0);
      std::fill_n(expected.rbegin(), visible, 1);
      ASSERT_EQ(counts[token], expected);
    }
  }
}

// Of tokens whose output nobody reads, no key is attended to, and all are stored.
TEST(AttentionPlan, wanted_rows_meet_what_they_see_and_others_nothing) {
  std::mt19937 random(4);
  for (int round = 0; round < 60; ++round) {
    const Step step = random_step(random);
    const PlanOptions options{round % 3 == 0 ? 70 : kNoWindow, 1 << (round % 5), 2, 1 + round % 4,
                              round % 5 == 0 ? 96 : kNoWindow};
    const Plan whole(step.segments, step.shared, options);
    std::vector<int64_t> rows;
    for (int64_t row = 0; row < whole.num_tokens(); ++row) {
      if (std::uniform_int_distribution(0, 1 + round)(random) == 0) rows.push_back(row);
    }
    std::shuffle(rows.begin(), rows.end(), random);
    const Plan plan(step.segments, step.shared, options, rows);
    const auto counts = count_keys(plan), expected = count_keys(whole);
    const std::set<int64_t> wanted(rows.begin(), rows.end());
    for (size_t token = 0; token < counts.size(); ++token) {
      const bool is_wanted = wanted.contains(static_cast<int64_t>(token));
      const std::vector<int> none(expected[token].size(), 0);
      ASSERT_EQ(counts[token], is_wanted ? expected[token] : none);
    }
    ASSERT_EQ(tokens_stored(plan), whole.num_tokens());
  }
}

TEST(AttentionPlan, wanted_rows_beside_the_batch_are_refused) {
  for (const int64_t row : {-1, 3}) {
    EXPECT_THROW(Plan({{0, 0, 0, 3}}, {}, {}, {{row}}), std::invalid_argument);
  }
}

TEST(AttentionPlan, partial_rows_are_numbered_once_and_belong_to_tokens_of_several_tasks) {
  std::mt19937 random(2);
  for (int round = 0; round < 60; ++round) {
    const Step step = random_step(random);
    const Plan plan(step.segments, step.shared, {kNoWindow, 2, 2, 2});
    std::set<int32_t> rows;
    for (int32_t token = 0; token < plan.num_tokens(); ++token) {
      for (const int32_t row : plan.partials_of(token)) EXPECT_TRUE(rows.insert(row).second);
    }
    EXPECT_EQ(static_cast<int64_t>(rows.size()), plan.num_partials());
    for (const PlannedTask& task : plan.tasks()) {
      for (int32_t i = 0; i < task.num_tokens; ++i) {
        const int32_t token = plan.task_tokens()[static_cast<size_t>(task.first_token + i)];
        EXPECT_EQ(plan.partials_of(token).empty(), task.partial < 0);
      }
    }
  }
}

TEST(AttentionPlan, every_token_is_stored_by_one_task_or_first) {
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    const Step step = random_step(random);
    const Plan plan(step.segments, step.shared, {kNoWindow, round % 2 == 0 ? 2 : 200, 2, 2});
    EXPECT_EQ(tokens_stored(plan), plan.num_tokens());
  }
}

TEST(AttentionPlan, a_shared_range_is_read_once_for_all_members) {
  std::vector<Segment> segments;
  SharedRange shared{0, 0, 1024, {}};
  for (int64_t i = 0; i < 8; ++i) {
    segments.push_back({i, i, 1030, 1031});
    shared.members.push_back(i);
  }
  const Plan plan(segments, {shared}, {kNoWindow, 2, 1, 1});
  int64_t shared_keys = 0;
  for (const PlannedTask& task : plan.tasks()) {
    if (task.begin < 1024) shared_keys += task.end - task.begin;
  }
  EXPECT_EQ(shared_keys, 1024);
}

TEST(AttentionPlan, one_long_decode_is_cut_for_the_threads) {
  const Plan alone({{0, 0, 8000, 8001}}, {}, {kNoWindow, 4, 1, 1});
  const Plan cut({{0, 0, 8000, 8001}}, {}, {kNoWindow, 4, 1, 4});
  EXPECT_EQ(alone.tasks().size(), 1U);
  EXPECT_EQ(alone.num_partials(), 0);
  EXPECT_GE(cut.tasks().size(), 4U);
}

// Of four tasks a thread: those of few rows are done once for neighbouring heads.
TEST(AttentionPlan, decodes_are_cut_into_fair_parts_for_whole_tokens) {
  const PlanOptions options{kNoWindow, 4, 8, 2};
  const Plan two({{0, 0, 8191, 8192}, {1, 1, 8191, 8192}}, {}, options);
  EXPECT_EQ(two.tasks().size(), 8U);
  std::vector<Segment> eight;
  for (int64_t i = 0; i < 8; ++i) eight.push_back({i, i, 1000 + i, 1001 + i});
  EXPECT_EQ(Plan(eight, {}, options).num_partials(), 0);
}

// Their keys would be packed once for each part, and their many outputs merged.
TEST(AttentionPlan, prefills_are_shared_out_by_heads_and_come_first) {
  const Plan plan({{0, 0, 8191, 8192}, {1, 1, 0, 256}}, {}, {kNoWindow, 2, 4, 2});
  ASSERT_EQ(plan.num_tasks_of_many_rows(), 1U);
  EXPECT_EQ(plan.tasks().front().num_tokens, 256);
  EXPECT_EQ(plan.tasks().front().partial, -1);
  EXPECT_GT(plan.num_partials(), 1);
}

TEST(AttentionPlan, tasks_keep_within_the_rows_of_a_thread_s_scratch) {
  std::mt19937 random(4);
  for (const int group : {1, 5, 96, 97, 300}) {
    const Step step = random_step(random);
    const Plan plan(step.segments, step.shared, {kNoWindow, group, 3, 2});
    int heads = 0;
    for (const HeadBlock& block : plan.head_blocks()) {
      heads += block.num_heads;
      for (const PlannedTask& task : plan.tasks()) {
        EXPECT_LE(task.num_tokens * block.num_heads, kMaxRows);
      }
    }
    EXPECT_EQ(heads, 3 * group);
  }
}

TEST(AttentionPlan, contradictions_are_refused) {
  const PlanOptions options{kNoWindow, 1, 1, 1};
  EXPECT_THROW(Plan({{0, 0, 3, 3}}, {}, options), std::invalid_argument);
  EXPECT_THROW(Plan({{0, 1, 3, 4}}, {}, options), std::invalid_argument);
  EXPECT_THROW(Plan({{-1, 0, 3, 4}}, {}, options), std::invalid_argument);
  EXPECT_THROW(Plan({{INT64_MAX, 0, 3, 4}}, {}, options), std::invalid_argument);
  EXPECT_THROW(Plan({{0, 0, 0, INT64_MAX}}, {}, options), std::invalid_argument);
  EXPECT_THROW(Plan({{0, 0, INT64_MAX - 1, INT64_MAX}}, {}, options), std::invalid_argument);
  const std::vector<Segment> two = {{0, 0, 30, 31}, {1, 1, 30, 31}};
  EXPECT_THROW(Plan(two, {{0, 0, 31, {0, 1}}}, options), std::invalid_argument);
  EXPECT_THROW(Plan(two, {{0, 0, 20, {0, 2}}}, options), std::invalid_argument);
  EXPECT_THROW(Plan(two, {{INT64_MAX, 0, 20, {0, 1}}}, options), std::invalid_argument);
  EXPECT_THROW(Plan(two, {{0, 0, 20, {0, 1}}, {0, 10, 25, {0, 1}}}, options),
               std::invalid_argument);
  EXPECT_THROW(Plan(two, {}, {0, 1, 1, 1}), std::invalid_argument);
}

}  // namespace
}  // namespace vtensor::kernels
