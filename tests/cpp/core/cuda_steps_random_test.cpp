// Random operations between the kernels of random steps: nothing that a kernel reads is ever
// touched.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <deque>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/support/steps_world.h"

namespace vtensor {
namespace {

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
