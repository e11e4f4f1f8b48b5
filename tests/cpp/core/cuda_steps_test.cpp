// Steps on the stand-in CUDA driver, which counts every change under a running kernel as a
// violation: whatever the manager is asked to do between begin_step() and the end of the step's
// kernels, it does without touching an address that they may read, waits for them, or refuses.
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/support/steps_world.h"

namespace vtensor {
namespace {

// -------------------------------------------------------------------------------- one at a time

struct Window {
  std::string name;
  bool waits;  // for the kernels; false: it must be done while they run
  std::function<void(Manager&, const std::vector<VTensorId>&)> operation;
  CoreOptions core{};
};

void PrintTo(const Window& window, std::ostream* out) { *out << window.name; }

class StepWindowTest : public StepsTest, public testing::WithParamInterface<Window> {};

// Kernels read two vTensors of the same tokens, computed twice, of which the first is recorded; a
// third, recorded and released, is parked.
TEST_P(StepWindowTest, leaves_what_running_kernels_read_as_it_is) {
  open(GetParam().core);
  const VTensorId parked = make(tokens_from(500, 40));
  manager_->record_prefix(parked, tokens_from(500, 40));
  const std::vector<VTensorId> ids = {*manager_->try_create(kStepPrompt, ""),
                                      *manager_->try_create(kStepPrompt, "")};
  for (const VTensorId id : ids) EXPECT_TRUE(extend(id, 40));
  manager_->record_prefix(ids[0], kStepPrompt);
  manager_->release(parked);
  EXPECT_EQ(manager_->stats().resident_bytes, 18 * kChunk);

  manager_->begin_step();
  const std::vector<uint64_t> kernels = launch(ids);
  manager_->end_step(kStream);
  const uint64_t num_waits = standin().calls("cuEventSynchronize");
  std::atomic<bool> is_done = false;
  std::jthread caller([&] {
    GetParam().operation(*manager_, ids);
    is_done = true;
  });
  while (!is_done && standin().calls("cuEventSynchronize") == num_waits) std::this_thread::yield();
  EXPECT_EQ(standin().running_kernels(), 4U);
  for (const uint64_t kernel : kernels) standin().end_kernel(kernel);
  caller.join();

  EXPECT_EQ(standin().calls("cuEventSynchronize") > num_waits, GetParam().waits);
  manager_->check_integrity();
}

std::vector<Window> windows() {
  using Ids = std::vector<VTensorId>;
  const auto extend = [](Manager& manager, VTensorId id, size_t num_tokens) {
    EXPECT_TRUE(manager.try_extend({&id, 1}, {&num_tokens, 1}));
  };
  const auto release_all = [](Manager& manager, const Ids& ids) {
    for (const VTensorId id : ids) manager.release(id);
  };
  return {
      {"Release", false, release_all},
      {"ReleaseWithoutParking", false, release_all, {.park = false}},
      {"ReleaseAndReuse", false,
       [=](Manager& manager, const Ids& ids) {
         release_all(manager, ids);
         extend(manager, *manager.try_create(kStepPrompt, ""), 60);
       }},
      {"ReleaseAndTakeTheSlotsThatAreLeft", false,
       [=](Manager& manager, const Ids& ids) {
         release_all(manager, ids);
         while (manager.try_create({}, "")) continue;
       }},
      {"ReleaseAndWaitForASlot", true,
       [=](Manager& manager, const Ids& ids) {
         release_all(manager, ids);
         while (manager.try_create({}, "")) continue;
         EXPECT_TRUE(manager.try_create({}, "", 0, false, /*wait=*/true));
       }},
      {"ReleaseAndWaitToFork", true,
       [=](Manager& manager, const Ids& ids) {
         manager.release(ids[0]);
         while (manager.try_create({}, "")) continue;
         EXPECT_TRUE(manager.try_fork(ids[1]));
       }},
      {"ReleaseAndReuseWhenMemoryIsShort", true,
       [=](Manager& manager, const Ids& ids) {
         release_all(manager, ids);
         extend(manager, *manager.try_create({}, ""), 256);
       }},
      {"ReleaseAndTrim", false,
       [=](Manager& manager, const Ids& ids) {
         release_all(manager, ids);
         EXPECT_EQ(manager.trim(), 0U) << "even the parked slot's chunks are recorded";
       }},
      {"ReleaseAndEvict", false,
       [=](Manager& manager, const Ids& ids) {
         release_all(manager, ids);
         manager.trim();
         manager.evict(32 * kChunk);
         EXPECT_EQ(manager.trim(), 6 * kChunk) << "those of the parked slot alone";
       }},
      {"ResetPrefixCache", false,
       [](Manager& manager, const Ids&) { manager.reset_prefix_cache(); }},
      {"LowerBudget", true,
       [=](Manager& manager, const Ids& ids) {
         release_all(manager, ids);
         manager.set_memory_budget(4 * kChunk);
       }},
      {"ExtendInPlace", false,
       [=](Manager& manager, const Ids& ids) { extend(manager, ids[0], 60); }},
      {"PreExtend", false,
       [](Manager& manager, const Ids& ids) {
         manager.pre_extend(ids, {100, 100});
         manager.drain();
       }},
      {"Fork", false, [](Manager& manager, const Ids& ids) { manager.try_fork(ids[0]); }},
      {"CopyOnWrite", true,
       [=](Manager& manager, const Ids& ids) { extend(manager, *manager.try_fork(ids[0]), 41); }},
      {"ForkByCopy",
       true,
       [](Manager& manager, const Ids& ids) { manager.try_fork(ids[1]); },
       {.alias = false}},
      {"Dedup", true,
       [](Manager& manager, const Ids& ids) {
         manager.record_prefix(ids[1], kStepPrompt);
         EXPECT_EQ(manager.stats().chunks_deduplicated, 4U);
       }},
      {"TruncateRecorded", true,
       [](Manager& manager, const Ids& ids) { manager.truncate(ids[0], 3); }},
      {"TruncateUnrecorded", false,
       [](Manager& manager, const Ids& ids) { manager.truncate(ids[1], 3); }},
      {"SwapOut", true,
       [](Manager& manager, const Ids& ids) { EXPECT_TRUE(manager.try_swap_out(ids[0])); }},
      {"SwapOutAndIn", true,
       [](Manager& manager, const Ids& ids) {
         EXPECT_TRUE(manager.try_swap_out(ids[0]));
         EXPECT_TRUE(manager.try_swap_in(ids[0], kStepPrompt));
       }},
      {"Sleep", true,
       [](Manager& manager, const Ids&) {
         manager.sleep("");
         manager.wake();
       }},
      {"SleepAndRelease", true,
       [=](Manager& manager, const Ids& ids) {
         manager.sleep("");
         release_all(manager, ids);
         manager.wake();
       }},
  };
}

INSTANTIATE_TEST_SUITE_P(Operations, StepWindowTest, testing::ValuesIn(windows()),
                         [](const auto& info) { return info.param.name; });

// ------------------------------------------------------------------------------------- the end

// Ends the kernels when somebody waits for them by `function`.
class EndWhenWaitedFor {
 public:
  EndWhenWaitedFor(const StandinControl& standin, const std::string& function,
                   const std::vector<uint64_t>& kernels)
      : thread_([&standin, function, kernels, before = standin.calls(function.c_str())] {
          while (standin.calls(function.c_str()) == before) std::this_thread::yield();
          for (const uint64_t kernel : kernels) standin.end_kernel(kernel);
        }) {}

 private:
  std::jthread thread_;
};

TEST_F(StepsTest, close_waits_for_the_kernels_of_ended_steps) {
  open();
  const VTensorId id = make(kStepPrompt);
  manager_->begin_step();
  const auto kernels = launch({id});
  manager_->end_step(kStream);
  const EndWhenWaitedFor device(standin(), "cuEventSynchronize", kernels);
  manager_->close();
  EXPECT_EQ(manager_->stats().resident_bytes, 0U);
}

TEST_F(StepsTest, close_waits_for_all_kernels_of_the_device_where_a_step_was_never_ended) {
  open();
  const VTensorId id = make(kStepPrompt);
  manager_->begin_step();
  const EndWhenWaitedFor device(standin(), "cuCtxSynchronize", launch({id}));
  manager_->close();
  EXPECT_EQ(manager_->stats().resident_bytes, 0U);
}

// A kernel faulted, and the fence says so when the last view of a released vTensor goes.
TEST_F(StepsTest, a_fence_that_fails_when_a_view_goes_does_not_end_the_process) {
  open();
  const VTensorId id = make(kStepPrompt);
  const size_t free_slots = manager_->stats().num_free_slots;
  std::optional<TensorView> view = manager_->view(id, 0, KV::kKey);
  manager_->begin_step();
  for (const uint64_t kernel : launch({id})) standin().end_kernel(kernel);
  manager_->end_step(kStream);
  manager_->release(id);
  standin().fail("cuEventQuery", 1, cuda::CUDA_ERROR_UNKNOWN);
  view.reset();
  EXPECT_EQ(manager_->snapshot().vtensors.front().state, SlotState::kRetiring);
  manager_->trim();  // asks once more
  EXPECT_EQ(manager_->stats().num_free_slots, free_slots + 1);
}

TEST_F(StepsTest, a_manager_that_goes_away_waits_too) {
  open();
  const VTensorId id = make(kStepPrompt);
  manager_->begin_step();
  const EndWhenWaitedFor device(standin(), "cuCtxSynchronize", launch({id}));
  manager_.reset();
}

TEST_F(StepsTest, an_end_that_the_driver_refuses_leaves_the_step_open_and_may_be_repeated) {
  open();
  const VTensorId id = make(kStepPrompt);
  manager_->begin_step();
  const auto kernels = launch({id});
  for (const char* function : {"cuEventCreate", "cuEventRecord"}) {
    standin().fail(function, 1, cuda::CUDA_ERROR_UNKNOWN);
    EXPECT_THROW(manager_->end_step(kStream), DriverError) << function;
  }
  EXPECT_THROW(manager_->sleep(""), std::invalid_argument) << "it is open";
  manager_->end_step(kStream);
  const EndWhenWaitedFor device(standin(), "cuEventSynchronize", kernels);
  manager_->sleep("");
}

// That the tests above can fail: the same change outside of any step meets the kernel.
TEST_F(StepsTest, without_a_step_nobody_waits_and_the_standin_catches_it) {
  open();
  const VTensorId id = make(kStepPrompt);
  const auto kernels = launch({id});
  standin().set_quiet(1);
  manager_->release(id);
  EXPECT_THROW(manager_->trim(), DriverError);
  EXPECT_GT(standin().violations(), 0U);
  for (const uint64_t kernel : kernels) standin().end_kernel(kernel);
  manager_.reset();
  standin().reset();
}

}  // namespace
}  // namespace vtensor
