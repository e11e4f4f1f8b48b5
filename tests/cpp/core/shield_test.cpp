// What a tensor view shows while its vTensor's rows are remapped, and where what is written through
// it goes: never into a chunk that others share.
#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "tests/cpp/support/drivers.h"
#include "vtensor/driver/wrappers/tracing_driver.h"
#include "vtensor/manager.h"

namespace vtensor {
namespace {

constexpr size_t kTokens = 10;  // two whole rows and a half
const Tokens kPrompt = tokens_from(0, kTokens);

// One plane, four tokens of a KiB a chunk. `watch` runs after each driver call.
class ShieldTest : public DriverTest {
 protected:
  void open(size_t budget_chunks = 64, bool dedup = true,
            UnmappedPolicy unmapped = UnmappedPolicy::kGuard) {
    auto driver = GetParam() == On::kHost ? host_driver(unmapped) : make_driver(GetParam());
    auto faulty = std::make_unique<FaultyDriver>(std::move(driver));
    faults_ = faulty.get();
    auto watched = std::make_unique<TracingDriver>(std::move(faulty), [this](const DriverCall&) {
      if (watch_) watch_();
    });
    ManagerOptions options;
    options.max_requests = 4;
    options.memory_budget = budget_chunks * kChunk;
    options.chunk_bytes = kChunk;
    options.dedup = dedup;
    const KVSpec spec = UniformKV{.num_layers = 2,
                                  .num_kv_heads = 1,
                                  .head_dim = 64,
                                  .element_bytes = 4,
                                  .max_seq_len = 64,
                                  .layers_per_plane = 2};
    manager_ = Manager::open(std::move(watched), spec, options);
  }

  static volatile char& at(const TensorView& view, size_t token) {
    return *reinterpret_cast<volatile char*>(view.address + token * kKiB);
  }
  TensorView view(VTensorId id) { return manager_->view(id, 0, KV::kKey); }
  void extend(VTensorId id, size_t num_tokens) { manager_->extend({&id, 1}, {&num_tokens, 1}); }
  VTensorId make(const Tokens& tokens, char mark) {
    const VTensorId id = manager_->try_create(tokens, "").value();
    extend(id, tokens.size());
    write(view(id), mark, manager_->info(id).num_cached_tokens);
    return id;
  }
  static void write(const TensorView& view, char mark, size_t first_token = 0) {
    for (size_t t = first_token; t < view.shape[0]; ++t) at(view, t) = mark;
  }
  static void expect_shows(const TensorView& view, char mark, size_t end = kTokens) {
    for (size_t t = 0; t < end; ++t) ASSERT_EQ(at(view, t), mark) << "token " << t;
  }
  // What a newcomer finds recorded.
  void expect_recorded(char mark, size_t num_tokens = kTokens) {
    const VTensorId id = manager_->try_create(kPrompt, "").value();
    EXPECT_EQ(manager_->info(id).num_tokens, num_tokens);
    expect_shows(view(id), mark, num_tokens);
    manager_->release(id);
  }
  void TearDown() override {
    manager_->check_integrity();
    manager_.reset();
  }

  FaultyDriver* faults_ = nullptr;
  std::function<void()> watch_;
  std::shared_ptr<Manager> manager_;
};

// Only the host remaps in place, and can map copy-on-write.
class HostShieldTest : public ShieldTest {};
VTENSOR_ON_DRIVERS(HostShieldTest, On::kHost);
VTENSOR_ON_EVERY_MEMORY(ShieldTest);

TEST_P(HostShieldTest, a_view_shows_its_tokens_after_every_driver_call_of_a_copy_on_write) {
  for (const auto unmapped : {UnmappedPolicy::kGuard, UnmappedPolicy::kZero}) {
    open(64, true, unmapped);
    const VTensorId parent = make(kPrompt, 7);
    const VTensorId child = manager_->try_fork(parent).value();
    const TensorView shown = view(child);
    size_t num_calls = 0;
    watch_ = [&] {
      ++num_calls;
      for (size_t t = 0; t < kTokens; ++t) {
        ASSERT_TRUE(is_readable(shown.address + t * kKiB)) << "after call " << num_calls;
        ASSERT_EQ(at(shown, t), 7) << "after call " << num_calls;
      }
    };
    extend(child, kTokens + 1);
    watch_ = nullptr;
    EXPECT_GE(num_calls, 3U);
    EXPECT_EQ(manager_->info(child).chunks_copied, 1U);
    write(view(child), 8, kTokens);
    expect_shows(view(parent), 7);
  }
}

TEST_P(HostShieldTest, a_view_shows_its_tokens_when_a_copy_on_write_is_undone) {
  open();
  const VTensorId parent = make(kPrompt, 7);
  const VTensorId child = manager_->try_fork(parent).value();
  const TensorView shown = view(child);
  watch_ = [&] { ASSERT_TRUE(is_readable(shown.address + 9 * kKiB)); };
  faults_->set_plan({.fail_at = 1, .only = CallKind::kMap});
  const size_t longer = 30;  // the row is copied, then mapping the new rows fails
  EXPECT_THROW(manager_->try_extend({&child, 1}, {&longer, 1}), DriverError);
  watch_ = nullptr;
  expect_shows(shown, 7);
  at(shown, 9) = 1;
  expect_shows(view(parent), 7);
}

TEST_P(ShieldTest, rows_under_a_living_view_are_not_deduplicated) {
  open();
  const VTensorId first = make(kPrompt, 7);
  manager_->record_prefix(first, kPrompt);
  const VTensorId second = manager_->try_create({}, "").value();
  extend(second, kTokens);
  {
    const TensorView shown = view(second);
    write(shown, 8);
    manager_->record_prefix(second, kPrompt);
    expect_shows(shown, 8);
    write(shown, 9);
    EXPECT_EQ(manager_->stats().chunks_deduplicated, 0U);
  }
  expect_recorded(7);
  manager_->record_prefix(second, kPrompt);
  EXPECT_EQ(manager_->stats().chunks_deduplicated, 2U);
  expect_shows(view(second), 7, 8);
  extend(second, kTokens + 1);  // into the row that was guarded
  write(view(second), 6, kTokens);
  manager_->record_prefix(second, tokens_from(0, kTokens + 1));
  const VTensorId reader = manager_->try_create(tokens_from(0, kTokens + 1), "").value();
  EXPECT_EQ(at(view(reader), kTokens), 6);
}

TEST_P(HostShieldTest, a_view_taken_before_recording_does_not_write_to_what_is_recorded) {
  open();
  const VTensorId id = make(kPrompt, 7);
  const TensorView shown = view(id);
  manager_->record_prefix(id, kPrompt);
  write(shown, 9);
  expect_shows(shown, 9);  // its own, until it is released
  expect_recorded(7);
}

TEST_P(HostShieldTest, a_view_taken_before_a_fork_does_not_write_to_what_the_child_sees) {
  open();
  const VTensorId id = make(kPrompt, 7);
  const TensorView shown = view(id);
  const VTensorId child = manager_->try_fork(id).value();
  write(shown, 9);
  expect_shows(view(child), 7);
}

TEST_P(HostShieldTest, a_view_of_a_recorded_prefix_does_not_write_to_it) {
  open();
  const VTensorId id = make(kPrompt, 7);
  manager_->record_prefix(id, kPrompt);
  write(view(id), 8);
  manager_->release(id);
  const VTensorId reader = manager_->try_create(kPrompt, "").value();
  write(view(reader), 9);
  expect_recorded(7);
}

// The row that holds recorded tokens and later ones is the vTensor's alone.
TEST_P(HostShieldTest, a_view_does_not_write_to_recorded_tokens_in_a_row_that_went_on) {
  open();
  const VTensorId id = make(kPrompt, 7);
  manager_->record_prefix(id, kPrompt);
  extend(id, kTokens + 1);
  const TensorView shown = view(id);
  expect_shows(shown, 7);
  write(shown, 9, 8);  // tokens 8 and 9 are recorded
  expect_recorded(7);
  EXPECT_EQ(manager_->info(id).chunks_copied, 1U);
  extend(id, 20);
  EXPECT_EQ(at(view(id), 10), 9);
  EXPECT_EQ(manager_->info(id).chunks_copied, 1U) << "it is its own from then on";
}

TEST_P(HostShieldTest,
       a_view_that_lives_while_its_vtensor_grows_does_not_write_to_what_is_recorded) {
  open();
  const VTensorId id = make(kPrompt, 7);
  const TensorView shown = view(id);
  manager_->record_prefix(id, kPrompt);
  extend(id, kTokens + 1);
  write(shown, 9, 8);
  expect_recorded(7);
  EXPECT_EQ(at(view(id), 9), 9);
}

TEST_P(HostShieldTest, whole_rows_are_recorded_where_a_view_lives_and_the_vtensor_is_longer) {
  open();
  const VTensorId id = make(tokens_from(0, 11), 7);
  const TensorView shown = view(id);
  EXPECT_EQ(manager_->record_prefix(id, kPrompt), 8U);
  write(shown, 9, 8);
  extend(id, 12);
  EXPECT_EQ(manager_->info(id).chunks_copied, 0U);
  expect_recorded(7, 8);
}

TEST_P(HostShieldTest, a_view_that_came_and_went_costs_no_copy) {
  open();
  const VTensorId id = make(kPrompt, 7);
  manager_->record_prefix(id, kPrompt);
  expect_shows(view(id), 7);
  extend(id, kTokens + 1);
  write(view(id), 8, kTokens);  // copied now: there are tokens of its own beside recorded ones
  EXPECT_EQ(manager_->info(id).chunks_copied, 1U);
  const VTensorId other = make(tokens_from(50, 6), 5);
  manager_->record_prefix(other, tokens_from(50, 6));
  expect_shows(view(other), 5, 6);
  extend(other, 7);
  EXPECT_EQ(manager_->info(other).chunks_copied, 0U);
  const size_t seven = 7;
  EXPECT_EQ(manager_->record_prefix(other, tokens_from(50, seven)), 1U);
}

TEST_P(HostShieldTest, a_view_that_needs_a_row_which_is_not_to_be_had_is_refused) {
  open(/*budget_chunks=*/3);
  const VTensorId id = make(kPrompt, 7);
  manager_->record_prefix(id, kPrompt);
  extend(id, kTokens + 1);
  EXPECT_THROW(view(id), OutOfMemoryError);
  extend(id, kTokens + 2);  // nothing has changed: the row is still its own
  EXPECT_EQ(manager_->info(id).chunks_copied, 0U);
  manager_->reset_prefix_cache();
  expect_shows(view(id), 7);
}

TEST_P(HostShieldTest, what_was_written_to_a_guarded_row_is_gone_when_the_slot_is_adopted) {
  open();
  const VTensorId id = make(tokens_from(0, 8), 7);
  manager_->record_prefix(id, tokens_from(0, 8));
  write(view(id), 9);
  manager_->release(id);
  const size_t adopted = manager_->stats().chunks_adopted;
  const VTensorId next = manager_->try_create(tokens_from(0, 8), "").value();
  expect_shows(view(next), 7, 8);
  EXPECT_EQ(manager_->stats().chunks_adopted, adopted + 2);
}

TEST_P(HostShieldTest, a_slot_whose_guard_cannot_be_taken_away_is_not_adopted_row_by_row) {
  open();
  const VTensorId id = make(tokens_from(0, 8), 7);
  manager_->record_prefix(id, tokens_from(0, 8));
  write(view(id), 9);
  faults_->set_plan({.fail_at = 1, .only = CallKind::kSetAccess});
  manager_->release(id);
  const VTensorId next = manager_->try_create(tokens_from(0, 8), "").value();
  expect_shows(view(next), 7, 8);
}

// Whichever driver call fails, the view is refused or given, and nothing reaches what is recorded.
TEST_P(HostShieldTest, a_driver_that_fails_once_costs_nothing_but_the_view) {
  for (int64_t k = 1; k <= 8; ++k) {
    SCOPED_TRACE("call " + std::to_string(k));
    open();
    const VTensorId id = make(kPrompt, 7);
    manager_->record_prefix(id, kPrompt);
    extend(id, kTokens + 1);
    faults_->set_plan({.fail_at = k});
    try {
      write(view(id), 9);
      const TensorView shown = view(id);
      manager_->record_prefix(id, tokens_from(0, kTokens + 1));
      write(shown, 9);
    } catch (const Error&) {  // typed, as it should be
    }
    faults_->set_plan({});
    manager_->check_integrity();
    expect_recorded(7);
    EXPECT_EQ(manager_->snapshot().vtensors.at(0).state, SlotState::kLive);
  }
}

}  // namespace
}  // namespace vtensor
