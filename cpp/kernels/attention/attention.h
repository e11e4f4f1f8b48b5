// HostAttention: a step's attention over the KV arena on the CPU, one call per layer.
//
// Stores the step's new keys and values, then computes the plan's tasks on all threads and merges
// partial results. Needs no torch: pointers, strides (in elements) and lengths.
//
// Thread-safety: one forward() at a time.
// REQUIRES: the arena is backed for each segment up to its end; nothing beyond is ever read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/attention/plan.h"
#include "kernels/isa/choice.h"
#include "kernels/parallel.h"

namespace vtensor::kernels {

// Elements between neighbours; the last dimension is dense.
struct Strides {
  int64_t slot = 0;
  int64_t token = 0;
  int64_t head = 0;
};

// Of each layer: K [num_slots, max_seq_len, num_kv_heads, key_dim] and V [..., value_dim].
struct ArenaShape {
  DType dtype = DType::kFloat32;
  int64_t num_slots = 0;
  int64_t max_seq_len = 0;
  int num_kv_heads = 0;
  int key_dim = 0;
  int value_dim = 0;
  Strides k;
  Strides v;
  KVFormat format = KVFormat::kPlain;  // of bytes: strides count them, the scale not in a dim
};

struct LayerArena {
  void* k = nullptr;
  void* v = nullptr;
};

// [heads, num_tokens, key_dim or value_dim], the last dimension dense.
struct TokenRows {
  const void* data = nullptr;
  int64_t head_stride = 0;
  int64_t token_stride = 0;
};

struct LayerInputs {
  TokenRows query;         // of num_kv_heads * group heads
  TokenRows key;           // of num_kv_heads heads; no data: they stand in the arena already
  TokenRows value;         // the same
  void* output = nullptr;  // [num_tokens, num_heads, value_dim], contiguous
  float scaling = 1;
  float softcap = 0;             // 0: none
  const float* sinks = nullptr;  // [num_heads] or none
};

class HostAttention {
 public:
  // Throws std::invalid_argument for a width that is no multiple of 16 or above kMaxHeadDim.
  HostAttention(const ArenaShape& shape, std::vector<LayerArena> layers, Parallel parallel,
                const Isa& isa);

  const Isa& isa() const { return *isa_; }

  // Throws std::invalid_argument, before anything is written, for a plan that does not fit the
  // arena or a scaling that is not positive.
  void forward(const Plan& plan, size_t layer, const LayerInputs& inputs);

 private:
  class LayerRun;
  struct FreeAligned {
    void operator()(float* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  // Uninitialised floats, aligned to 64 bytes; grows, never shrinks.
  class Buffer {
   public:
    float* reserve(size_t num_floats);

   private:
    std::unique_ptr<float[], FreeAligned> data_;
    size_t size_ = 0;
  };

  void check(const Plan& plan, size_t layer) const;
  int threads_for(const Plan& plan) const;

  ArenaShape shape_;
  std::vector<LayerArena> layers_;
  Parallel parallel_;
  const Isa* isa_;
  Buffer scratch_;
  Buffer partials_;
  std::vector<int32_t> pending_;  // by token and head block: partial results that are still missing
};

}  // namespace vtensor::kernels
