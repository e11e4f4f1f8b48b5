// ManagerTest: a manager of small chunks on each driver.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <utility>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/manager.h"

namespace vtensor {

inline const KVSpec kManagerSpec =
    UniformKV{.num_layers = 2,
              .num_kv_heads = 1,
              .head_dim = 128,
              .element_bytes = 4,
              .max_seq_len = 128,
              .layers_per_plane = 1};  // 512 bytes per token, four planes

class ManagerTest : public DriverTest {
 protected:
  std::shared_ptr<Manager> open(size_t budget_chunks = 256) {
    return open(param_driver(), budget_chunks);
  }

  static std::shared_ptr<Manager> open(std::unique_ptr<Driver> driver, size_t budget_chunks = 256) {
    ManagerOptions options;
    options.max_requests = 12;
    options.memory_budget = budget_chunks * kChunk;
    options.chunk_bytes = kChunk;
    options.swap_space_bytes = 256 * kChunk;
    options.min_free_bytes = 4 * kChunk;
    options.prefix_cache_bytes = 64 * kChunk;
    return Manager::open(std::move(driver), kManagerSpec, options);
  }

  static bool extend(Manager& manager, VTensorId id, size_t num_tokens) {
    return manager.try_extend({&id, 1}, {&num_tokens, 1});
  }
};

}  // namespace vtensor
