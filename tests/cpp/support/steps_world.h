// What tests of steps on the stand-in CUDA driver share: a manager, and kernels that read its
// vTensors.
#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/manager.h"

namespace vtensor {

inline const KVSpec kStepSpec =
    UniformKV{.num_layers = 1,
              .num_kv_heads = 1,
              .head_dim = 64,
              .element_bytes = 4,
              .max_seq_len = 256,
              .layers_per_plane = 1};  // 256 bytes per token, 16 tokens per chunk, two planes
inline constexpr size_t kStepTokenBytes = 256;
inline constexpr uintptr_t kStream = 0;
inline const Tokens kStepPrompt = tokens_from(0, 40);  // two whole rows and a half

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
    manager_ = Manager::open(cuda_driver(), kStepSpec, options);
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
      const size_t num_bytes = manager_->info(id).mapped_tokens * kStepTokenBytes;
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

}  // namespace vtensor
