#include "vtensor/core/core.h"

#include <gtest/gtest.h>

#include <vector>

#include "tests/cpp/support/core_world.h"

namespace vtensor {
namespace {

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

// ----------------------------------------------------------------------------- without alias

class CoreCopyTest : public CoreTest {
 protected:
  CoreCopyTest() : CoreTest({.alias = false}) {}
};

TEST_P(CoreCopyTest, a_prefix_is_copied_and_nothing_beyond_it) {
  const Tokens tokens = tokens_from(0, 7);
  const VTensorId first = recorded(tokens, 'a');
  const VTensorId second = *core_.placement.create(tokens_from(0, 6), "");
  EXPECT_TRUE(extend(second, 8));
  EXPECT_EQ(at(second, 5, 1), 'a');
  EXPECT_EQ(at(second, 6), '\0');
  EXPECT_EQ(at(first, 6), 'a');
}

TEST_P(CoreCopyTest, a_copy_that_fails_leaves_nothing_behind) {
  recorded(tokens_from(0, 7), 'a');
  faulty_.faults.set_plan({.fail_at = 1, .only = CallKind::kCopy});
  EXPECT_THROW(core_.placement.create(tokens_from(0, 6), ""), DriverError);
  EXPECT_EQ(core_.vtensors.live_ids().size(), 1U);
}

VTENSOR_ON_EVERY_MEMORY(CoreTest);
VTENSOR_ON_EVERY_MEMORY(CoreCopyTest);

}  // namespace
}  // namespace vtensor
