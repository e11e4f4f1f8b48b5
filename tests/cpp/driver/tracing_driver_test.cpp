#include "vtensor/driver/wrappers/tracing_driver.h"

#include <gtest/gtest.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "tests/cpp/support/drivers.h"

namespace vtensor {
namespace {

constexpr size_t kChunk = 64 * kKiB;

struct Trace {
  std::vector<DriverCall> calls;
  TracingDriver driver{make_sim(), [this](const DriverCall& call) { calls.push_back(call); }};
};

TEST(TracingDriver, every_call_appears_once_in_order) {
  Trace trace;
  const uintptr_t range = trace.driver.reserve(kChunk, kChunk);
  const Handle chunk = trace.driver.create(kChunk);
  trace.driver.map(range, {&chunk, 1}, kChunk);
  trace.driver.set_access(range, kChunk, Access::kRead);
  trace.driver.fill(chunk, 0, 1, std::byte{0});
  trace.driver.copy(chunk, 0, chunk, 1, 1);
  std::byte byte{};
  trace.driver.read(chunk, 0, {&byte, 1});
  trace.driver.write(chunk, 0, {&byte, 1});
  trace.driver.unmap(range, kChunk, kChunk);
  trace.driver.release(chunk, kChunk);
  trace.driver.free(range, kChunk);
  std::vector<CallKind> kinds;
  for (const DriverCall& call : trace.calls) kinds.push_back(call.kind);
  EXPECT_EQ(kinds,
            (std::vector{CallKind::kReserve, CallKind::kCreate, CallKind::kMap,
                         CallKind::kSetAccess, CallKind::kFill, CallKind::kCopy, CallKind::kRead,
                         CallKind::kWrite, CallKind::kUnmap, CallKind::kRelease, CallKind::kFree}));
}

TEST(TracingDriver, results_of_reserve_and_create_are_recorded) {
  Trace trace;
  trace.driver.create(kChunk);
  const Handle chunk = trace.driver.create(kChunk);
  const uintptr_t range = trace.driver.reserve(kChunk, kChunk);
  EXPECT_EQ(trace.calls[1].handle, chunk);
  EXPECT_EQ(trace.calls[2].addr, range);
}

TEST(TracingDriver, arguments_are_recorded) {
  Trace trace;
  const uintptr_t range = trace.driver.reserve(4 * kChunk, kChunk);
  const std::vector<Handle> chunks = {trace.driver.create(kChunk), trace.driver.create(kChunk)};
  trace.driver.map(range + kChunk, chunks, kChunk);
  EXPECT_EQ(trace.calls.back().addr, range + kChunk);
  EXPECT_EQ(trace.calls.back().size_bytes, 2 * kChunk);
  EXPECT_EQ(trace.calls.back().handles.size(), 2u);
}

TEST(TracingDriver, a_failed_call_is_traced_as_failed_and_its_error_passes_through) {
  Trace trace;
  EXPECT_THROW(trace.driver.create(1), std::invalid_argument);
  ASSERT_EQ(trace.calls.size(), 1u);
  EXPECT_FALSE(trace.calls[0].ok);
}

TEST(TracingDriver, durations_are_those_of_the_inner_driver) {
  std::vector<DriverCall> calls;
  SimLatency latency;
  latency[CallKind::kCreate] = {.per_call_us = 500};
  TracingDriver driver(
      std::make_unique<SimDriver>(SimOptions{.latency = latency, .real_time = true}),
      [&](const DriverCall& call) { calls.push_back(call); });
  driver.create(kChunk);
  driver.create(kChunk);
  EXPECT_GE(calls[0].duration_ns, 500'000);
  EXPECT_GE(calls[1].start_ns, calls[0].start_ns + calls[0].duration_ns);
}

TEST(TracingDriver, a_sink_that_throws_does_not_change_the_call) {
  TracingDriver driver(make_sim(), [](const DriverCall&) { throw std::runtime_error("full"); });
  EXPECT_NO_THROW(driver.create(kChunk));
}

TEST(TracingDriver, a_wrapper_needs_an_inner_driver_and_a_sink) {
  EXPECT_THROW(TracingDriver(nullptr, [](const DriverCall&) {}), std::invalid_argument);
  EXPECT_THROW(TracingDriver(make_sim(), nullptr), std::invalid_argument);
}

TEST(TracingDriver, every_kind_of_call_has_its_name) {
  EXPECT_EQ(call_name(CallKind::kReserve), "reserve");
  EXPECT_EQ(call_name(CallKind::kSetAccess), "set_access");
  EXPECT_EQ(call_name(CallKind::kWrite), "write");
}

}  // namespace
}  // namespace vtensor
