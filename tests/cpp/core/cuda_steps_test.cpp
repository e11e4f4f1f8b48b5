// Steps on the stand-in CUDA driver, which counts every change under a running kernel as a
// violation: whatever the manager is asked to do between begin_step() and the end of the step's
// kernels, it does without touching an address that they may read, waits for them, or refuses.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/manager.h"

namespace vtensor {
namespace {

const KVSpec kSpec =
    UniformKV{.num_layers = 1,
              .num_kv_heads = 1,
              .head_dim = 64,
              .element_bytes = 4,
              .max_seq_len = 256,
              .layers_per_plane = 1};  // 256 bytes per token, 16 tokens per chunk, two planes
constexpr size_t kTokenBytes = 256;
constexpr uintptr_t kStream = 0;
const Tokens kPrompt = tokens_from(0, 40);  // two whole rows and a half

class StepsTest : public testing::Test {
 protected:
  void open(const CoreOptions& core = {}) {
    ManagerOptions options;
    options.max_requests = 6;
    options.chunk_bytes = kChunk;
    options.memory_budget = 32 * kChunk;
    options.swap_space_bytes = 64 * kChunk;
    options.park = core.park;
    options.alias = core.alias;
    manager_ = Manager::open(cuda_driver(), kSpec, options);
  }
  const StandinControl& standin() const { return *standin_; }

  bool extend(VTensorId id, size_t num_tokens) {
    return manager_->try_extend({&id, 1}, {&num_tokens, 1});
  }
  VTensorId make(const Tokens& tokens) {
    const VTensorId id = *manager_->try_create(tokens, "");
    EXPECT_TRUE(extend(id, tokens.size()));
    return id;
  }

  // Kernels that read everything mapped behind these vTensors, in both planes.
  std::vector<uint64_t> launch(const std::vector<VTensorId>& ids) {
    std::vector<uint64_t> kernels;
    for (const VTensorId id : ids) {
      const size_t num_bytes = manager_->info(id).mapped_tokens * kTokenBytes;
      if (num_bytes == 0) continue;
      for (const KV which : {KV::kKey, KV::kValue}) {
        const uintptr_t addr = manager_->view(id, 0, which).address;
        kernels.push_back(standin().begin_kernel(kStream, addr, num_bytes));
      }
    }
    return kernels;
  }

  StandinScope standin_{On::kCuda};
  std::shared_ptr<Manager> manager_;
};

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
  const std::vector<VTensorId> ids = {*manager_->try_create(kPrompt, ""),
                                      *manager_->try_create(kPrompt, "")};
  for (const VTensorId id : ids) EXPECT_TRUE(extend(id, 40));
  manager_->record_prefix(ids[0], kPrompt);
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
         extend(manager, *manager.try_create(kPrompt, ""), 60);
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
         manager.record_prefix(ids[1], kPrompt);
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
         EXPECT_TRUE(manager.try_swap_in(ids[0], kPrompt));
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
  const VTensorId id = make(kPrompt);
  manager_->begin_step();
  const auto kernels = launch({id});
  manager_->end_step(kStream);
  const EndWhenWaitedFor device(standin(), "cuEventSynchronize", kernels);
  manager_->close();
  EXPECT_EQ(manager_->stats().resident_bytes, 0U);
}

TEST_F(StepsTest, close_waits_for_all_kernels_of_the_device_where_a_step_was_never_ended) {
  open();
  const VTensorId id = make(kPrompt);
  manager_->begin_step();
  const EndWhenWaitedFor device(standin(), "cuCtxSynchronize", launch({id}));
  manager_->close();
  EXPECT_EQ(manager_->stats().resident_bytes, 0U);
}

// A kernel faulted, and the fence says so when the last view of a released vTensor goes.
TEST_F(StepsTest, a_fence_that_fails_when_a_view_goes_does_not_end_the_process) {
  open();
  const VTensorId id = make(kPrompt);
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
  const VTensorId id = make(kPrompt);
  manager_->begin_step();
  const EndWhenWaitedFor device(standin(), "cuCtxSynchronize", launch({id}));
  manager_.reset();
}

TEST_F(StepsTest, an_end_that_the_driver_refuses_leaves_the_step_open_and_may_be_repeated) {
  open();
  const VTensorId id = make(kPrompt);
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
  const VTensorId id = make(kPrompt);
  const auto kernels = launch({id});
  standin().set_quiet(1);
  manager_->release(id);
  EXPECT_THROW(manager_->trim(), DriverError);
  EXPECT_GT(standin().violations(), 0U);
  for (const uint64_t kernel : kernels) standin().end_kernel(kernel);
  manager_.reset();
  standin().reset();
}

// --------------------------------------------------------------------------------------- random

// A device that ends kernels in the order of their launch, sooner or later.
class Device {
 public:
  explicit Device(const StandinControl& standin) : standin_(standin) {}
  ~Device() {
    thread_.request_stop();
    thread_.join();
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  void add(const std::vector<uint64_t>& kernels) {
    const std::lock_guard lock(mutex_);
    kernels_.insert(kernels_.end(), kernels.begin(), kernels.end());
  }

 private:
  void run(const std::stop_token& stop) {
    std::mt19937 random(5);
    while (end_first() || !stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 60));
    }
  }
  bool end_first() {
    const std::lock_guard lock(mutex_);
    if (kernels_.empty()) return false;
    standin_.end_kernel(kernels_.front());
    kernels_.pop_front();
    return true;
  }

  const StandinControl& standin_;
  std::mutex mutex_;
  std::deque<uint64_t> kernels_;
  std::jthread thread_{[this](const std::stop_token& stop) { run(stop); }};
};

class RandomStepsTest : public StepsTest, public testing::WithParamInterface<CoreOptions> {
 protected:
  // One operation that a server may ask for at any time. Refused ones change nothing.
  void operate() {
    const VTensorId id = live_.empty() ? 0 : live_[random_() % live_.size()];
    const auto operation = random_() % 14;
    if (operation < 3 || live_.empty()) return create();
    if (operation < 6) {
      extend(id, std::min<size_t>(manager_->info(id).num_tokens + random_() % 40, 256));
    } else if (operation == 6) {
      manager_->release(id);
      std::erase(live_, id);
    } else if (operation == 7) {
      if (const auto child = manager_->try_fork(id)) live_.push_back(*child);
    } else if (operation == 8) {
      manager_->truncate(id, random_() % (manager_->info(id).num_tokens + 1));
    } else if (operation == 9) {
      manager_->record_prefix(id, std::span(prompt_).first(std::min<size_t>(
                                      prompt_.size(), manager_->info(id).num_tokens)));
    } else if (operation == 10) {
      if (manager_->try_swap_out(id) && !manager_->try_swap_in(id, {})) {
        manager_->release(id);
        std::erase(live_, id);
      }
    } else if (operation == 11) {
      manager_->trim();
    } else if (operation == 12) {
      manager_->evict(random_() % 8 * kChunk);
    } else if (random_() % 4 == 0) {
      manager_->sleep("");
      manager_->wake();
    }
  }
  void create() {
    const auto id = manager_->try_create(std::span(prompt_).first(random_() % 60 + 1), "");
    if (!id) return;
    live_.push_back(*id);
    extend(*id, manager_->info(*id).num_tokens + random_() % 30);
  }
  void operate_or_be_refused() {
    try {
      operate();
    } catch (const std::invalid_argument&) {
      // mapped memory would change while the step is open
    }
    manager_->check_integrity();
  }

  std::mt19937 random_{11};
  Tokens prompt_ = tokens_from(0, 60);
  std::vector<VTensorId> live_;
};

TEST_P(RandomStepsTest, kernels_never_lose_what_they_read) {
  open(GetParam());
  {
    Device device(standin());
    for (int step = 0; step < 150; ++step) {
      for (auto n = random_() % 4; n > 0; --n) operate_or_be_refused();
      if (random_() % 2 == 0) {
        manager_->pre_extend(live_, std::vector<size_t>(live_.size(), random_() % 200));
      }
      manager_->begin_step();
      const auto kernels = launch(live_);
      for (auto n = random_() % 3; n > 0; --n) operate_or_be_refused();
      manager_->end_step(kStream);
      device.add(kernels);
    }
    manager_->close();
  }
  EXPECT_EQ(standin().running_kernels(), 0U);
  EXPECT_EQ(manager_->stats().resident_bytes, 0U);
}

INSTANTIATE_TEST_SUITE_P(Options, RandomStepsTest,
                         testing::Values(CoreOptions{}, CoreOptions{.park = false},
                                         CoreOptions{.alias = false}),
                         [](const auto& info) {
                           return !info.param.park   ? "NoPark"
                                  : info.param.alias ? "Defaults"
                                                     : "NoAlias";
                         });

}  // namespace
}  // namespace vtensor
