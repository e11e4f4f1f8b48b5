#include "vtensor/core/core.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/cpp/support/core_fixture.h"

namespace vtensor {
namespace {

// Four tokens per chunk, two planes, real memory (that of the stand-in on Cuda): byte 0 of each
// token tells who wrote it.
class CoreTest : public DriverTest {
 protected:
  explicit CoreTest(const CoreOptions& options = {}, size_t budget_chunks = 64)
      : faulty_(small_geometry(), budget_chunks), core_(faulty_.pool, options) {}

  void TearDown() override { check_integrity(core_); }

  bool extend(VTensorId id, size_t num_tokens) {
    if (core_.extender.extend_in_place({&id, 1}, {&num_tokens, 1})) return true;
    std::optional<Extension> extension = core_.extender.plan_extend({&id, 1}, {&num_tokens, 1});
    if (!extension) return false;
    extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
    core_.extender.commit(*extension);
    return true;
  }

  volatile char& at(VTensorId id, size_t token, size_t plane = 0) {
    const uintptr_t base = faulty_.pool.vset.address(plane, core_.vtensors.live(id).slot, 0);
    return *reinterpret_cast<volatile char*>(base + token * kKiB);
  }

  // A vTensor of `tokens`, all of them written as `mark`, recorded.
  VTensorId recorded(const Tokens& tokens, char mark, const std::string& salt = "") {
    const VTensorId id = *core_.placement.create(tokens, salt);
    const size_t cached = core_.vtensors.live(id).num_tokens;
    EXPECT_TRUE(extend(id, tokens.size()));
    for (size_t t = cached; t < tokens.size(); ++t) {
      for (size_t plane = 0; plane < 2; ++plane) at(id, t, plane) = mark;
    }
    core_.recorder.record_prefix(id, tokens);
    return id;
  }

  const VTensor& live(VTensorId id) { return core_.vtensors.live(id); }
  size_t pool_matches(const Tokens& tokens) {
    return faulty_.pool.rtree.match("", tokens).num_tokens;
  }
  size_t copied() { return core_.state.counters.chunks_copied; }
  int64_t calls() { return faulty_.faults.num_calls(); }
  PSet& pset() { return faulty_.pool.pset; }

  FaultyPool faulty_;
  Core core_;
};

TEST_P(CoreTest, a_newcomer_at_the_watermark_takes_over_without_a_copy) {
  core_.retirement.release(recorded(tokens_from(0, 6), 'a'));
  const VTensorId next = *core_.placement.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(next, 7));
  at(next, 6) = 'b';
  EXPECT_EQ(copied(), 0U);
  EXPECT_EQ(at(next, 5), 'a');
}

TEST_P(CoreTest, while_the_appender_lives_a_newcomer_copies_one_chunk_a_plane) {
  const VTensorId first = recorded(tokens_from(0, 6), 'a');
  const VTensorId second = *core_.placement.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(first, 7));
  EXPECT_TRUE(extend(second, 7));
  at(first, 6) = 'x';
  at(second, 6) = 'y';
  EXPECT_EQ(copied(), 2U);
  EXPECT_EQ(at(first, 6), 'x');
  EXPECT_EQ(at(second, 5, 1), 'a');
}

TEST_P(CoreTest, of_two_newcomers_the_first_takes_over_and_the_second_copies) {
  core_.retirement.release(recorded(tokens_from(0, 6), 'a'));
  const VTensorId first = *core_.placement.create(tokens_from(0, 6), "");
  const VTensorId second = *core_.placement.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(first, 7));
  EXPECT_EQ(copied(), 0U);
  EXPECT_TRUE(extend(second, 7));
  EXPECT_EQ(copied(), 2U);
}

TEST_P(CoreTest, what_an_abandoned_copy_wrote_is_scrubbed_for_the_next_owner) {
  recorded(tokens_from(0, 6), 'a');
  const VTensorId second = *core_.placement.create(tokens_from(0, 6), "");
  const size_t length = 7;
  auto extension = core_.extender.plan_extend({&second, 1}, {&length, 1});
  const bool in_place = faulty_.faults.remaps_in_place();
  faulty_.faults.set_plan(
      {.fail_at = 1, .only = in_place ? CallKind::kRemap : CallKind::kSetAccess});
  EXPECT_THROW(extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry),
               DriverError);
  faulty_.fail_never();
  core_.extender.abandon(*extension);
  const VTensorId next = *core_.placement.create({}, "");
  EXPECT_TRUE(extend(next, 4));  // one row: the chunks that the copy was made in
  for (size_t t = 0; t < 4; ++t) {
    EXPECT_EQ(at(next, t, 0), 0);
    EXPECT_EQ(at(next, t, 1), 0);
  }
}

TEST_P(CoreTest, a_newcomer_below_the_watermark_copies) {
  core_.retirement.release(recorded(tokens_from(0, 7), 'a'));
  const VTensorId other = *core_.placement.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(other, 7));
  EXPECT_EQ(copied(), 2U);
}

TEST_P(CoreTest, a_newcomer_at_a_row_border_copies_nothing) {
  recorded(tokens_from(0, 8), 'a');
  const VTensorId other = *core_.placement.create(tokens_from(0, 8), "");
  EXPECT_TRUE(extend(other, 12));
  EXPECT_EQ(copied(), 0U);
}

TEST_P(CoreTest, a_fork_copies_when_it_writes_and_its_parent_does_not) {
  const VTensorId parent = recorded(tokens_from(0, 6), 'a');
  const VTensorId child = *core_.placement.fork(parent);
  EXPECT_TRUE(extend(parent, 7));
  EXPECT_EQ(copied(), 0U);
  at(parent, 6) = 'p';
  EXPECT_TRUE(extend(child, 7));
  EXPECT_EQ(copied(), 2U);
  EXPECT_EQ(at(child, 6), '\0');
  EXPECT_EQ(at(child, 5), 'a');
}

TEST_P(CoreTest, the_fork_of_a_released_parent_takes_over) {
  const VTensorId parent = recorded(tokens_from(0, 6), 'a');
  const VTensorId child = *core_.placement.fork(parent);
  core_.retirement.release(parent);
  EXPECT_TRUE(extend(child, 7));
  EXPECT_EQ(copied(), 0U);
}

TEST_P(CoreTest, a_fork_into_the_last_slot_works_and_then_none_is_left) {
  const VTensorId parent = recorded(tokens_from(0, 6), 'a');
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(core_.placement.fork(parent));
  EXPECT_EQ(core_.placement.fork(parent), std::nullopt);
  EXPECT_EQ(core_.placement.create({}, ""), std::nullopt);
}

TEST_P(CoreTest, the_next_turn_adopts_the_parked_slot_without_any_driver_call) {
  core_.retirement.release(recorded(tokens_from(0, 6), 'a'));
  const int64_t before = calls();
  const VTensorId next = *core_.placement.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(next, 8));
  EXPECT_EQ(calls(), before);
  EXPECT_EQ(core_.state.counters.chunks_adopted, 4U);
}

TEST_P(CoreTest, of_two_parked_slots_the_one_with_the_prefix_is_adopted) {
  const VTensorId first = recorded(tokens_from(0, 8), 'a');
  const VTensorId second = recorded(tokens_from(100, 8), 'b');
  const SlotId wanted = live(second).slot;
  core_.retirement.release(first);
  core_.retirement.release(second);
  EXPECT_EQ(live(*core_.placement.create(tokens_from(100, 8), "")).slot, wanted);
}

TEST_P(CoreTest, private_rows_of_a_parked_slot_are_scrubbed_for_a_stranger) {
  const VTensorId first = *core_.placement.create({}, "");
  EXPECT_TRUE(extend(first, 8));
  at(first, 3) = 's';
  core_.retirement.release(first);
  const VTensorId stranger = *core_.placement.create(tokens_from(0, 8), "");
  EXPECT_TRUE(extend(stranger, 8));
  EXPECT_EQ(at(stranger, 3), '\0');
}

TEST_P(CoreTest, truncation_below_recorded_tokens_never_rewrites_them) {
  const VTensorId id = recorded(tokens_from(0, 7), 'a');
  core_.extender.truncate(id, 5);
  EXPECT_TRUE(extend(id, 8));
  for (size_t t = 5; t < 8; ++t) at(id, t) = 'z';
  EXPECT_EQ(copied(), 2U);
  const VTensorId reader = *core_.placement.create(tokens_from(0, 7), "");
  EXPECT_EQ(live(reader).num_tokens, 7U);
  EXPECT_EQ(at(reader, 6), 'a');
}

TEST_P(CoreTest, truncation_into_an_aliased_row_never_rewrites_it) {
  core_.retirement.release(recorded(tokens_from(0, 12), 'a'));
  const VTensorId id = *core_.placement.create(tokens_from(0, 12), "");
  core_.extender.truncate(id, 2);
  EXPECT_TRUE(extend(id, 12));
  for (size_t t = 2; t < 12; ++t) at(id, t) = 'z';
  EXPECT_EQ(at(*core_.placement.create(tokens_from(0, 12), ""), 3), 'a');
}

TEST_P(CoreTest, truncation_of_unshared_tokens_keeps_the_rows) {
  const VTensorId id = *core_.placement.create({}, "");
  EXPECT_TRUE(extend(id, 12));
  const int64_t before = calls();
  core_.extender.truncate(id, 1);
  EXPECT_TRUE(extend(id, 12));
  EXPECT_EQ(calls(), before);
}

TEST_P(CoreTest, what_truncation_frees_is_known_to_be_dirty) {
  const VTensorId id = recorded(tokens_from(0, 8), 's');
  core_.extender.truncate(id, 0);
  faulty_.pool.rtree.clear();
  ASSERT_EQ(pset().num_free(), 4U);
  for (ChunkId chunk = 0; chunk < 4; ++chunk) EXPECT_EQ(pset()[chunk].dirty_bytes, kChunk);
}

TEST_P(CoreTest, a_recorded_chunk_that_its_writer_gave_up_has_no_appender) {
  const VTensorId id = recorded(tokens_from(0, 8), 'a');
  core_.extender.truncate(id, 0);
  for (ChunkId chunk = 0; chunk < 4; ++chunk) EXPECT_EQ(pset()[chunk].appender, kNoVTensor);
}

TEST_P(CoreTest, extending_by_nothing_new_is_no_driver_call) {
  const VTensorId id = recorded(tokens_from(0, 6), 'a');
  const int64_t before = calls();
  EXPECT_TRUE(extend(id, 8));
  EXPECT_TRUE(extend(id, 2));
  EXPECT_EQ(live(id).num_tokens, 8U);
  EXPECT_EQ(calls(), before);
}

TEST_P(CoreTest, a_batch_is_extended_by_all_or_none) {
  const VTensorId a = *core_.placement.create({}, "");
  const VTensorId b = *core_.placement.create({}, "");
  const std::vector<VTensorId> ids{a, b};
  const std::vector<size_t> lengths{8, 64};
  EXPECT_TRUE(core_.reclaimer.set_budget_chunks(20));
  EXPECT_FALSE(core_.extender.plan_extend(ids, lengths));
  EXPECT_EQ(live(a).num_tokens, 0U);
  EXPECT_EQ(pset().num_created(), 0U);
}

TEST_P(CoreTest, stale_and_foreign_ids_are_told_apart) {
  const VTensorId id = *core_.placement.create({}, "");
  core_.retirement.release(id);
  EXPECT_THROW(core_.vtensors.live(id), ReleasedError);
  EXPECT_THROW(core_.vtensors.live(kNoVTensor), std::out_of_range);
  EXPECT_THROW(core_.vtensors.live(id + 4000), std::out_of_range);
}

// ---------------------------------------------------------------------------- where memory comes
// from

class SchedulerMemoryTest : public CoreTest {
 protected:
  SchedulerMemoryTest() : CoreTest({}, /*budget_chunks=*/8) {}

  VTensorId extended(size_t num_tokens) {
    const VTensorId id = *core_.placement.create({}, "");
    EXPECT_TRUE(extend(id, num_tokens));
    return id;
  }
};

TEST_P(SchedulerMemoryTest, parked_private_chunks_go_before_recorded_prefixes) {
  core_.retirement.release(recorded(tokens_from(0, 8), 'a'));
  const VTensorId live_one = *core_.placement.create(tokens_from(0, 8), "");  // adopts
  const VTensorId parked = extended(8);
  core_.retirement.release(parked);
  faulty_.pool.vset.make_live(live(live_one).slot == 0 ? 1 : 0);  // so that nobody adopts it
  faulty_.pool.vset.park(live(live_one).slot == 0 ? 1 : 0);
  EXPECT_TRUE(extend(live_one, 16));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 8U);
}

TEST_P(SchedulerMemoryTest, rows_mapped_ahead_go_before_recorded_prefixes) {
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

TEST_P(SchedulerMemoryTest, recorded_prefixes_go_when_nothing_else_is_left) {
  core_.retirement.release(recorded(tokens_from(0, 16), 'a'));
  const VTensorId id = *core_.placement.create(tokens_from(50, 1), "");
  EXPECT_TRUE(extend(id, 12));
  EXPECT_LT(faulty_.pool.rtree.num_tokens(), 16U);
  EXPECT_GT(core_.state.counters.chunks_evicted, 0U);
}

TEST_P(SchedulerMemoryTest, shortage_takes_nothing_from_anybody) {
  core_.retirement.release(recorded(tokens_from(0, 8), 'a'));
  const VTensorId id = extended(4);
  const int64_t before = calls();
  EXPECT_FALSE(extend(id, 36));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 8U);
  EXPECT_EQ(calls(), before);
}

TEST_P(SchedulerMemoryTest, surplus_rows_under_views_stay) {
  const VTensorId victim = extended(16);
  core_.extender.truncate(victim, 1);
  faulty_.pool.vset[live(victim).slot].num_views = 1;
  const VTensorId other = *core_.placement.create({}, "");
  EXPECT_FALSE(extend(other, 4));
  faulty_.pool.vset[live(victim).slot].num_views = 0;
  EXPECT_TRUE(extend(other, 4));
}

TEST_P(SchedulerMemoryTest, surplus_rows_are_scrubbed_for_their_next_owner) {
  const VTensorId victim = extended(16);
  for (size_t t = 0; t < 16; ++t) at(victim, t) = 's';
  core_.extender.truncate(victim, 1);
  const VTensorId other = *core_.placement.create({}, "");
  EXPECT_TRUE(extend(other, 12));
  for (size_t t = 0; t < 12; ++t) EXPECT_EQ(at(other, t), '\0') << "token " << t;
}

TEST_P(SchedulerMemoryTest, pre_extension_that_cannot_succeed_evicts_nothing) {
  core_.retirement.release(recorded(tokens_from(0, 4), 'a'));
  core_.reclaimer.trim();
  const VTensorId id = extended(12);
  const size_t target = 28;
  EXPECT_TRUE(core_.extender.plan_pre_extend(id, target).parts.empty());
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 4U);
}

TEST_P(SchedulerMemoryTest, a_lower_budget_evicts_and_gives_back) {
  core_.retirement.release(recorded(tokens_from(0, 16), 'a'));
  EXPECT_TRUE(core_.reclaimer.set_budget_chunks(4));
  EXPECT_EQ(pset().num_created(), 4U);
}

TEST_P(SchedulerMemoryTest, a_budget_below_what_is_in_use_is_refused) {
  extended(16);
  EXPECT_FALSE(core_.reclaimer.set_budget_chunks(6));
  EXPECT_EQ(pset().budget_chunks(), 8U);
}

TEST_P(SchedulerMemoryTest, trim_gives_back_free_and_parked_chunks_only) {
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
  const auto run_chores = [&] {
    while (std::optional<UpkeepTask> task = eager.upkeep.plan()) {
      task->run(faulty_.faults, kChunk);
      eager.upkeep.finish(*task);
    }
  };
  for (Token first = 0; first < 600; first += 100) {
    const Tokens tokens = tokens_from(first, 8);
    const VTensorId id = *eager.placement.create(tokens, "");
    const size_t target = 8;  // 4 chunks
    std::optional<Extension> extension = eager.extender.plan_extend({&id, 1}, {&target, 1});
    ASSERT_TRUE(extension);
    extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
    eager.extender.commit(*extension);
    run_chores();
    EXPECT_EQ(pset().num_free(), 3U);
    EXPECT_LE(pset().num_created(), 4U + 5U);
    eager.recorder.record_prefix(id, tokens);
    eager.retirement.release(id);
  }
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

// ----------------------------------------------------------------------------- without alias

class SchedulerCopyTest : public CoreTest {
 protected:
  SchedulerCopyTest() : CoreTest({.alias = false}) {}
};

TEST_P(SchedulerCopyTest, a_prefix_is_copied_and_nothing_beyond_it) {
  const Tokens tokens = tokens_from(0, 7);
  const VTensorId first = recorded(tokens, 'a');
  const VTensorId second = *core_.placement.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(second, 8));
  EXPECT_EQ(at(second, 5, 1), 'a');
  EXPECT_EQ(at(second, 6), '\0');
  EXPECT_EQ(at(first, 6), 'a');
}

TEST_P(SchedulerCopyTest, a_copy_that_fails_leaves_nothing_behind) {
  recorded(tokens_from(0, 7), 'a');
  faulty_.faults.set_plan({.fail_at = 1, .only = CallKind::kCopy});
  EXPECT_THROW(core_.placement.create(tokens_from(0, 6), ""), DriverError);
  EXPECT_EQ(core_.vtensors.live_ids().size(), 1U);
}

VTENSOR_ON_EVERY_MEMORY(CoreTest);
VTENSOR_ON_EVERY_MEMORY(SchedulerMemoryTest);
VTENSOR_ON_EVERY_MEMORY(CoreIdleTest);
VTENSOR_ON_EVERY_MEMORY(SchedulerCopyTest);

}  // namespace
}  // namespace vtensor
