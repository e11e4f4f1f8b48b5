#include "vtensor/core/scheduler.h"

#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "tests/cpp/support/core_fixture.h"

namespace vtensor {
namespace {

// Four tokens a chunk, two planes, real memory (that of the stand-in on Cuda): byte 0 of each token
// tells who wrote it.
class SchedulerTest : public DriverTest {
 protected:
  explicit SchedulerTest(const SchedulerOptions& options = {}, size_t budget_chunks = 64)
      : faulty_(small_geometry(), budget_chunks), scheduler_(faulty_.pool, options) {}

  void TearDown() override { check_integrity(scheduler_); }

  bool extend(VTensorId id, size_t num_tokens) {
    if (scheduler_.extend_in_place({&id, 1}, {&num_tokens, 1})) return true;
    std::optional<Growth> growth = scheduler_.plan_extend({&id, 1}, {&num_tokens, 1});
    if (!growth) return false;
    growth->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
    scheduler_.commit(*growth);
    return true;
  }

  volatile char& at(VTensorId id, size_t token, size_t plane = 0) {
    const uintptr_t base = faulty_.pool.vset.address(plane, scheduler_.live(id).slot, 0);
    return *reinterpret_cast<volatile char*>(base + token * kKiB);
  }

  // A vTensor of `tokens`, all of them written as `mark`, recorded.
  VTensorId recorded(const Tokens& tokens, char mark, const std::string& salt = "") {
    const VTensorId id = *scheduler_.create(tokens, salt);
    const size_t cached = scheduler_.live(id).num_tokens;
    EXPECT_TRUE(extend(id, tokens.size()));
    for (size_t t = cached; t < tokens.size(); ++t) {
      for (size_t plane = 0; plane < 2; ++plane) at(id, t, plane) = mark;
    }
    scheduler_.record_prefix(id, tokens);
    return id;
  }

  const VTensor& live(VTensorId id) { return scheduler_.live(id); }
  size_t pool_matches(const Tokens& tokens) {
    return faulty_.pool.rtree.match("", tokens).num_tokens;
  }
  size_t copied() { return scheduler_.counters().chunks_copied; }
  int64_t calls() { return faulty_.faults.num_calls(); }
  PSet& pset() { return faulty_.pool.pset; }

  FaultyPool faulty_;
  Scheduler scheduler_;
};

TEST_P(SchedulerTest, a_newcomer_at_the_watermark_takes_over_without_a_copy) {
  scheduler_.release(recorded(tokens_from(0, 6), 'a'));
  const VTensorId next = *scheduler_.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(next, 7));
  at(next, 6) = 'b';
  EXPECT_EQ(copied(), 0U);
  EXPECT_EQ(at(next, 5), 'a');
}

TEST_P(SchedulerTest, while_the_appender_lives_a_newcomer_copies_one_chunk_a_plane) {
  const VTensorId first = recorded(tokens_from(0, 6), 'a');
  const VTensorId second = *scheduler_.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(first, 7));
  EXPECT_TRUE(extend(second, 7));
  at(first, 6) = 'x';
  at(second, 6) = 'y';
  EXPECT_EQ(copied(), 2U);
  EXPECT_EQ(at(first, 6), 'x');
  EXPECT_EQ(at(second, 5, 1), 'a');
}

TEST_P(SchedulerTest, of_two_newcomers_the_first_takes_over_and_the_second_copies) {
  scheduler_.release(recorded(tokens_from(0, 6), 'a'));
  const VTensorId first = *scheduler_.create(tokens_from(0, 6), "");
  const VTensorId second = *scheduler_.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(first, 7));
  EXPECT_EQ(copied(), 0U);
  EXPECT_TRUE(extend(second, 7));
  EXPECT_EQ(copied(), 2U);
}

TEST_P(SchedulerTest, a_newcomer_below_the_watermark_copies) {
  scheduler_.release(recorded(tokens_from(0, 7), 'a'));
  const VTensorId other = *scheduler_.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(other, 7));
  EXPECT_EQ(copied(), 2U);
}

TEST_P(SchedulerTest, a_newcomer_at_a_row_border_copies_nothing) {
  recorded(tokens_from(0, 8), 'a');
  const VTensorId other = *scheduler_.create(tokens_from(0, 8), "");
  EXPECT_TRUE(extend(other, 12));
  EXPECT_EQ(copied(), 0U);
}

TEST_P(SchedulerTest, a_fork_copies_when_it_writes_and_its_parent_does_not) {
  const VTensorId parent = recorded(tokens_from(0, 6), 'a');
  const VTensorId child = *scheduler_.fork(parent);
  EXPECT_TRUE(extend(parent, 7));
  EXPECT_EQ(copied(), 0U);
  at(parent, 6) = 'p';
  EXPECT_TRUE(extend(child, 7));
  EXPECT_EQ(copied(), 2U);
  EXPECT_EQ(at(child, 6), '\0');
  EXPECT_EQ(at(child, 5), 'a');
}

TEST_P(SchedulerTest, the_fork_of_a_released_parent_takes_over) {
  const VTensorId parent = recorded(tokens_from(0, 6), 'a');
  const VTensorId child = *scheduler_.fork(parent);
  scheduler_.release(parent);
  EXPECT_TRUE(extend(child, 7));
  EXPECT_EQ(copied(), 0U);
}

TEST_P(SchedulerTest, a_fork_into_the_last_slot_works_and_then_none_is_left) {
  const VTensorId parent = recorded(tokens_from(0, 6), 'a');
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(scheduler_.fork(parent));
  EXPECT_EQ(scheduler_.fork(parent), std::nullopt);
  EXPECT_EQ(scheduler_.create({}, ""), std::nullopt);
}

TEST_P(SchedulerTest, the_next_turn_adopts_the_parked_slot_without_any_driver_call) {
  scheduler_.release(recorded(tokens_from(0, 6), 'a'));
  const int64_t before = calls();
  const VTensorId next = *scheduler_.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(next, 8));
  EXPECT_EQ(calls(), before);
  EXPECT_EQ(scheduler_.counters().chunks_adopted, 4U);
}

TEST_P(SchedulerTest, of_two_parked_slots_the_one_with_the_prefix_is_adopted) {
  const VTensorId first = recorded(tokens_from(0, 8), 'a');
  const VTensorId second = recorded(tokens_from(100, 8), 'b');
  const SlotId wanted = live(second).slot;
  scheduler_.release(first);
  scheduler_.release(second);
  EXPECT_EQ(live(*scheduler_.create(tokens_from(100, 8), "")).slot, wanted);
}

TEST_P(SchedulerTest, private_rows_of_a_parked_slot_are_scrubbed_for_a_stranger) {
  const VTensorId first = *scheduler_.create({}, "");
  EXPECT_TRUE(extend(first, 8));
  at(first, 3) = 's';
  scheduler_.release(first);
  const VTensorId stranger = *scheduler_.create(tokens_from(0, 8), "");
  EXPECT_TRUE(extend(stranger, 8));
  EXPECT_EQ(at(stranger, 3), '\0');
}

TEST_P(SchedulerTest, truncation_below_recorded_tokens_never_rewrites_them) {
  const VTensorId id = recorded(tokens_from(0, 7), 'a');
  scheduler_.truncate(id, 5);
  EXPECT_TRUE(extend(id, 8));
  for (size_t t = 5; t < 8; ++t) at(id, t) = 'z';
  EXPECT_EQ(copied(), 2U);
  const VTensorId reader = *scheduler_.create(tokens_from(0, 7), "");
  EXPECT_EQ(live(reader).num_tokens, 7U);
  EXPECT_EQ(at(reader, 6), 'a');
}

TEST_P(SchedulerTest, truncation_into_an_aliased_row_never_rewrites_it) {
  scheduler_.release(recorded(tokens_from(0, 12), 'a'));
  const VTensorId id = *scheduler_.create(tokens_from(0, 12), "");
  scheduler_.truncate(id, 2);
  EXPECT_TRUE(extend(id, 12));
  for (size_t t = 2; t < 12; ++t) at(id, t) = 'z';
  EXPECT_EQ(at(*scheduler_.create(tokens_from(0, 12), ""), 3), 'a');
}

TEST_P(SchedulerTest, truncation_of_unshared_tokens_keeps_the_rows) {
  const VTensorId id = *scheduler_.create({}, "");
  EXPECT_TRUE(extend(id, 12));
  const int64_t before = calls();
  scheduler_.truncate(id, 1);
  EXPECT_TRUE(extend(id, 12));
  EXPECT_EQ(calls(), before);
}

TEST_P(SchedulerTest, what_truncation_frees_is_known_to_be_dirty) {
  const VTensorId id = recorded(tokens_from(0, 8), 's');
  scheduler_.truncate(id, 0);
  faulty_.pool.rtree.clear();
  ASSERT_EQ(pset().num_free(), 4U);
  for (ChunkId chunk = 0; chunk < 4; ++chunk) EXPECT_EQ(pset()[chunk].dirty_bytes, kChunk);
}

TEST_P(SchedulerTest, a_recorded_chunk_that_its_writer_gave_up_has_no_appender) {
  const VTensorId id = recorded(tokens_from(0, 8), 'a');
  scheduler_.truncate(id, 0);
  for (ChunkId chunk = 0; chunk < 4; ++chunk) EXPECT_EQ(pset()[chunk].appender, kNoVTensor);
}

TEST_P(SchedulerTest, extending_by_nothing_new_is_no_driver_call) {
  const VTensorId id = recorded(tokens_from(0, 6), 'a');
  const int64_t before = calls();
  EXPECT_TRUE(extend(id, 8));
  EXPECT_TRUE(extend(id, 2));
  EXPECT_EQ(live(id).num_tokens, 8U);
  EXPECT_EQ(calls(), before);
}

TEST_P(SchedulerTest, a_batch_is_extended_by_all_or_none) {
  const VTensorId a = *scheduler_.create({}, "");
  const VTensorId b = *scheduler_.create({}, "");
  const std::vector<VTensorId> ids{a, b};
  const std::vector<size_t> lengths{8, 64};
  EXPECT_TRUE(scheduler_.set_budget_chunks(20));
  EXPECT_FALSE(scheduler_.plan_extend(ids, lengths));
  EXPECT_EQ(live(a).num_tokens, 0U);
  EXPECT_EQ(pset().num_created(), 0U);
}

TEST_P(SchedulerTest, stale_and_foreign_ids_are_told_apart) {
  const VTensorId id = *scheduler_.create({}, "");
  scheduler_.release(id);
  EXPECT_THROW(scheduler_.live(id), ReleasedError);
  EXPECT_THROW(scheduler_.live(kNoVTensor), std::out_of_range);
  EXPECT_THROW(scheduler_.live(id + 4000), std::out_of_range);
}

// ---------------------------------------------------------------------------- where memory comes
// from

class SchedulerMemoryTest : public SchedulerTest {
 protected:
  SchedulerMemoryTest() : SchedulerTest({}, /*budget_chunks=*/8) {}

  VTensorId extended(size_t num_tokens) {
    const VTensorId id = *scheduler_.create({}, "");
    EXPECT_TRUE(extend(id, num_tokens));
    return id;
  }
};

TEST_P(SchedulerMemoryTest, parked_private_chunks_go_before_recorded_prefixes) {
  scheduler_.release(recorded(tokens_from(0, 8), 'a'));
  const VTensorId live_one = *scheduler_.create(tokens_from(0, 8), "");  // adopts
  const VTensorId parked = extended(8);
  scheduler_.release(parked);
  faulty_.pool.vset.make_live(live(live_one).slot == 0 ? 1 : 0);  // so that nobody adopts it
  faulty_.pool.vset.park(live(live_one).slot == 0 ? 1 : 0);
  EXPECT_TRUE(extend(live_one, 16));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 8U);
}

TEST_P(SchedulerMemoryTest, rows_mapped_ahead_go_before_recorded_prefixes) {
  const VTensorId first = recorded(tokens_from(0, 4), 'a');
  scheduler_.release(first);
  const VTensorId ahead = extended(2);
  const size_t target = 12;
  Growth growth = scheduler_.plan_pre_extend({&ahead, 1}, {&target, 1});
  growth.run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  scheduler_.commit(growth);
  ASSERT_EQ(pset().num_claimable(), 0U);
  EXPECT_TRUE(extend(*scheduler_.create(tokens_from(50, 4), ""), 8));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 4U);
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(ahead).slot), 1U);
}

TEST_P(SchedulerMemoryTest, recorded_prefixes_go_when_nothing_else_is_left) {
  scheduler_.release(recorded(tokens_from(0, 16), 'a'));
  const VTensorId id = *scheduler_.create(tokens_from(50, 1), "");
  EXPECT_TRUE(extend(id, 12));
  EXPECT_LT(faulty_.pool.rtree.num_tokens(), 16U);
  EXPECT_GT(scheduler_.counters().chunks_evicted, 0U);
}

TEST_P(SchedulerMemoryTest, shortage_takes_nothing_from_anybody) {
  scheduler_.release(recorded(tokens_from(0, 8), 'a'));
  const VTensorId id = extended(4);
  const int64_t before = calls();
  EXPECT_FALSE(extend(id, 36));
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 8U);
  EXPECT_EQ(calls(), before);
}

TEST_P(SchedulerMemoryTest, surplus_rows_under_views_stay) {
  const VTensorId victim = extended(16);
  scheduler_.truncate(victim, 1);
  faulty_.pool.vset[live(victim).slot].num_views = 1;
  const VTensorId other = *scheduler_.create({}, "");
  EXPECT_FALSE(extend(other, 4));
  faulty_.pool.vset[live(victim).slot].num_views = 0;
  EXPECT_TRUE(extend(other, 4));
}

TEST_P(SchedulerMemoryTest, surplus_rows_are_scrubbed_for_their_next_owner) {
  const VTensorId victim = extended(16);
  for (size_t t = 0; t < 16; ++t) at(victim, t) = 's';
  scheduler_.truncate(victim, 1);
  const VTensorId other = *scheduler_.create({}, "");
  EXPECT_TRUE(extend(other, 12));
  for (size_t t = 0; t < 12; ++t) EXPECT_EQ(at(other, t), '\0') << "token " << t;
}

TEST_P(SchedulerMemoryTest, pre_extension_that_cannot_succeed_evicts_nothing) {
  scheduler_.release(recorded(tokens_from(0, 4), 'a'));
  scheduler_.trim();
  const VTensorId id = extended(12);
  const size_t target = 28;
  EXPECT_TRUE(scheduler_.plan_pre_extend({&id, 1}, {&target, 1}).parts.empty());
  EXPECT_EQ(faulty_.pool.rtree.num_tokens(), 4U);
}

TEST_P(SchedulerMemoryTest, a_lower_budget_evicts_and_gives_back) {
  scheduler_.release(recorded(tokens_from(0, 16), 'a'));
  EXPECT_TRUE(scheduler_.set_budget_chunks(4));
  EXPECT_EQ(pset().num_created(), 4U);
}

TEST_P(SchedulerMemoryTest, a_budget_below_what_is_in_use_is_refused) {
  extended(16);
  EXPECT_FALSE(scheduler_.set_budget_chunks(6));
  EXPECT_EQ(pset().budget_chunks(), 8U);
}

TEST_P(SchedulerMemoryTest, trim_gives_back_free_and_parked_chunks_only) {
  const VTensorId kept = extended(4);
  scheduler_.release(extended(8));
  EXPECT_EQ(scheduler_.trim(), 4 * kChunk);
  EXPECT_EQ(pset().num_created(), 2U);
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(kept).slot), 1U);
}

// ------------------------------------------------------------- a bound on what nobody uses

class SchedulerIdleTest : public SchedulerTest {
 protected:
  SchedulerIdleTest() : SchedulerTest({.max_idle_chunks = 8}) {}

  size_t recorded_tokens() { return faulty_.pool.rtree.num_tokens(); }
};

TEST_P(SchedulerIdleTest, beyond_the_bound_idle_chunks_are_reused_before_any_is_created) {
  for (Token first = 0; first < 600; first += 100) {
    scheduler_.release(recorded(tokens_from(first, 8), 'a'));  // 4 chunks each
  }
  EXPECT_EQ(pset().num_created(), 12U);  // 8 idle ones, 4 in use
  EXPECT_EQ(scheduler_.num_idle(), 12U);
  EXPECT_EQ(scheduler_.counters().chunks_evicted, 12U);
  EXPECT_EQ(recorded_tokens(), 24U);  // the latest
  EXPECT_EQ(pool_matches(tokens_from(500, 8)), 8U);
  EXPECT_EQ(pool_matches(tokens_from(200, 8)), 0U);
}

TEST_P(SchedulerIdleTest, what_is_reused_is_scrubbed) {
  for (Token first = 0; first < 600; first += 100) {
    scheduler_.release(recorded(tokens_from(first, 8), 's'));
  }
  const VTensorId id = *scheduler_.create({}, "");
  EXPECT_TRUE(extend(id, 8));
  EXPECT_EQ(pset().num_created(), 12U);
  for (size_t t = 0; t < 8; ++t) EXPECT_EQ(at(id, t), '\0') << "token " << t;
}

TEST_P(SchedulerIdleTest, what_is_in_use_is_never_reused) {
  const VTensorId user = recorded(tokens_from(0, 16), 'a');  // 8 chunks
  scheduler_.release(*scheduler_.fork(user));
  const VTensorId other = recorded(tokens_from(100, 16), 'b');
  const VTensorId third = recorded(tokens_from(200, 16), 'c');
  EXPECT_EQ(scheduler_.num_idle(), 0U);
  EXPECT_EQ(pset().num_created(), 24U);
  EXPECT_EQ(at(user, 15), 'a');
  EXPECT_EQ(at(other, 15), 'b');
  EXPECT_EQ(at(third, 15), 'c');
}

TEST_P(SchedulerIdleTest, the_worker_reuses_idle_chunks_as_well) {
  for (Token first = 0; first < 300; first += 100) {
    scheduler_.release(recorded(tokens_from(first, 8), 'a'));
  }
  const VTensorId id = *scheduler_.create({}, "");
  const size_t target = 8;
  Growth growth = scheduler_.plan_pre_extend({&id, 1}, {&target, 1});
  growth.run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  scheduler_.commit(growth);
  EXPECT_EQ(pset().num_created(), 12U);
  EXPECT_EQ(faulty_.pool.vset.mapped_rows(live(id).slot), 2U);
}

TEST_P(SchedulerIdleTest, eager_chunks_come_from_idle_ones_first) {
  SchedulerOptions options{.eager_chunks = 2, .max_idle_chunks = 0};
  Scheduler eager(faulty_.pool, options);
  const VTensorId id = *eager.create({}, "");
  const size_t target = 8;
  std::optional<Growth> growth = eager.plan_extend({&id, 1}, {&target, 1});
  growth->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
  eager.commit(*growth);
  eager.release(id);  // parked: 4 idle chunks
  ASSERT_EQ(eager.next_chore(), Chore::Kind::kCreate);
  std::optional<Chore> chore = eager.plan_chore();
  ASSERT_TRUE(chore);
  EXPECT_EQ(chore->kind, Chore::Kind::kScrub);
  chore->run(faulty_.faults, kChunk);
  eager.finish_chore(*chore);
  EXPECT_EQ(pset().num_created(), 4U);
}

TEST_P(SchedulerIdleTest, what_upkeep_keeps_ready_counts_as_idle) {
  SchedulerOptions options{.eager_chunks = 3, .max_idle_chunks = 5};
  Scheduler eager(faulty_.pool, options);
  const auto run_chores = [&] {
    while (std::optional<Chore> chore = eager.plan_chore()) {
      chore->run(faulty_.faults, kChunk);
      eager.finish_chore(*chore);
    }
  };
  for (Token first = 0; first < 600; first += 100) {
    const Tokens tokens = tokens_from(first, 8);
    const VTensorId id = *eager.create(tokens, "");
    const size_t target = 8;  // 4 chunks
    std::optional<Growth> growth = eager.plan_extend({&id, 1}, {&target, 1});
    ASSERT_TRUE(growth);
    growth->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
    eager.commit(*growth);
    run_chores();
    EXPECT_EQ(pset().num_free(), 3U);
    EXPECT_LE(pset().num_created(), 4U + 5U);
    eager.record_prefix(id, tokens);
    eager.release(id);
  }
}

TEST_P(SchedulerIdleTest, a_fraction_follows_the_budget) {
  Scheduler scheduler(faulty_.pool, {.max_idle_chunks = 8, .max_idle_fraction = 0.25});
  ASSERT_TRUE(scheduler.set_budget_chunks(20));
  EXPECT_EQ(scheduler.max_idle(), 5U);
  ASSERT_TRUE(scheduler.set_budget_chunks(12));
  EXPECT_EQ(scheduler.max_idle(), 3U);
  ASSERT_TRUE(scheduler.set_budget_chunks(64));
  EXPECT_EQ(scheduler.max_idle(), 8U);  // the lesser of the two
}

// ----------------------------------------------------------------------------- without alias

class SchedulerCopyTest : public SchedulerTest {
 protected:
  SchedulerCopyTest() : SchedulerTest({.alias = false}) {}
};

TEST_P(SchedulerCopyTest, a_prefix_is_copied_and_nothing_beyond_it) {
  const Tokens tokens = tokens_from(0, 7);
  const VTensorId first = recorded(tokens, 'a');
  const VTensorId second = *scheduler_.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(second, 8));
  EXPECT_EQ(at(second, 5, 1), 'a');
  EXPECT_EQ(at(second, 6), '\0');
  EXPECT_EQ(at(first, 6), 'a');
}

TEST_P(SchedulerCopyTest, a_copy_that_fails_leaves_nothing_behind) {
  recorded(tokens_from(0, 7), 'a');
  faulty_.faults.set_plan({.fail_at = 1, .only = CallKind::kCopy});
  EXPECT_THROW(scheduler_.create(tokens_from(0, 6), ""), DriverError);
  EXPECT_EQ(scheduler_.live_ids().size(), 1U);
}

VTENSOR_ON_EVERY_MEMORY(SchedulerTest);
VTENSOR_ON_EVERY_MEMORY(SchedulerMemoryTest);
VTENSOR_ON_EVERY_MEMORY(SchedulerIdleTest);
VTENSOR_ON_EVERY_MEMORY(SchedulerCopyTest);

}  // namespace
}  // namespace vtensor
