// Windows on the stand-in CUDA driver, which counts every change under a running kernel as a
// violation: the head of a range is unmapped behind the steps that read it, and nobody waits.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/manager.h"

namespace vtensor {
namespace {

constexpr size_t kWindow = 40;
constexpr size_t kTokenBytes = 256;  // 16 tokens per chunk
constexpr uintptr_t kStream = 0;

class CudaWindowsTest : public testing::Test {
 protected:
  // Layer 0 keeps all, layer 1 has a window; a plane for each K and V.
  void SetUp() override {
    KVSpec spec;
    spec.max_seq_len = 640;
    spec.groups = {{{0}, 1, 64, 64, 4, 1}, {{1}, 1, 64, 64, 4, 1, kWindow}};
    ManagerOptions options;
    options.max_requests = 16;  // what is released keeps its slot while kernels read it
    options.chunk_bytes = kChunk;
    options.memory_budget = 2000 * kChunk;
    manager_ = Manager::open(cuda_driver(), spec, options);
  }
  const StandinControl& standin() const { return *standin_; }

  void extend(VTensorId id, size_t num_tokens) {
    ASSERT_TRUE(manager_->try_extend({&id, 1}, {&num_tokens, 1}));
  }
  void forget(VTensorId id, size_t num_tokens) { manager_->forget({id}, {num_tokens}); }
  size_t given_back() const { return manager_->stats().chunks_given_back; }

  // What the queries of tokens [start, num_tokens) read, in both layers.
  std::vector<uint64_t> launch(VTensorId id, size_t start, size_t num_tokens) {
    std::vector<uint64_t> kernels;
    for (const size_t layer : {0U, 1U}) {
      const size_t first = layer == 0 ? 0 : start + 1 - std::min(start + 1, kWindow);
      for (const KV which : {KV::kKey, KV::kValue}) {
        const uintptr_t addr = manager_->view(id, layer, which).address + first * kTokenBytes;
        kernels.push_back(
            standin().begin_kernel(kStream, addr, (num_tokens - first) * kTokenBytes));
      }
    }
    return kernels;
  }
  void end(const std::vector<uint64_t>& kernels) {
    for (const uint64_t kernel : kernels) standin().end_kernel(kernel);
  }

  StandinScope standin_{On::kCuda};
  std::shared_ptr<Manager> manager_;
};

TEST_F(CudaWindowsTest, a_head_that_a_running_kernel_reads_stays_and_nobody_waits) {
  const VTensorId id = *manager_->try_create({}, "");
  extend(id, 200);
  manager_->begin_step();
  const auto kernels = launch(id, 99, 100);
  manager_->end_step(kStream);
  forget(id, 200);  // rows 0 to 9 are due, of which 3 to 6 are being read
  manager_->drain();
  EXPECT_EQ(given_back(), 0U);
  EXPECT_EQ(standin().running_kernels(), 4U);
  EXPECT_EQ(standin().calls("cuEventSynchronize"), 0U);
  end(kernels);
  forget(id, 200);
  manager_->drain();
  EXPECT_EQ(given_back(), 2 * 10U);
  manager_->check_integrity();
}

// That the test above can fail: without a step nobody knows of the kernel.
TEST_F(CudaWindowsTest, without_a_step_the_standin_catches_it) {
  const VTensorId id = *manager_->try_create({}, "");
  extend(id, 200);
  const auto kernels = launch(id, 99, 100);
  standin().set_quiet(1);
  forget(id, 200);
  manager_->drain();
  EXPECT_GT(standin().violations(), 0U);
  end(kernels);
  manager_.reset();
  standin().reset();
}

// Ends steps' kernels in the order of their launch, up to three steps late.
class LateDevice {
 public:
  explicit LateDevice(const StandinControl& standin) : standin_(standin) {}
  ~LateDevice() {
    thread_.request_stop();
    thread_.join();
  }
  LateDevice(const LateDevice&) = delete;
  LateDevice& operator=(const LateDevice&) = delete;

  // Waits where it is three steps behind.
  void add(std::vector<uint64_t> kernels) {
    while (standin_.running_kernels() > 3 * kernels.size()) std::this_thread::yield();
    const std::lock_guard lock(mutex_);
    steps_.push_back(std::move(kernels));
  }

 private:
  void run(const std::stop_token& stop) {
    std::mt19937 random(5);
    while (end_first() || !stop.stop_requested()) {
      std::this_thread::sleep_for(std::chrono::microseconds(random() % 100));
    }
  }
  bool end_first() {
    const std::lock_guard lock(mutex_);
    if (steps_.empty()) return false;
    for (const uint64_t kernel : steps_.front()) standin_.end_kernel(kernel);
    steps_.pop_front();
    return true;
  }

  const StandinControl& standin_;
  std::mutex mutex_;
  std::deque<std::vector<uint64_t>> steps_;
  std::jthread thread_{[this](const std::stop_token& stop) { run(stop); }};
};

// One vTensor grows and starts anew; the other goes on from a fork of it now and then.
TEST_F(CudaWindowsTest, windows_move_under_kernels_in_flight) {
  std::mt19937 random(7);
  std::vector<VTensorId> ids = {*manager_->try_create({}, ""), *manager_->try_create({}, "")};
  std::vector<size_t> lengths = {0, 0};
  {
    LateDevice device(standin());
    for (int step = 0; step < 400; ++step) {
      std::vector<size_t> starts = lengths;
      for (size_t i = 0; i < ids.size(); ++i) extend(ids[i], lengths[i] += 1 + random() % 4);
      manager_->begin_step();
      std::vector<uint64_t> kernels;
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto more = launch(ids[i], starts[i], lengths[i]);
        kernels.insert(kernels.end(), more.begin(), more.end());
      }
      manager_->end_step(kStream);
      device.add(std::move(kernels));
      manager_->forget(ids, lengths);
      if (random() % 4 == 0) manager_->drain();
      if (random() % 16 == 0) {
        manager_->release(ids[1]);
        ids[1] = *manager_->try_fork(ids[0]);
        lengths[1] = lengths[0];
      }
      if (std::ranges::max(lengths) > 600) {
        manager_->release(ids[0]);
        ids[0] = *manager_->try_create({}, "");
        lengths[0] = 0;
        manager_->release(ids[1]);
        ids[1] = *manager_->try_fork(ids[0]);
        lengths[1] = 0;
      }
      manager_->check_integrity();
    }
  }
  EXPECT_GT(given_back(), 100U);
}

}  // namespace
}  // namespace vtensor
