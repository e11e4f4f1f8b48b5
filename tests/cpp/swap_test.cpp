// Swapping one vTensor, putting the pool to sleep, and dedup: contents, addresses, and what is left
// when any driver call on the way fails.
#include <dirent.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core_fixture.h"
#include "vtensor/manager.h"
#include "vtensor/sched/swap_store.h"

namespace vtensor {
namespace {

const Tokens kPrompt = tokens_from(0, 10);  // two whole rows and a half

// A scheduler on real memory. What each vTensor should show is noted here, a mark for each token.
struct World {
  explicit World(size_t budget_chunks = 64, const SchedulerOptions& options = {},
                 const std::string& directory = "")
      : faulty(small_geometry(), budget_chunks, host_driver()),
        scheduler(faulty.pool, options),
        store(64 * kChunk, kChunk, directory),
        sleep_store(256 * kChunk, kChunk, directory) {}

  FaultyPool faulty;
  Scheduler scheduler;
  SwapStore store;
  SwapStore sleep_store;
  std::map<VTensorId, std::string> marks;

  bool extend(VTensorId id, size_t num_tokens) {
    if (scheduler.extend_in_place({&id, 1}, {&num_tokens, 1})) return true;
    std::optional<Growth> growth = scheduler.plan_extend({&id, 1}, {&num_tokens, 1});
    if (!growth) return false;
    growth->run(faulty.faults, faulty.pool.vset, faulty.pool.geometry);
    scheduler.commit(*growth);
    return true;
  }
  volatile char& at(VTensorId id, size_t token, size_t plane, size_t byte) {
    const uintptr_t base = faulty.pool.vset.address(plane, scheduler.live(id).slot, 0);
    return *reinterpret_cast<volatile char*>(base + token * kKiB + byte);
  }
  void append(VTensorId id, size_t num_tokens, char mark) {
    std::string& known = marks[id];
    ASSERT_TRUE(extend(id, num_tokens));
    for (size_t t = known.size(); t < num_tokens; ++t) {
      for (size_t plane = 0; plane < 2; ++plane) {
        at(id, t, plane, 0) = mark;
        at(id, t, plane, kKiB - 1) = static_cast<char>(mark + 1 + static_cast<char>(plane));
      }
    }
    known.resize(num_tokens, mark);
  }
  VTensorId make(const Tokens& tokens, char mark, const std::string& salt = "") {
    const VTensorId id = *scheduler.create(tokens, salt);
    marks[id] = std::string(scheduler.live(id).num_tokens, mark);
    append(id, tokens.size(), mark);
    return id;
  }
  VTensorId fork(VTensorId parent) {
    const VTensorId id = *scheduler.fork(parent);
    marks[id] = marks[parent];
    return id;
  }
  void release(VTensorId id) {
    scheduler.forget_swapped(scheduler.live(id), store);
    scheduler.release(id);
    marks.erase(id);
  }
  void expect_contents(VTensorId id) {
    const std::string& known = marks.at(id);
    ASSERT_EQ(scheduler.live(id).num_tokens, known.size());
    for (size_t t = 0; t < known.size(); ++t) {
      for (size_t plane = 0; plane < 2; ++plane) {
        ASSERT_EQ(at(id, t, plane, 0), known[t]) << "vTensor " << id << " token " << t;
        ASSERT_EQ(at(id, t, plane, kKiB - 1), known[t] + 1 + static_cast<int>(plane));
      }
    }
  }
  // Every live vTensor shows what it should, brought back where it is swapped out.
  void expect_all_contents() {
    for (const VTensorId id : scheduler.live_ids()) {
      if (scheduler.live(id).is_swapped) {
        ASSERT_TRUE(scheduler.swap_in(id, {}, store));
      }
      expect_contents(id);
    }
  }
  size_t num_broken_slots() const {
    size_t broken = 0;
    for (SlotId slot = 0; slot < faulty.pool.vset.num_slots(); ++slot) {
      broken += static_cast<size_t>(faulty.pool.vset[slot].state == SlotState::kBroken);
    }
    return broken;
  }
  // Everything can be given back, but for what broken slots may map.
  void expect_nothing_leaks() {
    for (const VTensorId id : scheduler.live_ids()) release(id);
    faulty.pool.rtree.unpin("pin");
    faulty.pool.rtree.clear();
    scheduler.trim();
    check_integrity(scheduler);
    std::set<ChunkId> broken;
    for (SlotId slot = 0; slot < faulty.pool.vset.num_slots(); ++slot) {
      const std::vector<ChunkId>& table = faulty.pool.vset[slot].table;
      broken.insert(table.begin(), table.end());
    }
    EXPECT_EQ(faulty.pool.pset.num_created(), broken.size());
    EXPECT_EQ(store.used_bytes(), 0U);
    EXPECT_EQ(sleep_store.used_bytes(), 0U);
  }
};

// ------------------------------------------------------------------------------------- SwapStore

struct SwapDirectory {
  std::string path = testing::TempDir() + "swap-XXXXXX";
  SwapDirectory() { EXPECT_NE(::mkdtemp(path.data()), nullptr); }
  ~SwapDirectory() { ::rmdir(path.c_str()); }
  size_t num_files() const {
    size_t files = 0;
    DIR* const directory = ::opendir(path.c_str());
    while (const dirent* entry = ::readdir(directory)) files += entry->d_name[0] == '.' ? 0U : 1U;
    ::closedir(directory);
    return files;
  }
};

// The descriptor of the one file that lies, unlinked, in `directory`.
int find_open_file(const std::string& directory) {
  for (int file = 3; file < 1024; ++file) {
    char target[4096] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    if (::readlink(link.c_str(), target, sizeof(target) - 1) <= 0) continue;
    if (std::string(target).starts_with(directory)) return file;
  }
  return -1;
}

std::vector<std::byte> bytes_of(size_t count, int first) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return bytes;
}

class SwapStoreTest : public testing::TestWithParam<bool> {
 protected:
  SwapDirectory directory_;
  SwapStore store_{10000, kChunk, GetParam() ? directory_.path : ""};
};

TEST_P(SwapStoreTest, gives_back_what_was_put_and_reuses_dropped_tickets) {
  const auto first = store_.put(bytes_of(kChunk, 1));
  const auto second = store_.put(bytes_of(100, 2));
  const auto empty = store_.put({});
  EXPECT_EQ(store_.used_bytes(), kChunk + 100);
  store_.drop(first);
  EXPECT_EQ(store_.put(bytes_of(13, 3)), first);
  EXPECT_EQ(store_.get(first), bytes_of(13, 3));
  EXPECT_EQ(store_.get(second), bytes_of(100, 2));
  EXPECT_TRUE(store_.get(empty).empty());
  EXPECT_EQ(directory_.num_files(), 0U) << "the file is unlinked from the start";
}

TEST_P(SwapStoreTest, counts_bytes_and_tells_how_much_fits) {
  const auto ticket = store_.put(bytes_of(4000, 1));
  EXPECT_TRUE(store_.has_room(6000));
  EXPECT_FALSE(store_.has_room(6001));
  store_.drop(ticket);
  store_.drop(ticket);
  EXPECT_EQ(store_.used_bytes(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Places, SwapStoreTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "File" : "Memory"; });

TEST(SwapStoreFileTest, damaged_contents_are_an_integrity_error) {
  const SwapDirectory directory;
  SwapStore store(10000, kChunk, directory.path);
  const auto damaged = store.put(bytes_of(1000, 1));
  const auto intact = store.put(bytes_of(1000, 2));
  const int file = find_open_file(directory.path);
  ASSERT_GE(file, 0);
  const char other = 77;
  ASSERT_EQ(::pwrite(file, &other, 1, 500), 1);
  EXPECT_THROW(store.get(damaged), IntegrityError);
  EXPECT_EQ(store.get(intact), bytes_of(1000, 2));
}

TEST(SwapStoreFileTest, a_file_cut_short_is_a_driver_error) {
  const SwapDirectory directory;
  SwapStore store(10000, kChunk, directory.path);
  const auto ticket = store.put(bytes_of(1000, 1));
  ASSERT_EQ(::ftruncate(find_open_file(directory.path), 10), 0);
  EXPECT_THROW(store.get(ticket), DriverError);
}

TEST(SwapStoreFileTest, a_directory_that_does_not_exist_is_a_driver_error) {
  EXPECT_THROW(SwapStore(10000, kChunk, "/no/such/directory"), DriverError);
}

// ------------------------------------------------------------------------------------------ swap

TEST(SwapTest, chunks_are_given_up_and_come_back_with_their_bytes_at_the_same_addresses) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  const volatile char* address = &world.at(id, 0, 0, 0);
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  EXPECT_EQ(world.faulty.pool.pset.num_referenced(), 0U);
  EXPECT_EQ(world.store.used_bytes(), 10 * kKiB * 2);
  check_integrity(world.scheduler);
  world.make(tokens_from(100, 20), 'x');  // takes the chunks
  EXPECT_TRUE(world.scheduler.swap_in(id, {}, world.store));
  EXPECT_EQ(&world.at(id, 0, 0, 0), address);
  world.append(id, 15, 'b');
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST(SwapTest, contents_go_to_a_file_just_as_well) {
  const SwapDirectory directory;
  World world(64, {}, directory.path);
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  world.expect_all_contents();
  world.scheduler.sleep(world.sleep_store);
  world.scheduler.wake(world.sleep_store);
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST(SwapTest, damaged_contents_leave_it_swapped_out_and_everything_else_as_it_was) {
  const SwapDirectory directory;
  World world(64, {}, directory.path);
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  const char other = 77;
  for (int file = 3; file < 64; ++file) {  // one of them is the store's
    char target[4096] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    if (::readlink(link.c_str(), target, sizeof(target) - 1) <= 0) continue;
    if (std::string(target).starts_with(directory.path)) {
      ASSERT_EQ(::pwrite(file, &other, 1, 500), 1);
    }
  }
  EXPECT_THROW(world.scheduler.swap_in(id, {}, world.store), IntegrityError);
  EXPECT_TRUE(world.scheduler.live(id).is_swapped);
  check_integrity(world.scheduler);
  world.expect_nothing_leaks();
}

TEST(SwapTest, whole_recorded_rows_are_aliased_when_it_comes_back) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  world.scheduler.record_prefix(id, kPrompt);
  const std::vector<ChunkId> before = world.faulty.pool.vset[world.scheduler.live(id).slot].table;
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  EXPECT_TRUE(world.scheduler.swap_in(id, kPrompt, world.store));
  const std::vector<ChunkId>& after = world.faulty.pool.vset[world.scheduler.live(id).slot].table;
  ASSERT_EQ(after.size(), 6U);
  EXPECT_TRUE(std::equal(after.begin(), after.begin() + 4, before.begin()));
  EXPECT_NE(after[4], before[4]) << "the tail is its own";
  EXPECT_EQ(world.scheduler.counters().chunks_swapped_in, 2U);
  check_integrity(world.scheduler);
  world.append(id, 14, 'b');
  world.scheduler.truncate(id, 3);  // into what is recorded
  world.marks[id].resize(3);
  world.append(id, 9, 'c');
  const VTensorId reader = world.make(kPrompt, 'a');
  world.expect_all_contents();
  world.release(reader);
  world.expect_nothing_leaks();
}

TEST(SwapTest, without_aliasing_nothing_is_aliased) {
  SchedulerOptions options;
  options.alias = false;
  World world(64, options);
  const VTensorId id = world.make(kPrompt, 'a');
  world.scheduler.record_prefix(id, kPrompt);
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  EXPECT_TRUE(world.scheduler.swap_in(id, kPrompt, world.store));
  EXPECT_EQ(world.scheduler.dedup(id, kPrompt), 0U);
  EXPECT_EQ(world.scheduler.counters().chunks_aliased, 0U);
  world.expect_all_contents();
}

TEST(SwapTest, what_others_share_stays_theirs) {
  World world;
  const VTensorId parent = world.make(kPrompt, 'a');
  const VTensorId child = world.fork(parent);
  EXPECT_TRUE(world.scheduler.swap_out(parent, world.store));
  check_integrity(world.scheduler);
  world.append(child, 13, 'b');
  EXPECT_TRUE(world.scheduler.swap_out(child, world.store));
  world.expect_all_contents();
  world.append(parent, 13, 'c');
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST(SwapTest, a_store_that_is_too_small_is_shortage_and_changes_nothing) {
  World world;
  SwapStore small(10 * kKiB * 2 - 1, kChunk, "");
  const VTensorId id = world.make(kPrompt, 'a');
  const int64_t calls = world.faulty.faults.num_calls();
  EXPECT_FALSE(world.scheduler.swap_out(id, small));
  EXPECT_EQ(world.faulty.faults.num_calls(), calls);
  EXPECT_EQ(small.used_bytes(), 0U);
  world.append(id, 12, 'b');
  world.expect_all_contents();
}

TEST(SwapTest, a_pool_that_is_too_full_is_shortage_and_changes_nothing) {
  World world(/*budget_chunks=*/12);
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  const VTensorId other = world.make(tokens_from(100, 16), 'x');
  EXPECT_FALSE(world.scheduler.swap_in(id, {}, world.store));
  check_integrity(world.scheduler);
  EXPECT_TRUE(world.scheduler.live(id).is_swapped);
  world.release(other);
  EXPECT_TRUE(world.scheduler.swap_in(id, {}, world.store));
  world.expect_all_contents();
}

TEST(SwapTest, a_system_with_less_than_the_budget_gives_what_exists_already) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  const Tokens others = tokens_from(100, 16);
  const VTensorId other = world.make(others, 'x');
  world.scheduler.record_prefix(other, others);
  world.release(other);
  world.faulty.faults.set_plan({.fail_at = 1,
                                .only = CallKind::kCreate,
                                .kind = FaultPlan::Kind::kOutOfMemory,
                                .persistent = true});
  EXPECT_TRUE(world.scheduler.swap_in(id, {}, world.store));
  world.expect_all_contents();
}

TEST(SwapTest, a_swapped_vtensor_refuses_what_needs_its_memory) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  EXPECT_THROW(world.extend(id, 10), std::invalid_argument);
  EXPECT_THROW(world.extend(id, 20), std::invalid_argument);
  EXPECT_THROW(world.scheduler.fork(id), std::invalid_argument);
  EXPECT_THROW(world.scheduler.record_prefix(id, kPrompt), std::invalid_argument);
  EXPECT_THROW(world.scheduler.dedup(id, kPrompt), std::invalid_argument);
  EXPECT_THROW(world.scheduler.truncate(id, 3), std::invalid_argument);
  EXPECT_THROW(world.scheduler.swap_out(id, world.store), std::invalid_argument);
  const size_t wanted = 30;
  EXPECT_TRUE(world.scheduler.plan_pre_extend({&id, 1}, {&wanted, 1}).parts.empty());
  EXPECT_TRUE(world.scheduler.swap_in(id, {}, world.store));
  EXPECT_THROW(world.scheduler.swap_in(id, {}, world.store), std::invalid_argument);
  world.expect_all_contents();
}

TEST(SwapTest, living_views_keep_a_vtensor_from_being_swapped_out) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  size_t& num_views = world.faulty.pool.vset[world.scheduler.live(id).slot].num_views;
  num_views = 1;
  EXPECT_THROW(world.scheduler.swap_out(id, world.store), std::invalid_argument);
  num_views = 0;
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  world.expect_all_contents();
}

TEST(SwapTest, an_empty_vtensor_may_be_swapped_too) {
  World world;
  const VTensorId id = world.make({}, 'a');
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  check_integrity(world.scheduler);
  EXPECT_TRUE(world.scheduler.swap_in(id, {}, world.store));
  world.append(id, 5, 'a');
  world.expect_all_contents();
}

TEST(SwapTest, released_while_swapped_it_frees_its_part_of_the_store) {
  World world;
  const VTensorId id = world.make(kPrompt, 'a');
  EXPECT_TRUE(world.scheduler.swap_out(id, world.store));
  world.release(id);
  EXPECT_EQ(world.store.used_bytes(), 0U);
  EXPECT_EQ(world.faulty.pool.vset.num_free(), 4U);
  world.expect_nothing_leaks();
}

// One call fails after the contents of tenant "a" are written: the next tenant must not see them.
TEST(SwapTest, what_a_failed_swap_in_wrote_is_scrubbed_for_the_next_tenant) {
  SchedulerOptions options;
  options.scrub = ScrubPolicy::kTenant;
  options.park = false;
  World world(64, options);
  const VTensorId b = world.make(tokens_from(100, 12), 'b', "b");  // its chunks are named after b
  const VTensorId a = world.make(kPrompt, 'a', "a");
  EXPECT_TRUE(world.scheduler.swap_out(a, world.store));
  world.scheduler.trim();
  world.release(b);
  world.faulty.faults.set_plan({.fail_at = 2, .only = CallKind::kSetAccess});
  EXPECT_THROW(world.scheduler.swap_in(a, {}, world.store), DriverError);
  world.faulty.fail_never();
  const VTensorId next = *world.scheduler.create({}, "b");
  ASSERT_TRUE(world.extend(next, 12));
  for (size_t t = 0; t < 12; ++t) {
    EXPECT_NE(world.at(next, t, 0, 0), 'a');
    EXPECT_NE(world.at(next, t, 1, 0), 'a');
  }
}

// ----------------------------------------------------------------------------------------- sleep

// Live, forked, swapped-out, parked and pinned: a bit of everything.
void fill(World& world) {
  const VTensorId first = world.make(kPrompt, 'a');
  world.scheduler.record_prefix(first, kPrompt);
  world.append(world.fork(first), 13, 'b');
  const VTensorId third = world.make(tokens_from(200, 9), 'c');
  ASSERT_TRUE(world.scheduler.swap_out(third, world.store));
  const VTensorId fourth = world.make(tokens_from(300, 5), 'd');
  world.scheduler.record_prefix(fourth, tokens_from(300, 5));
  world.faulty.pool.rtree.pin("", tokens_from(300, 5), "pin", 0);
  world.release(fourth);
}

TEST(SleepTest, all_memory_goes_and_all_contents_come_back) {
  World world;
  fill(world);
  const size_t asleep_bytes = world.scheduler.sleep(world.sleep_store);
  EXPECT_GT(asleep_bytes, 0U);
  EXPECT_EQ(world.scheduler.num_resident_chunks(), 0U);
  check_integrity(world.scheduler);
  world.scheduler.wake(world.sleep_store);
  check_integrity(world.scheduler);
  EXPECT_EQ(world.scheduler.num_resident_chunks() * kChunk, asleep_bytes);
  world.expect_all_contents();
  const VTensorId reader = world.make(kPrompt, 'a');
  EXPECT_EQ(world.scheduler.live(reader).num_cached_tokens, 10U);
  world.expect_contents(reader);
  world.expect_nothing_leaks();
}

TEST(SleepTest, a_store_that_is_too_small_is_an_error_and_changes_nothing) {
  World world;
  fill(world);
  SwapStore small(kChunk, kChunk, "");
  EXPECT_THROW(world.scheduler.sleep(small), OutOfMemoryError);
  EXPECT_FALSE(world.scheduler.is_asleep());
  world.expect_all_contents();
}

TEST(SleepTest, what_sleeps_may_be_discarded) {
  World world;
  fill(world);
  world.scheduler.sleep(world.sleep_store);
  world.faulty.pool.rtree.unpin("pin");
  for (const VTensorId id : world.scheduler.live_ids()) {
    world.scheduler.forget_swapped(world.scheduler.live(id), world.store);
  }
  world.scheduler.discard_sleep(world.sleep_store);
  check_integrity(world.scheduler);
  world.make(kPrompt, 'z');
  world.marks = {{world.scheduler.live_ids().front(), std::string(10, 'z')}};
  world.expect_all_contents();
  world.expect_nothing_leaks();
}

TEST(SleepTest, a_broken_slot_keeps_its_memory_and_lets_the_others_sleep) {
  World world;
  const VTensorId parent = world.make(kPrompt, 'a');
  const VTensorId child = world.fork(parent);
  const VTensorId other = world.make(tokens_from(100, 6), 'b');
  world.faulty.fail_at(8, /*persistent=*/true);  // 6 reads, one plane unmapped, and no more
  EXPECT_THROW(world.scheduler.swap_out(child, world.store), BrokenMapping);
  world.faulty.fail_never();
  world.scheduler.sleep(world.sleep_store);
  EXPECT_EQ(world.scheduler.num_resident_chunks(), 6U);
  check_integrity(world.scheduler);
  world.scheduler.wake(world.sleep_store);
  check_integrity(world.scheduler);
  world.expect_contents(parent);
  world.expect_contents(other);
  world.expect_nothing_leaks();
}

// ---------------------------------------------------------------------------------------- faults

using Setup = std::function<void(World&)>;
using Operation = std::function<bool(World&)>;

struct Sweep {
  std::string name;
  Setup setup;
  Operation operation;  // false: shortage
  size_t budget_chunks = 64;
};

void PrintTo(const Sweep& sweep, std::ostream* out) { *out << sweep.name; }

class SwapFaultTest : public testing::TestWithParam<Sweep> {};

// For every k the k-th call of the operation fails: it throws one of the core's errors or tells
// shortage, all invariants hold, and repeating it without faults works.
TEST_P(SwapFaultTest, nothing_is_lost_whichever_call_fails) {
  const Sweep& sweep = GetParam();
  World good(sweep.budget_chunks);
  sweep.setup(good);
  const int64_t before = good.faulty.faults.num_calls();
  ASSERT_TRUE(sweep.operation(good));
  const int64_t num_calls = good.faulty.faults.num_calls() - before;
  ASSERT_GT(num_calls, 5);

  for (const auto kind : {FaultPlan::Kind::kDriverError, FaultPlan::Kind::kOutOfMemory}) {
    for (const bool persistent : {false, true}) {
      for (int64_t k = 1; k <= num_calls; ++k) {
        SCOPED_TRACE("call " + std::to_string(k) + (persistent ? " and all later ones" : "") +
                     (kind == FaultPlan::Kind::kDriverError ? "" : ", out of memory"));
        World world(sweep.budget_chunks);
        sweep.setup(world);
        world.faulty.faults.set_plan({.fail_at = k, .kind = kind, .persistent = persistent});
        bool done = false;
        try {
          done = sweep.operation(world);
        } catch (const Error&) {
          // typed, as it should be; anything else fails the test
        }
        EXPECT_GT(world.faulty.faults.num_failed(), 0);
        check_integrity(world.scheduler);
        world.faulty.fail_never();
        if (!persistent) {
          EXPECT_EQ(world.num_broken_slots(), 0U);
        }
        if (!done && world.num_broken_slots() == 0) {
          EXPECT_TRUE(sweep.operation(world));
        }
        if (world.scheduler.is_asleep()) world.scheduler.wake(world.sleep_store);
        check_integrity(world.scheduler);
        world.expect_all_contents();
        world.expect_nothing_leaks();
        if (HasFailure()) return;
      }
    }
  }
}

VTensorId nth(World& world, size_t n) { return world.scheduler.live_ids().at(n); }

std::vector<Sweep> sweeps() {
  const Setup two = [](World& world) {
    const VTensorId first = world.make(kPrompt, 'a');
    world.scheduler.record_prefix(first, kPrompt);
    world.append(world.fork(first), 13, 'b');
  };
  const Setup swapped = [=](World& world) {
    two(world);
    ASSERT_TRUE(world.scheduler.swap_out(nth(world, 0), world.store));
  };
  const Setup swapped_and_full = [=](World& world) {
    swapped(world);
    const Tokens others = tokens_from(500, 12);
    const VTensorId parked = world.make(others, 'x');
    world.scheduler.record_prefix(parked, others);
    world.release(parked);
  };
  const Setup asleep = [](World& world) {
    fill(world);
    world.scheduler.sleep(world.sleep_store);
  };
  const Setup twice = [](World& world) {
    const Tokens prompt = tokens_from(0, 12);
    const VTensorId first = *world.scheduler.create(prompt, "");
    const VTensorId second = *world.scheduler.create(prompt, "");
    world.append(first, 12, 'a');
    world.append(second, 14, 'a');
    world.scheduler.record_prefix(first, prompt);
  };
  const auto swap_in = [](bool with_tokens) {
    return [=](World& world) {
      const VTensorId id = nth(world, 0);
      if (!world.scheduler.live(id).is_swapped) return true;
      return world.scheduler.swap_in(id, with_tokens ? kPrompt : Tokens{}, world.store);
    };
  };
  const Operation wake = [](World& world) {
    world.scheduler.wake(world.sleep_store);
    return true;
  };
  const Operation sleep = [](World& world) {
    world.scheduler.sleep(world.sleep_store);
    return true;
  };
  return {
      {"SwapOut", two,
       [](World& world) { return world.scheduler.swap_out(nth(world, 1), world.store); }},
      {"SwapIn", swapped, swap_in(false)},
      {"SwapInAliased", swapped, swap_in(true)},
      {"SwapInWithReclaim", swapped_and_full, swap_in(true), 16},
      {"Sleep", fill, sleep},
      {"Wake", asleep, wake},
      {"SleepAndWake", fill,
       [=](World& world) { return (world.scheduler.is_asleep() || sleep(world)) && wake(world); }},
      {"Dedup", twice,
       [](World& world) { return world.scheduler.dedup(nth(world, 1), tokens_from(0, 12)) == 6; }},
  };
}

INSTANTIATE_TEST_SUITE_P(Operations, SwapFaultTest, testing::ValuesIn(sweeps()),
                         [](const auto& info) { return info.param.name; });

// --------------------------------------------------------------------------------------- manager

class SleepingManagerTest : public testing::Test {
 protected:
  void open_asleep() {
    auto driver = std::make_unique<FaultyDriver>(host_driver());
    faults_ = driver.get();
    ManagerOptions options;
    options.max_requests = 4;
    options.memory_budget_bytes = 64 * kChunk;
    options.chunk_bytes = kChunk;
    options.swap_space_bytes = 64 * kChunk;
    manager_ = Manager::open(std::move(driver),
                             {.num_layers = 1,
                              .num_kv_heads = 1,
                              .head_dim = 256,
                              .element_bytes = 4,
                              .max_tokens = 64,
                              .layers_per_plane = 1},
                             options);
    const VTensorId live = make();
    manager_->record_prefix(live, kPrompt);
    manager_->pin_prefix(kPrompt, "pin", 0, "");
    EXPECT_TRUE(manager_->try_swap_out(make()));
    manager_->sleep("");
  }
  VTensorId make() {
    const VTensorId id = *manager_->try_create({}, "");
    const size_t num_tokens = 10;
    manager_->extend({&id, 1}, {&num_tokens, 1});
    return id;
  }
  void expect_closed_empty() {
    const Stats stats = manager_->stats();
    EXPECT_EQ(stats.resident_bytes, 0U);
    EXPECT_EQ(stats.swapped_bytes, 0U);
    EXPECT_EQ(stats.asleep_bytes, 0U);
  }

  FaultyDriver* faults_ = nullptr;
  std::shared_ptr<Manager> manager_;
};

TEST_F(SleepingManagerTest, may_be_closed) {
  open_asleep();
  manager_->close();
  expect_closed_empty();
}

TEST_F(SleepingManagerTest, may_go_away) {
  open_asleep();
  manager_.reset();
}

// wake() fails at k, then everything does, the undoing of wake() too: close() still ends it.
TEST_F(SleepingManagerTest, may_be_closed_after_a_wake_that_failed) {
  for (int64_t k = 1; k < 30; ++k) {
    for (const bool persistent : {false, true}) {
      SCOPED_TRACE("call " + std::to_string(k));
      open_asleep();
      faults_->set_plan({.fail_at = k, .persistent = persistent});
      try {
        manager_->wake();
      } catch (const Error&) {
        EXPECT_TRUE(manager_->is_asleep());
      }
      manager_->check_integrity();
      bool broken = false;
      for (const VTensorInfo& info : manager_->snapshot().vtensors) {
        broken |= info.state == SlotState::kBroken;
      }
      try {
        manager_->close();
      } catch (const BrokenMapping&) {
        broken = true;
      } catch (const Error&) {
        // to be repeated
      }
      faults_->set_plan({});
      manager_->close();
      if (!broken) expect_closed_empty();
    }
  }
}

}  // namespace
}  // namespace vtensor
