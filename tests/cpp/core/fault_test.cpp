// A whole serving scenario with a driver that fails: for every k the k-th call, once or from then
// on, as an error of the driver or as want of memory.
//
// After each step all invariants hold, and each step either works, tells shortage by its value, or
// throws one of the core's own errors. When the driver works again, everything can be released and
// trim() gives every byte back, but for the chunks of broken slots: those where the driver failed
// and failed again while it was undone. Only persistent faults may leave such slots.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/manager.h"

namespace vtensor {
namespace {

// Sanitizers take ten times as long, and neighbours are mostly undone by the same lines: one for
// memory sees every second call, one for threads, of which there is one beside the caller's, every
// seventh. Without them it is each.
#if defined(__SANITIZE_ADDRESS__)
constexpr int kCallsApart = 2;
#elif defined(__SANITIZE_THREAD__)
constexpr int kCallsApart = 7;
#else
constexpr int kCallsApart = 1;
#endif

constexpr size_t kWindow = 6;
constexpr size_t kTwoGroups = 0;    // in the place of layers_per_plane: a layer without values
constexpr size_t kStateTokens = 8;  // of the recurrent state that stands beside two groups

struct FaultCase {
  std::string name;
  On driver;
  bool persistent;
  FaultPlan::Kind kind;
  CoreOptions core;
  size_t layers_per_plane;
};

void PrintTo(const FaultCase& fault, std::ostream* out) { *out << fault.name; }

// Serves a few requests, step by step. A step that fails is skipped over.
class Scenario {
 public:
  explicit Scenario(const FaultCase& fault) {
    auto driver = std::make_unique<FaultyDriver>(make_driver(fault.driver));
    faults_ = driver.get();
    KVSpec spec = UniformKV{.num_layers = 2,
                            .num_kv_heads = 1,
                            .head_dim = 200,  // 800 bytes: tokens straddle chunks
                            .element_bytes = 4,
                            .max_seq_len = 40,
                            .layers_per_plane = std::max<size_t>(fault.layers_per_plane, 1)};
    if (fault.layers_per_plane == kTwoGroups) {  // rows of 1 + 1 + 2 chunks
      spec.groups = {{{0}, 1, 200, 200, 4, 1}, {{1}, 1, 400, 0, 4, 1, kWindow}};
      has_state_ = true;
    }
    ManagerOptions options;
    options.max_requests = 7;
    options.memory_budget = 56 * kChunk;
    options.chunk_bytes = kChunk;
    options.swap_space_bytes = 64 * kChunk;
    options.scrub = fault.core.scrub;
    options.park = fault.core.park;
    options.alias = fault.core.alias;
    if (fault.core.prefix_cache_chunks != SIZE_MAX) {
      options.prefix_cache_bytes = fault.core.prefix_cache_chunks * kChunk;
    }
    manager_ = Manager::open(std::move(driver), spec, options);
  }

  FaultyDriver& faults() { return *faults_; }
  Manager& manager() const { return *manager_; }

  void run() {
    const Tokens prompt = tokens_from(0, 18);
    Id state = first_state();
    const auto first = create(prompt, "");
    extend(first, 18);
    record(first, prompt);
    record(state, kSnapshot);
    state = replaced(state);  // the snapshot shows the one before
    const auto second = create(joined(prompt, tokens_from(90, 4)), "");  // match
    extend(second, 22);                                                  // copy-on-write
    std::optional<TensorView> shown;  // rows that others share are guarded from here on
    if (is_live(second)) step([&] { shown = manager_->view(*second, 0, KV::kKey); });
    const auto child = fork(second);
    extend(child, 23);
    step([&] {
      const std::vector<VTensorId> ids = live({first, second});
      manager_->pre_extend(ids, std::vector<size_t>(ids.size(), 30));
      manager_->drain();
    });
    extend(second, 30);
    step([&] {  // where a layer has a window: rows are given back, now and when memory is short
      const std::vector<VTensorId> ids = live({second, child});
      manager_->forget(ids, std::vector<size_t>(ids.size(), 20));
      manager_->drain();
      manager_->forget(ids, std::vector<size_t>(ids.size(), 30));
    });
    truncate(first, 3);
    extend(first, 12);
    record(second, joined(prompt, tokens_from(90, 4)));
    release(second);
    step([&] { shown.reset(); });
    const auto adopted = create(joined(prompt, tokens_from(90, 8)), "");
    extend(adopted, 26);
    step([&] { manager_->pin_prefix(prompt, "pin", 0, ""); });
    release(first);
    const auto stranger = create(tokens_from(500, 30), "tenant");
    extend(stranger, 30);
    record(stranger, tokens_from(500, 30));
    release(stranger);
    step([&] { manager_->evict(4 * kChunk); });
    step([&] { manager_->set_memory_budget(44 * kChunk); });
    const auto big = create(tokens_from(700, 40), "");
    if (is_live(child)) step([&] { manager_->try_swap_out(*child); });
    extend(big, 40);
    if (is_live(child) && manager_->stats().swapped_bytes > 0) {
      step([&] { manager_->try_swap_in(*child, prompt); });
    }
    step([&] { manager_->unpin_prefix("pin"); });
    step([&] { manager_->trim(); });
    release(child);
    release(adopted);
    release(state);
    step([&] { manager_->set_memory_budget(56 * kChunk); });
    release(big);
    if (has_state_) state = create(kSnapshot, "");
    release(replaced(state));
    step([&] { manager_->trim(); });
  }

  size_t num_broken_chunks() const {
    std::set<ChunkId> broken;
    for (const VTensorInfo& slot : manager_->snapshot().vtensors) {
      if (slot.state == SlotState::kBroken) broken.insert(slot.table.begin(), slot.table.end());
    }
    return broken.size();
  }

 private:
  using Id = std::optional<VTensorId>;

  // A state is a vTensor of fixed length; a step that must not write it in place makes another.
  Id first_state() {
    if (!has_state_) return std::nullopt;
    const Id state = create({}, "");
    extend(state, kStateTokens);
    return state;
  }
  Id replaced(const Id& state) {
    const Id next = first_state();
    release(state);
    return next;
  }

  void step(const std::function<void()>& operation) {
    try {
      operation();
    } catch (const Error&) {
      // typed, as it should be; anything else fails the test
    }
    manager_->check_integrity();
  }

  bool is_live(const Id& id) const {
    if (!id) return false;
    for (const VTensorInfo& info : manager_->snapshot().vtensors) {
      if (info.id == *id && info.state == SlotState::kLive) return true;
    }
    return false;
  }
  std::vector<VTensorId> live(const std::vector<Id>& ids) const {
    std::vector<VTensorId> found;
    for (const Id& id : ids) {
      if (is_live(id)) found.push_back(*id);
    }
    return found;
  }
  Id create(const Tokens& tokens, const std::string& salt) {
    Id id;
    step([&] { id = manager_->try_create(tokens, salt); });
    return id;
  }
  Id fork(const Id& parent) {
    Id id;
    if (is_live(parent)) step([&] { id = manager_->try_fork(*parent); });
    return id;
  }
  void extend(const Id& id, size_t num_tokens) {
    if (!is_live(id)) return;
    const size_t before = manager_->info(*id).num_tokens;
    bool extended = false;
    step([&] { extended = manager_->try_extend({&*id, 1}, {&num_tokens, 1}); });
    if (!is_live(id)) return;  // its slot is broken
    const size_t after = manager_->info(*id).num_tokens;
    EXPECT_EQ(after, extended ? std::max(before, num_tokens) : before);
  }
  void truncate(const Id& id, size_t num_tokens) {
    if (!is_live(id)) return;
    step([&] { manager_->truncate(*id, std::min(num_tokens, manager_->info(*id).num_tokens)); });
  }
  void record(const Id& id, const Tokens& tokens) {
    if (!is_live(id)) return;
    const size_t known = std::min(tokens.size(), manager_->info(*id).num_tokens);
    step([&] { manager_->record_prefix(*id, std::span(tokens).first(known)); });
  }
  void release(const Id& id) {
    if (is_live(id)) step([&] { manager_->release(*id); });
  }

  static inline const Tokens kSnapshot = tokens_from(-100, kStateTokens);

  FaultyDriver* faults_ = nullptr;
  bool has_state_ = false;
  std::shared_ptr<Manager> manager_;
};

// The driver works again: everything can be released, and all memory goes back but that of broken
// slots. Returns the number of their chunks.
size_t expect_nothing_lost(const Scenario& scenario) {
  Manager& manager = scenario.manager();
  manager.unpin_prefix("pin");
  manager.reset_prefix_cache();
  for (const VTensorInfo& info : manager.snapshot().vtensors) {
    if (info.state == SlotState::kLive) manager.release(info.id);
  }
  manager.trim();
  manager.check_integrity();
  const size_t broken = scenario.num_broken_chunks();
  EXPECT_EQ(manager.stats().resident_bytes, broken * kChunk);
  return broken;
}

class FaultTest : public testing::TestWithParam<FaultCase> {
  StandinScope standin_{GetParam().driver};
};

TEST_P(FaultTest, nothing_is_lost_whichever_call_fails) {
  int64_t num_calls = 0;
  {
    Scenario good(GetParam());
    const int64_t before = good.faults().num_calls();
    good.run();
    num_calls = good.faults().num_calls() - before;
  }
  ASSERT_GT(num_calls, 50);
  for (int64_t k = 1; k <= num_calls; k += kCallsApart) {
    SCOPED_TRACE("call " + std::to_string(k));
    Scenario scenario(GetParam());
    scenario.faults().set_plan(
        {.fail_at = k, .kind = GetParam().kind, .persistent = GetParam().persistent});
    scenario.run();
    scenario.faults().set_plan({});
    const size_t broken = expect_nothing_lost(scenario);
    if (!GetParam().persistent) {
      EXPECT_EQ(broken, 0U) << "one failure alone can be undone";
    }
    if (HasFailure()) return;
  }
}

std::vector<FaultCase> fault_cases() {
  std::vector<FaultCase> cases;
  for (const On driver : {On::kSim, On::kHost, On::kCuda}) {
    for (const bool persistent : {false, true}) {
      for (const auto kind : {FaultPlan::Kind::kDriverError, FaultPlan::Kind::kOutOfMemory}) {
        const std::string name =
            name_of(driver) + (persistent ? "FromThenOn" : "Once") +
            (kind == FaultPlan::Kind::kDriverError ? "DriverError" : "OutOfMemory");
        const CoreOptions defaults;
        CoreOptions unparked;
        unparked.park = false;
        CoreOptions unaliased;
        unaliased.alias = false;
        CoreOptions recycling;
        recycling.prefix_cache_chunks = 4;
        if (driver != On::kSim) {
          cases.push_back({name, driver, persistent, kind, defaults, 1});
          if (!persistent && kind == FaultPlan::Kind::kDriverError) {
            cases.push_back({name + "TwoGroups", driver, persistent, kind, defaults, kTwoGroups});
          }
          continue;
        }
        cases.push_back({name + "Unparked", driver, persistent, kind, unparked, 2});
        cases.push_back({name + "Unaliased", driver, persistent, kind, unaliased, 1});
        cases.push_back({name + "Recycling", driver, persistent, kind, recycling, 1});
        cases.push_back({name + "TwoGroups", driver, persistent, kind, defaults, kTwoGroups});
      }
    }
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(Everywhere, FaultTest, testing::ValuesIn(fault_cases()),
                         [](const auto& info) { return info.param.name; });

// Below the driver: one call of libcuda fails, and CudaDriver undoes its part of the work.
class CudaCallFaultTest : public testing::TestWithParam<const char*> {
 protected:
  static inline const FaultCase kDefaults{
      "Cuda", On::kCuda, false, FaultPlan::Kind::kDriverError, CoreOptions{}, 1};

  StandinScope standin_{On::kCuda};
};

TEST_P(CudaCallFaultTest, nothing_is_lost_whichever_call_of_libcuda_fails) {
  uint64_t num_calls = 0;
  {
    Scenario good(kDefaults);
    const uint64_t before = (*standin_).calls(GetParam());
    good.run();
    num_calls = (*standin_).calls(GetParam()) - before;
  }
  ASSERT_GT(num_calls, 2U);
  for (uint64_t k = 1; k <= num_calls; k += kCallsApart) {
    SCOPED_TRACE("call " + std::to_string(k));
    Scenario scenario(kDefaults);
    (*standin_).fail(GetParam(), static_cast<int>(k), cuda::CUDA_ERROR_UNKNOWN);
    scenario.run();
    EXPECT_EQ(expect_nothing_lost(scenario), 0U) << "one failure alone can be undone";
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Libcuda, CudaCallFaultTest,
                         testing::Values("cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap",
                                         "cuMemRelease", "cuMemcpyDtoDAsync", "cuMemsetD8Async",
                                         "cuStreamSynchronize"),
                         [](const auto& info) { return std::string(info.param); });

}  // namespace
}  // namespace vtensor
