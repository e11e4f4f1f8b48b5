#include "vtensor/core/trace.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/driver/sim/sim_driver.h"
#include "vtensor/manager.h"
#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

namespace fs = std::filesystem;

// A file name of this test's own, removed afterwards.
class TraceFile {
 protected:
  ~TraceFile() { fs::remove(path_); }

  std::vector<std::string> lines() const {
    std::ifstream file(path_);
    std::vector<std::string> found;
    for (std::string line; std::getline(file, line);) found.push_back(line);
    return found;
  }
  // Lines that hold all of these pieces.
  size_t count(const std::vector<std::string>& pieces) const {
    size_t found = 0;
    for (const std::string& line : lines()) {
      bool all = true;
      for (const std::string& piece : pieces) all = all && line.find(piece) != std::string::npos;
      found += all ? 1 : 0;
    }
    return found;
  }
  static std::shared_ptr<Manager> open(std::unique_ptr<Driver> driver, size_t budget_chunks = 16) {
    ManagerOptions options;
    options.max_requests = 4;
    options.chunk_bytes = kChunk;
    options.memory_budget = budget_chunks * kChunk;
    const KVSpec spec = UniformKV{2, 2, 32, 4, 64, 2};  // 1 KiB a token, one plane
    return Manager::open(std::move(driver), spec, options);
  }

  std::string path_ =
      (fs::temp_directory_path() /
       ("vtensor_trace_" + std::to_string(getpid()) + "_" +
        std::to_string(testing::UnitTest::GetInstance()->current_test_info()->line())))
          .string();
};

// The writer alone, and simulated time.
class TraceTest : public testing::Test, protected TraceFile {};

// A manager that is traced.
class ManagerTraceTest : public DriverTest, protected TraceFile {
 protected:
  static std::shared_ptr<Manager> open(size_t budget_chunks = 16) {
    return TraceFile::open(param_driver(), budget_chunks);
  }
};

bool extend(Manager& manager, VTensorId id, size_t num_tokens) {
  return manager.try_extend({&id, 1}, {&num_tokens, 1});
}

TEST(JsonLine, strings_are_escaped_and_stay_on_one_line) {
  JsonLine line;
  line.put("a\tb", std::string("x\"y\\z\n"));
  EXPECT_EQ(line.text(), "{\"a\tb\":\"x\\\"y\\\\z\\u000a\"}");
}

TEST(JsonLine, numbers_flags_and_lists_are_plain) {
  const std::vector<int> values = {1, -2};
  JsonLine line;
  line.put("n", 7).put("us", 1.5).put("ok", true).put("ids", std::span<const int>(values));
  line.put("none", std::span<const int>());
  EXPECT_EQ(line.text(), R"({"n":7,"us":1.500,"ok":true,"ids":[1,-2],"none":[]})");
  EXPECT_EQ(JsonLine().text(), "{}");
}

TEST_F(TraceTest, a_complete_file_has_header_and_end_and_counts_its_lines) {
  TraceWriter writer;
  writer.open(path_, JsonLine().put("driver", "sim"));
  writer.write(JsonLine().put("k", "op"));
  writer.close();
  ASSERT_EQ(lines().size(), 3u);
  EXPECT_EQ(lines()[0], R"({"format":"flexinfer-trace","version":1,"manager":{"driver":"sim"}})");
  EXPECT_NE(lines()[2].find(R"("k":"end","lines":1)"), std::string::npos);
}

TEST_P(ManagerTraceTest, nothing_is_written_while_no_file_is_open) {
  const auto manager = open();
  extend(*manager, *manager->try_create({}, ""), 8);
  manager->label(1, "a");
  EXPECT_FALSE(manager->is_tracing());
  EXPECT_FALSE(fs::exists(path_));
  EXPECT_NO_THROW(manager->stop_trace());
}

TEST_F(TraceTest, equal_tokens_are_written_once) {
  const std::vector<Token> one = {1, 2, 3};
  const std::vector<Token> two = {1, 2};
  TraceWriter writer;
  writer.open(path_, JsonLine());
  EXPECT_EQ(writer.number_of(one), 0u);
  EXPECT_EQ(writer.number_of(two), 1u);
  EXPECT_EQ(writer.number_of(one), 0u);
  writer.close();
  EXPECT_EQ(count({R"("k":"tokens")"}), 2u);
}

TEST_P(ManagerTraceTest, an_operation_tells_its_arguments_result_and_changes) {
  const auto manager = open();
  manager->start_trace(path_);
  const std::vector<Token> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  const VTensorId first = *manager->try_create(tokens, "salt");
  extend(*manager, first, 8);
  manager->record_prefix(first, tokens);
  const VTensorId second = *manager->try_create(tokens, "salt");
  manager->stop_trace();
  EXPECT_EQ(count({R"("op":"create")", R"("salt":"salt")", R"("aliased":2)", R"("hit":8)",
                   R"("result":)" + std::to_string(second)}),
            1u);
  EXPECT_EQ(count({R"("op":"extend")", R"("n":[8])", R"("result":true)", R"("created":2)"}), 1u);
}

TEST_P(ManagerTraceTest, driver_calls_name_the_vtensor_they_are_made_for) {
  const auto manager = open();
  manager->start_trace(path_);
  const VTensorId id = *manager->try_create({}, "");
  extend(*manager, id, 4);
  manager->stop_trace();
  const std::string owner = R"("v":)" + std::to_string(id);
  EXPECT_EQ(count({R"("call":"create")", owner}), 1u);
  EXPECT_EQ(count({R"("call":"map")", owner, R"("bytes":4096)"}), 1u);
}

TEST_P(ManagerTraceTest, what_the_worker_does_is_marked) {
  const auto manager = open();
  const VTensorId id = *manager->try_create({}, "");
  manager->start_trace(path_);
  manager->pre_extend({id}, {4});
  manager->drain();
  manager->stop_trace();
  EXPECT_EQ(count({R"("op":"pre_extend")", R"("worker":true)"}), 0u);
  EXPECT_EQ(count({R"("op":"map_ahead")", R"("worker":true)"}), 1u);
  EXPECT_EQ(count({R"("call":"map")", R"("worker":true)"}), 1u);
}

TEST_P(ManagerTraceTest, an_operation_that_throws_is_marked_as_failed) {
  const auto manager = open();
  const VTensorId id = *manager->try_create({}, "");
  manager->start_trace(path_);
  EXPECT_THROW(manager->truncate(id, 9), std::invalid_argument);
  manager->stop_trace();
  EXPECT_EQ(count({R"("op":"truncate")", R"("failed":true)"}), 1u);
}

TEST_P(ManagerTraceTest, shortage_is_a_result) {
  const auto manager = open(/*budget_chunks=*/1);
  const VTensorId id = *manager->try_create({}, "");
  manager->start_trace(path_);
  EXPECT_FALSE(extend(*manager, id, 8));
  manager->stop_trace();
  EXPECT_EQ(count({R"("op":"extend")", R"("result":false)"}), 1u);
}

TEST_P(ManagerTraceTest, closing_the_manager_ends_the_file) {
  const auto manager = open();
  manager->start_trace(path_);
  manager->close();
  EXPECT_EQ(count({R"("k":"end")"}), 1u);
}

TEST_P(ManagerTraceTest, vtensors_from_before_stand_in_the_header) {
  const auto manager = open();
  const VTensorId id = *manager->try_create({}, "");
  extend(*manager, id, 5);
  manager->start_trace(path_);
  EXPECT_NE(lines()[0].find("\"live\":[[" + std::to_string(id) + ",5,false]]"), std::string::npos);
}

TEST_P(ManagerTraceTest, a_second_trace_must_wait_for_the_end_of_the_first) {
  const auto manager = open();
  manager->start_trace(path_);
  EXPECT_THROW(manager->start_trace(path_), std::invalid_argument);
  manager->stop_trace();
  EXPECT_NO_THROW(manager->start_trace(path_));
}

TEST_P(ManagerTraceTest, a_file_that_cannot_be_made_is_an_error_at_once) {
  EXPECT_THROW(open()->start_trace("/no/such/folder/trace"), DriverError);
}

TEST_P(ManagerTraceTest, a_full_disk_is_told_at_the_end_and_disturbs_nothing_before) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const auto manager = open();
  manager->start_trace("/dev/full");
  EXPECT_TRUE(extend(*manager, *manager->try_create({}, ""), 8));
  EXPECT_THROW(manager->stop_trace(), DriverError);
  EXPECT_FALSE(manager->is_tracing());
}

TEST_P(ManagerTraceTest, tracing_may_start_and_stop_while_others_work) {
  const auto manager = open(/*budget_chunks=*/64);
  std::atomic<bool> stop{false};
  std::thread worker([&] {
    while (!stop) {
      const VTensorId id = *manager->try_create({}, "");
      manager->pre_extend({id}, {8});
      extend(*manager, id, 12);
      manager->release(id);
    }
  });
  for (int i = 0; i < 20; ++i) {
    manager->start_trace(path_);
    std::this_thread::yield();
    manager->stop_trace();
    EXPECT_EQ(lines().size() - 2, static_cast<size_t>(std::stoul(lines().back().substr(19))));
  }
  stop = true;
  worker.join();
  manager->drain();
  manager->check_integrity();
}

TEST_F(TraceTest, simulated_time_counts_though_nobody_waits) {
  SimLatency latency;
  latency[CallKind::kCreate] = {.per_call_us = 1'000'000};
  const auto manager = open(std::make_unique<SimDriver>(SimOptions{.latency = latency}));
  extend(*manager, *manager->try_create({}, ""), 4);
  EXPECT_GE(manager->stats().driver[CallKind::kCreate].total_ns, 1'000'000'000);
  EXPECT_GE(manager->stats().map_us_exposed, 1e6);
  EXPECT_EQ(manager->stats().driver[CallKind::kCreate].hidden_ns, 0);
}

TEST_F(TraceTest, time_of_the_worker_counts_as_hidden) {
  SimLatency latency;
  latency[CallKind::kCreate] = {.per_call_us = 1'000'000};
  const auto manager = open(std::make_unique<SimDriver>(SimOptions{.latency = latency}));
  manager->pre_extend({*manager->try_create({}, "")}, {4});
  manager->drain();
  EXPECT_GE(manager->stats().driver[CallKind::kCreate].hidden_ns, 1'000'000'000);
  EXPECT_GE(manager->stats().map_us_hidden, 1e6);
}

VTENSOR_ON_EVERY_DRIVER(ManagerTraceTest);

}  // namespace
}  // namespace vtensor
