// Who waits for whom at a manager: for the worker, for a step of another thread, and for how long.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/support/gated_driver.h"
#include "tests/cpp/support/manager_fixture.h"
#include "vtensor/driver/call_scope.h"
#include "vtensor/driver/wrappers/forwarding_driver.h"

namespace vtensor {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

class WaitingTest : public ManagerTest {
 protected:
  static void expect_to_wait_for_one_chunk(size_t budget_chunks, size_t rows_in_the_end,
                                           const std::function<void(Manager&, VTensorId)>& call);
};

TEST_P(WaitingTest, release_waits_for_the_worker) {
  const auto manager = open();
  for (int round = 0; round < 50; ++round) {
    const VTensorId id = *manager->try_create({}, "");
    manager->pre_extend({id}, {64});
    manager->release(id);
  }
  manager->drain();
  manager->check_integrity();
}

// Not even where the worker is in the middle of mapping: sleep waits for it.
TEST_P(WaitingTest, sleep_waits_for_what_the_worker_maps) {
  auto gated = std::make_unique<GatedDriver>(param_driver());
  GatedDriver& gate = *gated;
  const auto manager = open(std::move(gated));
  gate.arm();
  const VTensorId id = *manager->try_create({}, "");
  manager->pre_extend({id}, {40});
  gate.entered.get_future().wait();
  std::future<size_t> asleep = std::async(std::launch::async, [&] { return manager->sleep(""); });
  EXPECT_EQ(asleep.wait_for(milliseconds(20)), std::future_status::timeout);
  gate.may_pass.set_value();
  asleep.wait();
  manager->drain();
  EXPECT_EQ(manager->stats().resident_bytes, 0U);
  manager->check_integrity();
  manager->wake();
  EXPECT_TRUE(extend(*manager, id, 40));
  manager->check_integrity();
}

// A step that maps holds nobody else up: its driver calls are made without the mutex.
TEST_P(WaitingTest, others_go_on_while_a_step_extends) {
  auto gated = std::make_unique<GatedDriver>(param_driver());
  GatedDriver& gate = *gated;
  const auto manager = open(std::move(gated));
  gate.arm();
  const VTensorId id = *manager->try_create({}, "");
  const VTensorId other = *manager->try_create({}, "");
  std::future<bool> grown = std::async(std::launch::async, [&] { return extend(*manager, id, 8); });
  gate.entered.get_future().wait();
  std::future<void> others = std::async(std::launch::async, [&] {
    manager->stats();
    manager->check_integrity();
    EXPECT_TRUE(extend(*manager, other, 8));
    manager->release(other);
  });
  EXPECT_EQ(others.wait_for(seconds(10)), std::future_status::ready);
  gate.may_pass.set_value();
  EXPECT_TRUE(grown.get());
  others.get();
  EXPECT_EQ(manager->info(id).num_tokens, 8U);
  manager->check_integrity();
}

// Also those that stand in the same step and need nothing: their lengths are not yet declared.
TEST_P(WaitingTest, what_a_step_extends_is_released_only_afterwards) {
  auto gated = std::make_unique<GatedDriver>(param_driver());
  GatedDriver& gate = *gated;
  const auto manager = open(std::move(gated));
  const std::vector<VTensorId> ids = {*manager->try_create({}, ""), *manager->try_create({}, "")};
  const std::vector<size_t> first = {0, 4};
  const std::vector<size_t> lengths = {8, 5};
  EXPECT_TRUE(manager->try_extend(ids, first));
  gate.arm();
  std::future<bool> grown =
      std::async(std::launch::async, [&] { return manager->try_extend(ids, lengths); });
  gate.entered.get_future().wait();
  std::future<void> released =
      std::async(std::launch::async, [&] { manager->release(ids.back()); });
  EXPECT_EQ(released.wait_for(milliseconds(20)), std::future_status::timeout);
  gate.may_pass.set_value();
  EXPECT_TRUE(grown.get());
  released.get();
  manager->check_integrity();
}

TEST_P(WaitingTest, close_waits_for_a_step_that_extends) {
  auto gated = std::make_unique<GatedDriver>(param_driver());
  GatedDriver& gate = *gated;
  const auto manager = open(std::move(gated));
  gate.arm();
  const VTensorId id = *manager->try_create({}, "");
  std::future<bool> grown = std::async(std::launch::async, [&] { return extend(*manager, id, 8); });
  gate.entered.get_future().wait();
  std::future<void> closed = std::async(std::launch::async, [&] { manager->close(); });
  EXPECT_EQ(closed.wait_for(milliseconds(20)), std::future_status::timeout);
  gate.may_pass.set_value();
  EXPECT_TRUE(grown.get());
  closed.get();
  EXPECT_EQ(manager->stats().resident_bytes, 0U);
}

// Holds up what the worker creates: the first chunk until a caller is about to wait, and all later
// ones for a moment while it does, counting them.
class WatchedDriver final : public ForwardingDriver {
 public:
  using ForwardingDriver::ForwardingDriver;
  std::promise<void> entered;
  std::promise<void> caller_comes;
  std::atomic<bool> caller_waits = false;
  std::atomic<int> num_overtaken = 0;

 protected:
  void before(DriverCall& call) override {
    if (call.kind != CallKind::kCreate || !CallScope::is_worker()) return;
    if (!entered_.exchange(true)) {
      entered.set_value();
      caller_comes.get_future().wait();
    } else if (caller_waits) {
      ++num_overtaken;
    } else {
      return;
    }
    std::this_thread::sleep_for(milliseconds(10));  // so that the caller is there, and waits
  }
  void after(DriverCall&) noexcept override {}

 private:
  std::atomic<bool> entered_ = false;
};

// The queue is 10 vTensors with 64 chunks each.
void WaitingTest::expect_to_wait_for_one_chunk(
    size_t budget_chunks, size_t rows_in_the_end,
    const std::function<void(Manager&, VTensorId)>& call) {
  auto watched = std::make_unique<WatchedDriver>(param_driver());
  WatchedDriver& driver = *watched;
  const auto manager = open(std::move(watched), budget_chunks);
  std::vector<VTensorId> ids;
  for (int i = 0; i < 10; ++i) ids.push_back(*manager->try_create({}, ""));
  const VTensorId own = *manager->try_create({}, "");
  manager->pre_extend(ids, std::vector<size_t>(ids.size(), 128));
  driver.entered.get_future().wait();
  driver.caller_waits = true;
  driver.caller_comes.set_value();
  call(*manager, own);
  driver.caller_waits = false;
  EXPECT_LT(driver.num_overtaken, 5) << "and not the 63 others of the extension under way";
  manager->drain();
  EXPECT_GE(manager->mapping_times().pre_extended_rows, rows_in_the_end)
      << "what was left off is done later";
  manager->check_integrity();
}

TEST_P(WaitingTest, trim_waits_for_one_chunk_not_for_the_queue) {
  expect_to_wait_for_one_chunk(
      700, 160, [](Manager& manager, VTensorId) { EXPECT_GE(manager.trim(), kChunk); });
}

TEST_P(WaitingTest, a_change_of_the_budget_waits_for_one_chunk_not_for_the_queue) {
  expect_to_wait_for_one_chunk(
      700, 160, [](Manager& manager, VTensorId) { manager.set_memory_budget(690 * kChunk); });
}

TEST_P(WaitingTest, a_refusal_waits_for_one_chunk_not_for_the_queue) {
  expect_to_wait_for_one_chunk(70, 0, [](Manager& manager, VTensorId id) {
    const size_t num_tokens = 16;  // 8 chunks, where 6 are left
    EXPECT_TRUE(manager.try_extend({&id, 1}, {&num_tokens, 1}));
    manager.release(id);
  });
}

VTENSOR_ON_EVERY_DRIVER(WaitingTest);

}  // namespace
}  // namespace vtensor
