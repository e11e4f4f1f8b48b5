// Windows on host memory as it is by default: what is behind them can be read in no sanitizer
// build, and shows nothing in others.
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "tests/cpp/support/core_fixture.h"
#include "tests/cpp/support/drivers.h"
#include "vtensor/driver/host/host_driver.h"
#include "vtensor/manager.h"

namespace vtensor {
namespace {

constexpr size_t kTokenBytes = 256;  // 16 tokens per chunk

TEST(Windows, what_is_below_them_faults_in_sanitizer_builds_and_reads_as_zeros_in_others) {
  KVSpec spec;
  spec.max_seq_len = 640;
  spec.groups = {{{0}, 1, 64, 64, 4, 1, /*window=*/40}};
  ManagerOptions options;
  options.chunk_bytes = kChunk;
  options.memory_budget = 100 * kChunk;
  const auto manager = Manager::open(std::make_unique<HostDriver>(), spec, options);
  const VTensorId id = *manager->try_create({}, "");
  const size_t num_tokens = 200;
  ASSERT_TRUE(manager->try_extend({&id, 1}, {&num_tokens, 1}));
  const uintptr_t keys = manager->view(id, 0, KV::kKey).address;
  std::memset(reinterpret_cast<void*>(keys), 7, num_tokens * kTokenBytes);
  manager->forget({id}, {num_tokens});
  manager->drain();

  EXPECT_EQ(byte_at(keys + 161 * kTokenBytes), 7) << "the first token that the window shows";
  const uintptr_t last_below = keys + 160 * kTokenBytes - 1;
#ifdef VTENSOR_SANITIZED
  EXPECT_FALSE(is_readable(last_below));
  EXPECT_FALSE(is_readable(keys));
#else
  EXPECT_EQ(byte_at(last_below), 0);
  EXPECT_EQ(byte_at(keys), 0);
#endif
}

}  // namespace
}  // namespace vtensor
