// Epochs: what a running step may read stays as it is until its fence is done.
#include "vtensor/core/epochs.h"

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "vtensor/driver/sim/sim_driver.h"
#include "vtensor/driver/wrappers/forwarding_driver.h"
#include "vtensor/manager.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

// Fences of a device whose kernels end when the test says so.
struct FakeDevice {
  int64_t issued = 0;
  int64_t finished = 0;
  int64_t num_waits = 0;
  int64_t num_reads_too_early = 0;
};

class FakeFence final : public Fence {
 public:
  FakeFence(FakeDevice& device, int64_t position) : device_(device), position_(position) {}
  bool done() const override { return device_.finished >= position_; }
  void wait() const override {
    ++device_.num_waits;
    device_.finished = std::max(device_.finished, position_);
  }

 private:
  FakeDevice& device_;
  int64_t position_;
};

class FencedDriver final : public ForwardingDriver {
 public:
  FencedDriver(std::unique_ptr<Driver> inner, FakeDevice& device)
      : ForwardingDriver(std::move(inner)), device_(device) {}
  std::unique_ptr<Fence> fence(uintptr_t) override {
    return std::make_unique<FakeFence>(device_, ++device_.issued);
  }

 protected:
  void before(DriverCall& call) override {
    const bool is_running = device_.finished < device_.issued;
    if (call.kind == CallKind::kRead && is_running) ++device_.num_reads_too_early;
  }
  void after(DriverCall&) noexcept override {}

 private:
  FakeDevice& device_;
};

class EpochsTest : public testing::Test {
 protected:
  EpochsTest() {
    ManagerOptions options;
    options.max_requests = 4;
    options.chunk_bytes = 4096;
    options.memory_budget = 32 * 4096;
    options.swap_space_bytes = 32 * 4096;
    manager = Manager::open(std::make_unique<FencedDriver>(std::make_unique<SimDriver>(), device),
                            UniformKV{.num_layers = 1,
                                      .num_kv_heads = 1,
                                      .head_dim = 64,
                                      .element_bytes = 4,
                                      .max_seq_len = 256,
                                      .layers_per_plane = 1},
                            options);
  }

  VTensorId make(size_t num_tokens) {
    const VTensorId id = *manager->try_create({}, "");
    extend(id, num_tokens);
    return id;
  }
  void extend(VTensorId id, size_t num_tokens) {
    manager->extend({&id, 1}, {&num_tokens, 1});
    manager->check_integrity();
  }
  SlotState state_of_slot(SlotId slot) const {
    for (const VTensorInfo& info : manager->snapshot().vtensors) {
      if (info.slot == slot) return info.state;
    }
    return SlotState::kFree;
  }

  FakeDevice device;
  std::shared_ptr<Manager> manager;
};

TEST_F(EpochsTest, WithoutStepsAReleasedSlotIsParkedAtOnce) {
  const VTensorId id = make(16);
  manager->release(id);
  EXPECT_EQ(state_of_slot(0), SlotState::kParked);
}

TEST_F(EpochsTest, ASlotReleasedDuringAStepRetiresUntilItsFenceIsDone) {
  const VTensorId id = make(16);
  manager->begin_step();
  manager->release(id);
  EXPECT_EQ(state_of_slot(0), SlotState::kRetiring);
  manager->end_step(0);
  EXPECT_EQ(state_of_slot(0), SlotState::kRetiring);
  device.finished = device.issued;
  make(16);  // settles what is over
  EXPECT_EQ(state_of_slot(0), SlotState::kParked);
  EXPECT_EQ(device.num_waits, 0);
}

TEST_F(EpochsTest, ASlotReleasedWhileAnEarlierStepRunsIsNotAdopted) {
  const VTensorId id = make(16);
  manager->begin_step();
  manager->end_step(0);
  manager->release(id);
  const VTensorId other = make(16);
  EXPECT_EQ(manager->info(other).slot, 1U);
  EXPECT_EQ(state_of_slot(0), SlotState::kRetiring);
}

TEST_F(EpochsTest, AShortageWaitsForRunningStepsBeforeItIsDeclared) {
  const VTensorId id = make(256);  // all 32 chunks
  manager->begin_step();
  manager->end_step(0);
  manager->release(id);
  make(256);
  EXPECT_EQ(device.num_waits, 1);
}

TEST_F(EpochsTest, CopyOnWriteWaitsForTheStepThatMayStillWriteTheTail) {
  const VTensorId id = make(20);
  manager->begin_step();
  manager->end_step(0);
  const VTensorId child = *manager->try_fork(id);
  extend(child, 21);  // takes its own tail: the parent may append to the old one
  EXPECT_EQ(device.num_waits, 1);
}

// What is read before the step is over may lack what its kernels have yet to write.
TEST_F(EpochsTest, SleepAndSwapOutReadNothingBeforeTheRunningStepIsOver) {
  for (const bool sleeps : {true, false}) {
    const VTensorId id = make(20);
    const VTensorId released = make(20);
    manager->begin_step();
    manager->end_step(0);
    manager->release(released);
    device.num_reads_too_early = 0;
    if (sleeps) {
      manager->sleep("");
      EXPECT_EQ(manager->stats().resident_bytes, 0U);
      EXPECT_EQ(manager->stats().num_free_slots, 3U) << "the released slot is settled";
      manager->wake();
    } else {
      EXPECT_TRUE(manager->try_swap_out(id));
    }
    manager->check_integrity();
    EXPECT_EQ(device.num_reads_too_early, 0);
    manager->release(id);
  }
}

TEST_F(EpochsTest, ShortageDuringAnOpenStepIsAValueAndTakesNothingFromAnybody) {
  const VTensorId id = make(16);
  manager->pre_extend({id}, {256});
  manager->drain();
  const VTensorId other = *manager->try_create({}, "");
  const size_t num_tokens = 64;
  manager->begin_step();
  EXPECT_FALSE(manager->try_extend({&other, 1}, {&num_tokens, 1}));
  EXPECT_EQ(manager->info(id).mapped_tokens, 256U);
  manager->end_step(0);
  extend(other, num_tokens);  // waits, and takes what was mapped ahead
  EXPECT_EQ(device.num_waits, 1);
}

TEST_F(EpochsTest, RemappingDuringAnOpenStepIsRefused) {
  const VTensorId id = make(20);
  const VTensorId child = *manager->try_fork(id);
  manager->begin_step();
  const size_t longer = 21;
  EXPECT_THROW(manager->extend({&child, 1}, {&longer, 1}), std::invalid_argument);
  manager->end_step(0);
  extend(child, longer);
}

}  // namespace
}  // namespace vtensor
