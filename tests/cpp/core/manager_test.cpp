// The manager under many threads, and what outlives what. Meant to run under TSan as well.
#include "vtensor/manager.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "tests/cpp/support/manager_fixture.h"

namespace vtensor {
namespace {

class ServingTest : public ManagerTest {
 protected:
  // What one client of the manager does: a few requests from beginning to end.
  static void serve(Manager& manager, uint32_t seed, int num_requests) {
    std::mt19937 random(seed);
    for (int i = 0; i < num_requests; ++i) {
      const Tokens prompt =
          tokens_from(static_cast<Token>(random() % 3) * 1000, 20 + random() % 40);
      const auto id = manager.try_create(prompt, "");
      if (!id) {
        std::this_thread::yield();
        continue;
      }
      size_t length = prompt.size();
      bool grown = extend(manager, *id, length);
      if (grown) manager.record_prefix(*id, prompt);
      while (grown && length < 100) {
        manager.pre_extend({*id}, {length + 24});
        length += random() % 16 + 1;
        grown = extend(manager, *id, length);
        if (grown && random() % 8 == 0) manager.truncate(*id, length - 1);
        if (random() % 6 == 0) {
          if (const auto child = manager.try_fork(*id)) {
            extend(manager, *child, manager.info(*child).num_tokens + 5);
            manager.release(*child);
          }
        }
        if (random() % 8 == 0) {
          try {
            manager.view(*id, 1, KV::kValue);
          } catch (const OutOfMemoryError&) {  // a row would have to be copied for it
          }
        }
      }
      manager.release(*id);
    }
  }
};

TEST_P(ServingTest, many_threads_serve_while_memory_is_short) {
  const auto manager = open(/*budget_chunks=*/160);
  std::atomic<bool> serving = true;
  std::jthread upkeep([&] {
    for (size_t round = 0; serving; ++round) {
      manager->check_integrity();
      manager->stats();
      manager->snapshot();
      if (round % 3 == 0) manager->evict(2 * kChunk);
      if (round % 5 == 0) manager->trim();
      try {
        manager->set_memory_budget((round % 2 == 0 ? 120 : 160) * kChunk);
      } catch (const OutOfMemoryError&) {
        // more is in use: the next round may succeed
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  });
  {
    std::vector<std::jthread> clients;
    for (uint32_t t = 0; t < 4; ++t) {
      clients.emplace_back([&manager, t] { serve(*manager, t, 25); });
    }
  }
  serving = false;
  upkeep.join();
  manager->drain();
  manager->reset_prefix_cache();
  manager->trim();
  manager->check_integrity();
  EXPECT_EQ(manager->stats().resident_bytes, 0U);
}

TEST_P(ServingTest, close_while_others_are_busy_ends_them_with_an_error) {
  for (uint32_t round = 0; round < 5; ++round) {
    const auto manager = open();
    std::vector<std::jthread> clients;
    for (uint32_t t = 0; t < 3; ++t) {
      clients.emplace_back(
          [&manager, t] { EXPECT_THROW(serve(*manager, t, 1 << 20), ReleasedError); });
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    std::jthread other([&] { manager->close(); });
    manager->close();
    clients.clear();
    other.join();
    EXPECT_EQ(manager->stats().resident_bytes, 0U);
  }
}

TEST_P(ServingTest, a_manager_may_go_away_with_work_still_posted) {
  for (int round = 0; round < 20; ++round) {
    const auto manager = open();
    for (int i = 0; i < 8; ++i) {
      const VTensorId id = *manager->try_create({}, "");
      manager->pre_extend({id}, {100});
    }
  }
}

TEST_P(ServingTest, pre_extended_rows_make_the_step_free_of_driver_calls) {
  const auto manager = open();
  const VTensorId id = *manager->try_create({}, "");
  EXPECT_TRUE(extend(*manager, id, 8));
  manager->pre_extend({id}, {40});
  manager->drain();
  const int64_t before = manager->stats().driver[CallKind::kMap].num_calls;
  EXPECT_TRUE(extend(*manager, id, 40));
  EXPECT_EQ(manager->stats().driver[CallKind::kMap].num_calls, before);
}

TEST_P(ServingTest, a_view_outlives_vtensor_and_manager) {
  auto manager = open();
  const VTensorId id = *manager->try_create({}, "");
  EXPECT_TRUE(extend(*manager, id, 8));
  std::optional<TensorView> view = manager->view(id, 0, KV::kKey);
  manager->release(id);
  EXPECT_EQ(manager->stats().held_bytes, 4 * kChunk);
  const std::weak_ptr<Manager> watched = manager;
  manager.reset();
  EXPECT_FALSE(watched.expired());
  view.reset();
  EXPECT_TRUE(watched.expired());
}

TEST_P(ServingTest, close_keeps_what_views_show_and_gives_it_back_when_they_end) {
  const auto manager = open();
  const VTensorId id = *manager->try_create({}, "");
  EXPECT_TRUE(extend(*manager, id, 8));
  std::optional<TensorView> view = manager->view(id, 0, KV::kKey);
  manager->close();
  EXPECT_EQ(manager->stats().resident_bytes, 4 * kChunk);
  view.reset();
  EXPECT_EQ(manager->stats().resident_bytes, 0U);
}

TEST_P(ServingTest, views_end_on_other_threads_while_slots_are_reused) {
  const auto manager = open();
  std::vector<std::jthread> threads;
  for (int round = 0; round < 40; ++round) {
    const auto id = manager->try_create({}, "");
    if (!id) {
      threads.clear();
      continue;
    }
    EXPECT_TRUE(extend(*manager, *id, 8));
    threads.emplace_back([view = manager->view(*id, 1, KV::kKey)]() mutable { view = {}; });
    manager->release(*id);
  }
  threads.clear();
  manager->check_integrity();
}

// The worker meets jobs that were posted before the manager fell asleep.
TEST_P(ServingTest, work_posted_before_sleep_maps_nothing_afterwards) {
  for (int round = 0; round < 30; ++round) {
    const auto manager = open();
    std::vector<VTensorId> ids;
    for (int i = 0; i < 10; ++i) ids.push_back(*manager->try_create({}, ""));
    manager->pre_extend(ids, std::vector<size_t>(ids.size(), 40));
    manager->sleep("");
    const int64_t before = manager->stats().driver[CallKind::kMap].num_calls;
    manager->drain();
    EXPECT_EQ(manager->stats().driver[CallKind::kMap].num_calls, before);
    EXPECT_EQ(manager->stats().resident_bytes, 0U);
    manager->check_integrity();
    manager->wake();
    for (const VTensorId id : ids) EXPECT_TRUE(extend(*manager, id, 40));
    manager->check_integrity();
  }
}

// Who waits for the worker when the manager falls asleep must not go on in a sleeping pool.
TEST_P(ServingTest, many_threads_put_it_to_sleep_and_wake_it) {
  const auto manager = open();
  std::vector<std::jthread> clients;
  for (uint32_t t = 0; t < 4; ++t) {
    clients.emplace_back([&manager, t] {
      for (uint32_t round = 0; round < 60; ++round) {
        try {
          if (round % 4 == t) {
            manager->sleep("");
            manager->check_integrity();
            manager->wake();
            continue;
          }
          const auto id = manager->try_create({}, "");
          if (!id) continue;
          manager->pre_extend({*id}, {60});
          extend(*manager, *id, 30);
          if (round % 3 == 0 && manager->try_swap_out(*id)) manager->try_swap_in(*id, {});
          manager->release(*id);
        } catch (const std::invalid_argument&) {
          manager->wake();  // somebody else put it to sleep
        }
      }
    });
  }
  clients.clear();
  manager->wake();
  manager->drain();
  for (const VTensorInfo& info : manager->snapshot().vtensors) {
    if (info.state == SlotState::kLive) manager->release(info.id);
  }
  manager->trim();
  manager->check_integrity();
  EXPECT_EQ(manager->stats().resident_bytes, 0U);
  EXPECT_EQ(manager->stats().swapped_bytes, 0U);
}

TEST_P(ServingTest, an_undersized_budget_is_refused_before_any_work) {
  EXPECT_THROW(open(/*budget_chunks=*/3), std::invalid_argument);
}

VTENSOR_ON_EVERY_DRIVER(ServingTest);

}  // namespace
}  // namespace vtensor
