// Swapping, sleeping and dedup when any driver call on the way fails, and a sleeping manager's end.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/swap_world.h"
#include "vtensor/manager.h"

namespace vtensor {
namespace {

using Setup = std::function<void(World&)>;
using Operation = std::function<bool(World&)>;

struct Sweep {
  std::string name;
  Setup setup;
  Operation operation;  // false: shortage
  size_t budget_chunks = 64;
  On driver = On::kHost;
};

void PrintTo(const Sweep& sweep, std::ostream* out) { *out << sweep.name; }

class SwapFaultTest : public testing::TestWithParam<Sweep> {
  StandinScope standin_{GetParam().driver};
};

// For every k the k-th call of the operation fails: it throws one of the core's errors or tells
// shortage, all invariants hold, and repeating it without faults works.
TEST_P(SwapFaultTest, nothing_is_lost_whichever_call_fails) {
  const Sweep& sweep = GetParam();
  World good(sweep.budget_chunks, {}, "", sweep.driver);
  sweep.setup(good);
  const int64_t before = good.faulty.faults.num_calls();
  ASSERT_TRUE(sweep.operation(good));
  const int64_t num_calls = good.faulty.faults.num_calls() - before;
  ASSERT_GT(num_calls, 1);

  for (const auto kind : {FaultPlan::Kind::kDriverError, FaultPlan::Kind::kOutOfMemory}) {
    for (const bool persistent : {false, true}) {
      for (int64_t k = 1; k <= num_calls; ++k) {
        SCOPED_TRACE("call " + std::to_string(k) + (persistent ? " and all later ones" : "") +
                     (kind == FaultPlan::Kind::kDriverError ? "" : ", out of memory"));
        World world(sweep.budget_chunks, {}, "", sweep.driver);
        sweep.setup(world);
        world.faulty.faults.set_plan({.fail_at = k, .kind = kind, .persistent = persistent});
        bool done = false;
        try {
          done = sweep.operation(world);
        } catch (const Error&) {
          // typed, as it should be; anything else fails the test
        }
        EXPECT_GT(world.faulty.faults.num_failed(), 0);
        check_integrity(world.core);
        world.faulty.fail_never();
        if (!persistent) {
          EXPECT_EQ(world.num_broken_slots(), 0U);
        }
        if (!done && world.num_broken_slots() == 0) {
          EXPECT_TRUE(sweep.operation(world));
        }
        if (world.core.sleeper.is_asleep()) world.core.sleeper.wake(world.sleep_store);
        check_integrity(world.core);
        // What a broken slot may map is lost to the budget.
        if (world.num_broken_slots() > 0) world.core.reclaimer.set_budget_chunks(64);
        world.expect_all_contents();
        world.expect_nothing_leaks();
        if (HasFailure()) return;
      }
    }
  }
}

VTensorId nth(World& world, size_t n) { return world.core.vtensors.live_ids().at(n); }

std::vector<Sweep> sweeps() {
  const Setup two = [](World& world) {
    const VTensorId first = world.make(kPrompt, 'a');
    world.core.recorder.record_prefix(first, kPrompt);
    world.append(world.fork(first), 13, 'b');
  };
  const Setup swapped = [=](World& world) {
    two(world);
    ASSERT_TRUE(world.core.swapper.swap_out(nth(world, 1), world.store));
  };
  const Setup swapped_alone = [=](World& world) {  // the tree and a parked slot hold its first rows
    swapped(world);
    world.release(nth(world, 0));
  };
  const Setup swapped_and_full = [=](World& world) {
    swapped(world);
    const Tokens others = tokens_from(500, 12);
    const VTensorId parked = world.make(others, 'x');
    world.core.recorder.record_prefix(parked, others);
    world.release(parked);
  };
  const Setup asleep = [](World& world) {
    fill(world);
    world.core.sleeper.sleep(world.sleep_store);
  };
  const Setup twice = [](World& world) {
    const Tokens prompt = tokens_from(0, 12);
    const VTensorId first = *world.core.placement.create(prompt, "");
    const VTensorId second = *world.core.placement.create(prompt, "");
    world.append(first, 12, 'a');
    world.append(second, 14, 'a');
    world.core.recorder.record_prefix(first, prompt);
  };
  const auto swap_in = [](bool with_tokens) {
    return [=](World& world) {
      for (const VTensorId id : world.core.vtensors.live_ids()) {
        if (!world.core.vtensors.live(id).is_swapped) continue;
        return world.core.swapper.swap_in(id, with_tokens ? kPrompt : Tokens{}, world.store);
      }
      return true;
    };
  };
  const Operation wake = [](World& world) {
    world.core.sleeper.wake(world.sleep_store);
    return true;
  };
  const Operation sleep = [](World& world) {  // asleep already: it could not wake up again
    if (!world.core.sleeper.is_asleep()) world.core.sleeper.sleep(world.sleep_store);
    return true;
  };
  return {
      {"SwapOut", two,
       [](World& world) { return world.core.swapper.swap_out(nth(world, 1), world.store); }},
      {"SwapIn", swapped, swap_in(false)},
      {"SwapInAliased", swapped, swap_in(true)},
      {"SwapInWithReclaim", swapped_and_full, swap_in(true), 12},
      {"SpillAndSwapIn", swapped_alone,
       [=](World& world) {
         world.core.swapper.spill(64, world.store);
         return swap_in(true)(world);
       }},
      {"Sleep", fill, sleep},
      {"Wake", asleep, wake},
      {"SleepAndWake", fill,
       [=](World& world) {
         return (world.core.sleeper.is_asleep() || sleep(world)) && wake(world);
       }},
      {"Dedup", twice,
       [](World& world) {
         return world.core.recorder.dedup(nth(world, 1), tokens_from(0, 12)) == 6;
       }},
  };
}

class DedupTest : public DriverTest {
 protected:
  // Two vTensors of the same tokens, computed twice; the first is recorded.
  void SetUp() override {
    first_ = *world_.core.placement.create(prompt_, "");
    second_ = *world_.core.placement.create(prompt_, "");
    world_.append(first_, 12, 'a');
    world_.append(second_, 14, 'a');
    world_.core.recorder.record_prefix(first_, prompt_);
  }

  World world_;
  Tokens prompt_ = tokens_from(0, 12);
  VTensorId first_ = kNoVTensor;
  VTensorId second_ = kNoVTensor;
};

TEST_P(DedupTest, a_driver_that_fails_once_costs_memory_and_nothing_else) {
  const int64_t before = world_.faulty.faults.num_calls();
  // A remap of each of the two planes, or an unmap, a map and a set_access.
  const int64_t num_calls = world_.faulty.pool.driver->remaps_in_place() ? 2 : 6;
  for (int64_t k = 1; k <= num_calls; ++k) {
    world_.faulty.fail_at(k);
    EXPECT_EQ(world_.core.recorder.dedup(second_, prompt_), 0U);
    EXPECT_EQ(world_.core.state.counters.dedup_failures, static_cast<size_t>(k));
    check_integrity(world_.core);
    world_.expect_all_contents();
  }
  EXPECT_GT(world_.faulty.faults.num_calls(), before + num_calls - 1);
  world_.faulty.fail_never();
  EXPECT_EQ(world_.core.recorder.dedup(second_, prompt_), 6U) << "the next attempt succeeds";
  world_.expect_all_contents();
  world_.expect_nothing_leaks();
}

TEST_P(DedupTest, while_a_step_is_open_nothing_is_remapped) {
  world_.core.state.epochs.begin();
  EXPECT_EQ(world_.core.recorder.dedup(second_, prompt_), 0U);
  EXPECT_EQ(world_.core.state.counters.dedup_failures, 0U);
  world_.core.state.epochs.end(nullptr);
  EXPECT_EQ(world_.core.recorder.dedup(second_, prompt_), 6U);
  world_.expect_all_contents();
}

VTENSOR_ON_EVERY_MEMORY(DedupTest);

std::vector<Sweep> sweeps_on_every_memory() {
  std::vector<Sweep> all;
  for (const On driver : {On::kHost, On::kCuda}) {
    for (Sweep& sweep : sweeps()) {
      sweep.name += name_of(driver);
      sweep.driver = driver;
      all.push_back(std::move(sweep));
    }
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(Operations, SwapFaultTest, testing::ValuesIn(sweeps_on_every_memory()),
                         [](const auto& info) { return info.param.name; });

// --------------------------------------------------------------------------------------- manager

class SleepingManagerTest : public DriverTest {
 protected:
  void open_asleep() {
    auto driver = std::make_unique<FaultyDriver>(param_driver());
    faults_ = driver.get();
    ManagerOptions options;
    options.max_requests = 4;
    options.memory_budget = 64 * kChunk;
    options.chunk_bytes = kChunk;
    options.swap_space_bytes = 64 * kChunk;
    manager_ = Manager::open(std::move(driver),
                             UniformKV{.num_layers = 1,
                                       .num_kv_heads = 1,
                                       .head_dim = 256,
                                       .element_bytes = 4,
                                       .max_seq_len = 64,
                                       .layers_per_plane = 1},
                             options);
    live_ = make();
    manager_->record_prefix(live_, kPrompt);
    manager_->pin_prefix(kPrompt, "pin", 0, "");
    swapped_ = make();
    EXPECT_TRUE(manager_->try_swap_out(swapped_));
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
  VTensorId live_ = kNoVTensor;
  VTensorId swapped_ = kNoVTensor;
};

TEST_P(SleepingManagerTest, releases_at_wake_what_was_released_while_it_slept) {
  open_asleep();
  manager_->release(live_);
  manager_->release(swapped_);
  EXPECT_THROW(manager_->release(live_), ReleasedError);
  manager_->check_integrity();
  faults_->set_plan({.fail_at = 2});
  EXPECT_THROW(manager_->wake(), DriverError);
  faults_->set_plan({});
  manager_->wake();
  EXPECT_THROW(manager_->info(live_), ReleasedError);
  EXPECT_EQ(manager_->stats().num_vtensors, 0U);
  EXPECT_EQ(manager_->stats().num_free_slots, 4U);
  EXPECT_EQ(manager_->stats().swapped_bytes, 0U);
  EXPECT_EQ(manager_->match_prefix(kPrompt, ""), 10U) << "what is recorded stays";
}

TEST_P(SleepingManagerTest, may_be_closed_after_releases) {
  open_asleep();
  manager_->release(live_);
  manager_->release(swapped_);
  manager_->close();
  expect_closed_empty();
  EXPECT_THROW(manager_->release(live_), ReleasedError);
}

TEST_P(SleepingManagerTest, may_be_closed) {
  open_asleep();
  manager_->close();
  expect_closed_empty();
}

TEST_P(SleepingManagerTest, may_go_away) {
  open_asleep();
  manager_.reset();
}

// wake() fails at k, then everything does, the undoing of wake() too: close() still ends it.
TEST_P(SleepingManagerTest, may_be_closed_after_a_wake_that_failed) {
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

VTENSOR_ON_EVERY_MEMORY(SleepingManagerTest);

}  // namespace
}  // namespace vtensor
