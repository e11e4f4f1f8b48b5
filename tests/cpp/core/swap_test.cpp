// Swapping one vTensor and putting the pool to sleep: contents, addresses, and what is refused.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/cpp/support/swap_world.h"
#include "vtensor/core/snapshot.h"

namespace vtensor {
namespace {

class SwapTest : public DriverTest {};
class SleepTest : public DriverTest {};

TEST_P(SwapTest, chunks_are_given_up_and_come_back_with_their_bytes_at_the_same_addresses) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  const volatile char* address = &world.at(id, 0, 0, 0);
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  EXPECT_EQ(world.faulty.pool.pset.num_referenced(), 0U);
  EXPECT_EQ(world.store.used_bytes(), 10 * kKiB * 2);
  check_integrity(world.core);
  world.make(tokens_from(100, 20), 'x');  // takes the chunks
  EXPECT_TRUE(world.core.swapper.swap_in(id, {}, world.store));
  EXPECT_EQ(&world.at(id, 0, 0, 0), address);
  world.append(id, 15, 'b');
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST_P(SwapTest, contents_go_to_a_file_just_as_well) {
  const SwapDirectory directory;
  World world(64, {}, directory.path);
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  world.expect_all_contents();
  world.core.sleeper.sleep(world.sleep_store);
  world.core.sleeper.wake(world.sleep_store);
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST_P(SwapTest, damaged_contents_leave_it_swapped_out_and_everything_else_as_it_was) {
  const SwapDirectory directory;
  World world(64, {}, directory.path);
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  const char other = 77;
  for (int file = 3; file < 64; ++file) {  // one of them is the store's
    char target[4096] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    if (::readlink(link.c_str(), target, sizeof(target) - 1) <= 0) continue;
    if (std::string(target).starts_with(directory.path)) {
      ASSERT_EQ(::pwrite(file, &other, 1, 500), 1);
    }
  }
  EXPECT_THROW(world.core.swapper.swap_in(id, {}, world.store), IntegrityError);
  EXPECT_TRUE(world.core.vtensors.live(id).is_swapped);
  check_integrity(world.core);
  world.expect_nothing_leaks();
}

TEST_P(SwapTest, whole_recorded_rows_are_aliased_when_it_comes_back) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  world.core.recorder.record_prefix(id, kPrompt);
  const std::vector<ChunkId> before =
      world.faulty.pool.vset[world.core.vtensors.live(id).slot].table;
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  EXPECT_EQ(world.store.used_bytes(), 0U) << "the tree holds it all";
  EXPECT_GT(world.core.swapper.spill(64, world.store), 0U);
  EXPECT_EQ(world.store.used_bytes(), 10 * kKiB * 2);
  check_integrity(world.core);
  EXPECT_TRUE(world.core.swapper.swap_in(id, kPrompt, world.store));
  const std::vector<ChunkId>& after =
      world.faulty.pool.vset[world.core.vtensors.live(id).slot].table;
  ASSERT_EQ(after.size(), 6U);
  EXPECT_TRUE(std::equal(after.begin(), after.begin() + 4, before.begin()));
  EXPECT_NE(after[4], before[4]) << "the tail is its own";
  EXPECT_EQ(world.core.state.counters.chunks_swapped_in, 2U);
  check_integrity(world.core);
  world.append(id, 14, 'b');
  world.core.extender.truncate(id, 3);  // into what is recorded
  world.marks[id].resize(3);
  world.append(id, 9, 'c');
  const VTensorId reader = world.make(kPrompt, 'a');
  world.expect_all_contents();
  world.release(reader);
  world.expect_nothing_leaks();
}

TEST_P(SwapTest, without_aliasing_nothing_is_aliased) {
  CoreOptions options;
  options.alias = false;
  World world(64, options);
  const VTensorId id = world.make(kPrompt, 'a');
  world.core.recorder.record_prefix(id, kPrompt);
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  EXPECT_TRUE(world.core.swapper.swap_in(id, kPrompt, world.store));
  EXPECT_EQ(world.core.recorder.dedup(id, kPrompt), 0U);
  EXPECT_EQ(world.core.state.counters.chunks_aliased, 0U);
  world.expect_all_contents();
}

TEST_P(SwapTest, what_others_share_stays_theirs) {
  World world;
  const VTensorId parent = world.make(kPrompt, 'a');
  const VTensorId child = world.fork(parent);
  EXPECT_TRUE(world.core.swapper.swap_out(parent, world.store));
  check_integrity(world.core);
  world.append(child, 13, 'b');
  EXPECT_TRUE(world.core.swapper.swap_out(child, world.store));
  world.expect_all_contents();
  world.append(parent, 13, 'c');
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

// Of 4 vTensors that share 8 tokens, each writes its own 4 alone: two chunks of 4 KiB, by two
// planes.
TEST_P(SwapTest, what_the_tree_or_a_sibling_holds_is_not_written) {
  World world;
  const Tokens prompt = tokens_from(0, 8);
  const VTensorId first = world.make(prompt, 'a');
  world.core.recorder.record_prefix(first, prompt);
  std::vector<VTensorId> sharers;
  for (char mark = 'b'; mark < 'e'; ++mark) {
    sharers.push_back(world.make(prompt, 'a'));
    world.append(sharers.back(), 12, mark);
  }
  for (const VTensorId id : sharers) ASSERT_TRUE(world.core.swapper.swap_out(id, world.store));
  EXPECT_EQ(world.store.used_bytes(), 3 * 2 * kChunk);
  EXPECT_EQ(world.core.state.counters.chunks_swapped_out, 6U);
  check_integrity(world.core);
  EXPECT_EQ(world.core.swapper.spill(64, world.store), 0U) << "the first one uses the others";
  world.release(first);
  world.core.reclaimer.trim();  // the slot of the first one goes, the tree stays
  EXPECT_EQ(world.core.swapper.spill(1, world.store), 2U) << "a row, by two planes";
  EXPECT_EQ(world.store.used_bytes(), 4 * 2 * kChunk) << "once for all three";
  EXPECT_EQ(world.core.swapper.spill(64, world.store), 2U);
  check_integrity(world.core);
  world.faulty.pool.rtree.clear();
  world.core.reclaimer.trim();
  EXPECT_EQ(world.faulty.pool.pset.num_created(), 0U);
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST_P(SwapTest, a_shared_tail_that_was_kept_is_copied_before_it_is_written) {
  World world;
  const VTensorId parent = world.make(kPrompt, 'a');
  const VTensorId child = world.fork(parent);
  EXPECT_TRUE(world.core.swapper.swap_out(child, world.store));
  EXPECT_EQ(world.store.used_bytes(), 0U);
  world.append(parent, 12, 'p');
  EXPECT_TRUE(world.core.swapper.swap_in(child, {}, world.store));
  EXPECT_EQ(world.core.state.counters.chunks_swapped_in, 0U);
  world.append(child, 12, 'c');
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

// A spilled row is as long as the longest of its holders; the others get their own tokens back.
TEST_P(SwapTest, a_row_that_is_spilled_for_two_shows_each_no_more_than_its_own) {
  World world;
  const VTensorId parent = world.make(kPrompt, 'a');
  const VTensorId child = world.fork(parent);
  world.append(parent, 12, 'p');  // in place: the tail is its own to write
  EXPECT_TRUE(world.core.swapper.swap_out(child, world.store));
  EXPECT_TRUE(world.core.swapper.swap_out(parent, world.store));
  EXPECT_EQ(world.core.swapper.spill(64, world.store), 6U);
  EXPECT_EQ(world.faulty.pool.pset.num_referenced(), 0U);
  EXPECT_EQ(world.store.used_bytes(), 3 * 2 * kChunk);
  EXPECT_TRUE(world.core.swapper.swap_in(child, {}, world.store));
  world.append(child, 11, 'c');
  EXPECT_EQ(world.at(child, 11, 0, 0), 0) << "the parent's 'p'";
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST_P(SwapTest, a_store_that_is_too_small_is_shortage_and_changes_nothing) {
  World world;
  SwapStore small(10 * kKiB * 2 - 1, kChunk, "");
  const VTensorId id = world.make(kPrompt, 'a');
  const int64_t calls = world.faulty.faults.num_calls();
  EXPECT_FALSE(world.core.swapper.swap_out(id, small));
  EXPECT_EQ(world.faulty.faults.num_calls(), calls);
  EXPECT_EQ(small.used_bytes(), 0U);
  world.append(id, 12, 'b');
  world.expect_all_contents();
}

TEST_P(SwapTest, a_pool_that_is_too_full_is_shortage_and_changes_nothing) {
  World world(/*budget_chunks=*/12);
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  const VTensorId other = world.make(tokens_from(100, 16), 'x');
  EXPECT_FALSE(world.core.swapper.swap_in(id, {}, world.store));
  check_integrity(world.core);
  EXPECT_TRUE(world.core.vtensors.live(id).is_swapped);
  world.release(other);
  EXPECT_TRUE(world.core.swapper.swap_in(id, {}, world.store));
  world.expect_all_contents();
}

TEST_P(SwapTest, a_system_with_less_than_the_budget_gives_what_exists_already) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  const Tokens others = tokens_from(100, 16);
  const VTensorId other = world.make(others, 'x');
  world.core.recorder.record_prefix(other, others);
  world.release(other);
  world.faulty.faults.set_plan({.fail_at = 1,
                                .only = CallKind::kCreate,
                                .kind = FaultPlan::Kind::kOutOfMemory,
                                .persistent = true});
  EXPECT_TRUE(world.core.swapper.swap_in(id, {}, world.store));
  world.expect_all_contents();
}

TEST_P(SwapTest, a_swapped_vtensor_refuses_what_needs_its_memory) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  EXPECT_THROW(world.extend(id, 10), std::invalid_argument);
  EXPECT_THROW(world.extend(id, 20), std::invalid_argument);
  EXPECT_THROW(world.core.placement.fork(id), std::invalid_argument);
  EXPECT_THROW(world.core.recorder.record_prefix(id, kPrompt), std::invalid_argument);
  EXPECT_THROW(world.core.recorder.dedup(id, kPrompt), std::invalid_argument);
  EXPECT_THROW(world.core.extender.truncate(id, 3), std::invalid_argument);
  EXPECT_THROW(world.core.swapper.swap_out(id, world.store), std::invalid_argument);
  const size_t wanted = 30;
  EXPECT_TRUE(world.core.extender.plan_pre_extend(id, wanted).parts.empty());
  EXPECT_TRUE(world.core.swapper.swap_in(id, {}, world.store));
  EXPECT_THROW(world.core.swapper.swap_in(id, {}, world.store), std::invalid_argument);
  world.expect_all_contents();
}

TEST_P(SwapTest, living_views_keep_a_vtensor_from_being_swapped_out) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  size_t& num_views = world.faulty.pool.vset[world.core.vtensors.live(id).slot].num_views;
  num_views = 1;
  EXPECT_THROW(world.core.swapper.swap_out(id, world.store), std::invalid_argument);
  num_views = 0;
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  world.expect_all_contents();
}

TEST_P(SwapTest, an_empty_vtensor_may_be_swapped_too) {
  World world;
  const VTensorId id = world.make({}, 'a');
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  check_integrity(world.core);
  EXPECT_TRUE(world.core.swapper.swap_in(id, {}, world.store));
  world.append(id, 5, 'a');
  world.expect_all_contents();
}

TEST_P(SwapTest, released_while_swapped_it_frees_its_part_of_the_store) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.core.swapper.swap_out(id, world.store));
  world.release(id);
  EXPECT_EQ(world.store.used_bytes(), 0U);
  EXPECT_EQ(world.faulty.pool.vset.num_free(), 4U);
  world.expect_nothing_leaks();
}

// One call fails after the contents of tenant "a" are written: the next tenant must not see them.
TEST_P(SwapTest, what_a_failed_swap_in_wrote_is_scrubbed_for_the_next_tenant) {
  CoreOptions options;
  options.scrub = ScrubPolicy::kTenant;
  options.park = false;
  World world(64, options);
  const VTensorId b = world.make(tokens_from(100, 12), 'b', "b");  // its chunks are named after b
  const VTensorId a = world.make(kPrompt, 'a', "a");
  EXPECT_TRUE(world.core.swapper.swap_out(a, world.store));
  world.core.reclaimer.trim();
  world.release(b);
  world.faulty.faults.set_plan({.fail_at = 2, .only = CallKind::kSetAccess});
  EXPECT_THROW(world.core.swapper.swap_in(a, {}, world.store), DriverError);
  world.faulty.fail_never();
  const VTensorId next = *world.core.placement.create({}, "b");
  ASSERT_TRUE(world.extend(next, 12));
  for (size_t t = 0; t < 12; ++t) {
    EXPECT_NE(world.at(next, t, 0, 0), 'a');
    EXPECT_NE(world.at(next, t, 1, 0), 'a');
  }
}

// ----------------------------------------------------------------------------------------- sleep

TEST_P(SleepTest, all_memory_goes_and_all_contents_come_back) {
  World world;
  fill(world);
  const size_t resident_bytes = world.core.sleeper.num_resident_chunks() * kChunk;
  const size_t free_bytes = world.faulty.pool.pset.num_free() * kChunk;
  // Free chunks included; on the host the store is in the same memory.
  const size_t returned_bytes = world.core.sleeper.sleep(world.sleep_store);
  const bool same_memory = GetParam() == On::kHost;
  EXPECT_EQ(returned_bytes, resident_bytes - (same_memory ? world.sleep_store.used_bytes() : 0));
  EXPECT_GT(returned_bytes, 0U);
  EXPECT_EQ(world.core.sleeper.num_resident_chunks(), 0U);
  check_integrity(world.core);
  world.core.sleeper.wake(world.sleep_store);
  check_integrity(world.core);
  EXPECT_EQ(world.core.sleeper.num_resident_chunks() * kChunk, resident_bytes - free_bytes);
  world.expect_all_contents();
  const VTensorId reader = world.make(kPrompt, 'a');
  EXPECT_EQ(world.core.vtensors.live(reader).num_cached_tokens, 10U);
  world.expect_contents(reader);
  world.expect_nothing_leaks();
}

TEST_P(SleepTest, a_store_that_is_too_small_is_an_error_and_changes_nothing) {
  World world;
  fill(world);
  SwapStore small(kChunk, kChunk, "");
  EXPECT_THROW(world.core.sleeper.sleep(small), OutOfMemoryError);
  EXPECT_FALSE(world.core.sleeper.is_asleep());
  world.expect_all_contents();
}

TEST_P(SleepTest, only_used_bytes_are_saved) {
  World world;
  world.make(tokens_from(0, 1), 'a');
  const VTensorId recorded = world.make(tokens_from(50, 2), 'b');
  world.core.recorder.record_prefix(recorded, tokens_from(50, 2));
  world.release(recorded);
  world.core.sleeper.sleep(world.sleep_store);
  EXPECT_EQ(world.sleep_store.used_bytes(), 2 * (1 + 2) * kKiB) << "two planes";
  world.core.sleeper.wake(world.sleep_store);
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

// Else the pool and its copy would be in memory together.
TEST_P(SleepTest, each_chunk_is_given_back_before_the_next_is_saved) {
  World world;
  world.make(tokens_from(0, 20), 'a');
  size_t most_bytes = 0;
  const size_t resident_bytes = world.core.sleeper.num_resident_chunks() * kChunk;
  world.faulty.faults.watch([&](const DriverCall& call) {
    if (call.kind != CallKind::kRead) return;
    const auto released = static_cast<size_t>(world.faulty.faults.num_calls(CallKind::kRelease));
    const auto saved = static_cast<size_t>(world.faulty.faults.num_calls(CallKind::kRead));
    most_bytes = std::max(most_bytes, resident_bytes + (saved - released) * kChunk);
  });
  world.core.sleeper.sleep(world.sleep_store);
  EXPECT_EQ(most_bytes, resident_bytes + kChunk);
}

TEST_P(SleepTest, what_sleeps_may_be_discarded) {
  World world;
  fill(world);
  world.core.sleeper.sleep(world.sleep_store);
  world.faulty.pool.rtree.unpin("pin");
  for (const VTensorId id : world.core.vtensors.live_ids()) {
    world.core.swapper.forget(world.core.vtensors.live(id), world.store);
  }
  world.core.sleeper.discard(world.sleep_store);
  check_integrity(world.core);
  world.make(kPrompt, 'z');
  world.marks = {{world.core.vtensors.live_ids().front(), std::string(10, 'z')}};
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST_P(SleepTest, a_broken_slot_is_repaired_before_the_others_sleep) {
  World world;
  const VTensorId parent = world.make(kPrompt, 'a');
  const VTensorId child = world.fork(parent);
  const VTensorId other = world.make(tokens_from(100, 6), 'b');
  world.faulty.fail_at(2, /*persistent=*/true);  // one plane unmapped, and no more
  EXPECT_THROW(world.core.swapper.swap_out(child, world.store), BrokenMapping);
  EXPECT_EQ(gather_stats(world.core).num_broken_slots, 1U);
  EXPECT_EQ(world.core.vtensors.repair_broken(), 0U) << "the driver fails still";
  check_integrity(world.core);
  world.faulty.fail_never();
  world.core.sleeper.sleep(world.sleep_store);
  EXPECT_EQ(gather_stats(world.core).num_broken_slots, 0U);
  EXPECT_EQ(world.core.sleeper.num_resident_chunks(), 0U);
  check_integrity(world.core);
  world.core.sleeper.wake(world.sleep_store);
  check_integrity(world.core);
  world.expect_contents(parent);
  world.expect_contents(other);
  world.expect_nothing_leaks();
}

VTENSOR_ON_EVERY_MEMORY(SwapTest);
VTENSOR_ON_EVERY_MEMORY(SleepTest);

}  // namespace
}  // namespace vtensor
