// Where a step's memory comes from, and the bound on what nobody uses.
#include "vtensor/core/core.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/cpp/support/core_world.h"

namespace vtensor {
namespace {

class CoreMemoryTest : public CoreTest {
 protected:
  CoreMemoryTest() : CoreTest({}, /*budget_chunks=*/8) {}

  VTensorId extended(size_t num_tokens) {
    const VTensorId id = *core_.placement.create({}, "");
    EXPECT_TRUE(extend(id, num_tokens));
    return id;
  }
};

TEST_P(CoreMemoryTest, parked_private_chunks_go_before_recorded_prefixes) {
  core_.retirement.release(recorded(tokens_from(0, 8), 'a'));
  const VTensorId live_one = *core_.placement.create(tokens_from(0, 8), "");  // adopts
  const VTensorId parked = extended(8);
  core_.retirement.release(parked);
  faulty_.pool.vset.make_live(live(live_one).slot == 0 ? 1 : 0);  // so that nobody adopts it
  faulty_.pool.vset.park(live(live_one).slot == 0 ? 1 : 0);
  EXPECT_TRUE(extend(live_one, 16));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 8U);
}

TEST_P(CoreMemoryTest, rows_mapped_ahead_go_before_recorded_prefixes) {
  const VTensorId first = recorded(tokens_from(0, 4), 'a');
  core_.retirement.release(first);
  const VTensorId ahead = extended(2);
  const size_t target = 12;
  Extension extension = core_.extender.plan_pre_extend(ahead, target);
  extension.run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  core_.extender.commit(extension);
  ASSERT_EQ(pset().num_claimable(), 0U);
  EXPECT_TRUE(extend(*core_.placement.create(tokens_from(50, 4), ""), 8));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 4U);
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(ahead).slot), 1U);
}

TEST_P(CoreMemoryTest, recorded_prefixes_go_when_nothing_else_is_left) {
  core_.retirement.release(recorded(tokens_from(0, 16), 'a'));
  const VTensorId id = *core_.placement.create(tokens_from(50, 1), "");
  EXPECT_TRUE(extend(id, 12));
  EXPECT_LT(faulty_.pool.rtree.num_tokens(), 16U);
  EXPECT_GT(core_.state.counters.chunks_evicted, 0U);
}

TEST_P(CoreMemoryTest, shortage_takes_nothing_from_anybody) {
  core_.retirement.release(recorded(tokens_from(0, 8), 'a'));
  const VTensorId id = extended(4);
  const int64_t before = calls();
  EXPECT_FALSE(extend(id, 36));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 8U);
  EXPECT_EQ(calls(), before);
}

// As after a rejected proposal: the first one has a row beyond what it is to grow to now.
TEST_P(CoreMemoryTest, rows_that_a_plan_does_not_need_go_to_others_of_it) {
  const VTensorId ids[] = {extended(12), extended(4)};
  core_.extender.truncate(ids[0], 5);
  const size_t too_many[] = {6, 9};
  EXPECT_FALSE(core_.extender.plan_extend(ids, too_many));
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(ids[0]).slot), 3U);
  const size_t num_tokens[] = {6, 5};
  std::optional<Extension> extension = core_.extender.plan_extend(ids, num_tokens);
  ASSERT_TRUE(extension);
  extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  core_.extender.commit(*extension);
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(ids[0]).slot), 2U);
  EXPECT_EQ(live(ids[0]).num_tokens, 6U);
}

TEST_P(CoreMemoryTest, surplus_rows_under_views_stay) {
  const VTensorId victim = extended(16);
  core_.extender.truncate(victim, 1);
  faulty_.pool.vset[live(victim).slot].num_views = 1;
  const VTensorId other = *core_.placement.create({}, "");
  EXPECT_FALSE(extend(other, 4));
  faulty_.pool.vset[live(victim).slot].num_views = 0;
  EXPECT_TRUE(extend(other, 4));
}

TEST_P(CoreMemoryTest, surplus_rows_are_scrubbed_for_their_next_owner) {
  const VTensorId victim = extended(16);
  for (size_t t = 0; t < 16; ++t) at(victim, t) = 's';
  core_.extender.truncate(victim, 1);
  const VTensorId other = *core_.placement.create({}, "");
  EXPECT_TRUE(extend(other, 12));
  for (size_t t = 0; t < 12; ++t) EXPECT_EQ(at(other, t), '\0') << "token " << t;
}

TEST_P(CoreMemoryTest, pre_extension_that_cannot_succeed_evicts_nothing) {
  core_.retirement.release(recorded(tokens_from(0, 4), 'a'));
  core_.reclaimer.trim();
  const VTensorId id = extended(12);
  const size_t target = 28;
  EXPECT_TRUE(core_.extender.plan_pre_extend(id, target).parts.empty());
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 4U);
}

TEST_P(CoreMemoryTest, a_lower_budget_evicts_and_gives_back) {
  core_.retirement.release(recorded(tokens_from(0, 16), 'a'));
  EXPECT_TRUE(core_.reclaimer.set_budget_chunks(4));
  EXPECT_EQ(pset().num_created(), 4U);
}

TEST_P(CoreMemoryTest, a_budget_below_what_is_in_use_is_refused) {
  extended(16);
  EXPECT_FALSE(core_.reclaimer.set_budget_chunks(6));
  EXPECT_EQ(pset().budget_chunks(), 8U);
}

TEST_P(CoreMemoryTest, trim_gives_back_free_and_parked_chunks_only) {
  const VTensorId kept = extended(4);
  core_.retirement.release(extended(8));
  EXPECT_EQ(core_.reclaimer.trim(), 4 * kChunk);
  EXPECT_EQ(pset().num_created(), 2U);
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(kept).slot), 1U);
}

// ------------------------------------------------------------- a bound on what nobody uses

class CoreIdleTest : public CoreTest {
 protected:
  CoreIdleTest() : CoreTest({.prefix_cache_chunks = 8}) {}

  size_t recorded_tokens() { return faulty_.pool.rtree.num_tokens(); }

  void run_upkeep(Core& core) {
    while (std::optional<UpkeepTask> task = core.upkeep.plan()) {
      task->run(faulty_.faults, kChunk);
      core.upkeep.finish(*task);
    }
  }
  size_t num_ready(Core& core, bool busy) {
    core.upkeep.set_busy(busy);
    run_upkeep(core);
    return pset().num_free();
  }
};

TEST_P(CoreIdleTest, beyond_the_bound_idle_chunks_are_reused_before_any_is_created) {
  for (Token first = 0; first < 600; first += 100) {
    core_.retirement.release(recorded(tokens_from(first, 8), 'a'));  // 4 chunks each
  }
  EXPECT_EQ(pset().num_created(), 12U);  // 8 idle ones, 4 in use
  EXPECT_EQ(core_.reclaimer.num_idle(), 12U);
  EXPECT_EQ(core_.state.counters.chunks_evicted, 12U);
  EXPECT_EQ(recorded_tokens(), 24U);  // the latest
  EXPECT_EQ(pool_matches(tokens_from(500, 8)), 8U);
  EXPECT_EQ(pool_matches(tokens_from(200, 8)), 0U);
}

TEST_P(CoreIdleTest, what_is_reused_is_scrubbed) {
  for (Token first = 0; first < 600; first += 100) {
    core_.retirement.release(recorded(tokens_from(first, 8), 's'));
  }
  const VTensorId id = *core_.placement.create({}, "");
  EXPECT_TRUE(extend(id, 8));
  EXPECT_EQ(pset().num_created(), 12U);
  for (size_t t = 0; t < 8; ++t) EXPECT_EQ(at(id, t), '\0') << "token " << t;
}

TEST_P(CoreIdleTest, what_is_in_use_is_never_reused) {
  const VTensorId user = recorded(tokens_from(0, 16), 'a');  // 8 chunks
  core_.retirement.release(*core_.placement.fork(user));
  const VTensorId other = recorded(tokens_from(100, 16), 'b');
  const VTensorId third = recorded(tokens_from(200, 16), 'c');
  EXPECT_EQ(core_.reclaimer.num_idle(), 0U);
  EXPECT_EQ(pset().num_created(), 24U);
  EXPECT_EQ(at(user, 15), 'a');
  EXPECT_EQ(at(other, 15), 'b');
  EXPECT_EQ(at(third, 15), 'c');
}

TEST_P(CoreIdleTest, the_worker_reuses_idle_chunks_as_well) {
  for (Token first = 0; first < 300; first += 100) {
    core_.retirement.release(recorded(tokens_from(first, 8), 'a'));
  }
  const VTensorId id = *core_.placement.create({}, "");
  const size_t target = 8;
  Extension extension = core_.extender.plan_pre_extend(id, target);
  extension.run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  core_.extender.commit(extension);
  EXPECT_EQ(pset().num_created(), 12U);
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(id).slot), 2U);
}

TEST_P(CoreIdleTest, kept_ready_chunks_come_from_idle_ones_first) {
  CoreOptions options{.min_free_chunks = 2, .prefix_cache_chunks = 0};
  Core eager(faulty_.pool, options);
  const VTensorId id = *eager.placement.create({}, "");
  const size_t target = 8;
  std::optional<Extension> extension = eager.extender.plan_extend({&id, 1}, {&target, 1});
  extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  eager.extender.commit(*extension);
  eager.retirement.release(id);  // parked: 4 idle chunks
  ASSERT_EQ(eager.upkeep.next(), UpkeepTask::Kind::kCreate);
  std::optional<UpkeepTask> task = eager.upkeep.plan();
  ASSERT_TRUE(task);
  EXPECT_EQ(task->kind, UpkeepTask::Kind::kScrub);
  task->run(faulty_.faults, kChunk);
  eager.upkeep.finish(*task);
  EXPECT_EQ(pset().num_created(), 4U);
}

TEST_P(CoreIdleTest, what_upkeep_keeps_ready_counts_as_idle) {
  CoreOptions options{.min_free_chunks = 3, .prefix_cache_chunks = 5};
  Core eager(faulty_.pool, options);
  for (Token first = 0; first < 600; first += 100) {
    const Tokens tokens = tokens_from(first, 8);
    const VTensorId id = *eager.placement.create(tokens, "");
    const size_t target = 8;  // 4 chunks
    std::optional<Extension> extension = eager.extender.plan_extend({&id, 1}, {&target, 1});
    ASSERT_TRUE(extension);
    extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
    eager.extender.commit(*extension);
    run_upkeep(eager);
    EXPECT_EQ(pset().num_free(), 3U);
    EXPECT_LE(pset().num_created(), 4U + 5U);
    eager.recorder.record_prefix(id, tokens);
    eager.retirement.release(id);
  }
}

TEST_P(CoreIdleTest, what_goes_back_is_not_scrubbed_before_and_clean_chunks_stay) {
  Core core(faulty_.pool, {.park = false});
  const VTensorId id = *core.placement.create({}, "");
  const size_t target = 8;  // 4 chunks
  std::optional<Extension> extension = core.extender.plan_extend({&id, 1}, {&target, 1});
  extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  core.extender.commit(*extension);
  core.retirement.release(id);
  const auto run_chore = [&] {
    std::optional<UpkeepTask> task = core.upkeep.plan();
    task->run(faulty_.faults, kChunk);
    core.upkeep.finish(*task);
    return task->kind;
  };
  for (int i = 0; i < 2; ++i) EXPECT_EQ(run_chore(), UpkeepTask::Kind::kScrub);
  core.state.options.max_free_chunks = 2;
  for (int i = 0; i < 2; ++i) EXPECT_EQ(run_chore(), UpkeepTask::Kind::kRelease);
  EXPECT_EQ(pset().num_free(), 2U);
  EXPECT_FALSE(core.upkeep.next());
}

TEST_P(CoreIdleTest, while_steps_run_a_quarter_is_kept_ready) {
  Core eager(faulty_.pool, {.min_free_chunks = 9});
  EXPECT_EQ(num_ready(eager, true), 3U);
  EXPECT_EQ(num_ready(eager, false), 9U);
  EXPECT_EQ(num_ready(eager, true), 9U);  // what is there stays
}

TEST_P(CoreIdleTest, what_is_kept_ready_between_steps_takes_nothing_that_is_cached) {
  Core eager(faulty_.pool, {.min_free_chunks = 6, .prefix_cache_chunks = 7});
  const VTensorId id = *eager.placement.create(tokens_from(0, 8), "");
  const size_t target = 8;  // 4 chunks
  std::optional<Extension> extension = eager.extender.plan_extend({&id, 1}, {&target, 1});
  extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  eager.extender.commit(*extension);
  eager.recorder.record_prefix(id, tokens_from(0, 8));
  eager.retirement.release(id);
  EXPECT_EQ(num_ready(eager, false), 3U);
  EXPECT_EQ(recorded_tokens(), 8U);
}

TEST_P(CoreIdleTest, a_fraction_follows_the_budget) {
  Core core(faulty_.pool, {.prefix_cache_chunks = 8, .prefix_cache_fraction = 0.25});
  ASSERT_TRUE(core.reclaimer.set_budget_chunks(20));
  EXPECT_EQ(core.reclaimer.max_idle(), 5U);
  ASSERT_TRUE(core.reclaimer.set_budget_chunks(12));
  EXPECT_EQ(core.reclaimer.max_idle(), 3U);
  ASSERT_TRUE(core.reclaimer.set_budget_chunks(64));
  EXPECT_EQ(core.reclaimer.max_idle(), 8U);  // the lesser of the two
}

VTENSOR_ON_EVERY_MEMORY(CoreMemoryTest);
VTENSOR_ON_EVERY_MEMORY(CoreIdleTest);

}  // namespace
}  // namespace vtensor
