// What tests of the core share: a pool that can fail, and vTensors whose bytes tell who wrote them.
#pragma once

#include <gtest/gtest.h>

#include <optional>
#include <string>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/core/core.h"

namespace vtensor {

// Four tokens per chunk, two planes, real memory (that of the stand-in on Cuda): byte 0 of each
// token tells who wrote it.
class CoreTest : public DriverTest {
 protected:
  explicit CoreTest(const CoreOptions& options = {}, size_t budget_chunks = 64)
      : faulty_(small_geometry(), budget_chunks), core_(faulty_.pool, options) {}

  void TearDown() override { check_integrity(core_); }

  bool extend(VTensorId id, size_t num_tokens) {
    if (core_.extender.extend_in_place({&id, 1}, {&num_tokens, 1})) return true;
    std::optional<Extension> extension = core_.extender.plan_extend({&id, 1}, {&num_tokens, 1});
    if (!extension) return false;
    extension->run(faulty_.faults, faulty_.pool.vset, faulty_.pool.geometry);
    core_.extender.commit(*extension);
    return true;
  }

  volatile char& at(VTensorId id, size_t token, size_t plane = 0) {
    const uintptr_t base = faulty_.pool.vset.address(plane, core_.vtensors.live(id).slot, 0);
    return *reinterpret_cast<volatile char*>(base + token * kKiB);
  }

  // A vTensor of `tokens`, all of them written as `mark`, recorded.
  VTensorId recorded(const Tokens& tokens, char mark, const std::string& salt = "") {
    const VTensorId id = *core_.placement.create(tokens, salt);
    const size_t cached = core_.vtensors.live(id).num_tokens;
    EXPECT_TRUE(extend(id, tokens.size()));
    for (size_t t = cached; t < tokens.size(); ++t) {
      for (size_t plane = 0; plane < 2; ++plane) at(id, t, plane) = mark;
    }
    core_.recorder.record_prefix(id, tokens);
    return id;
  }

  const VTensor& live(VTensorId id) { return core_.vtensors.live(id); }
  size_t pool_matches(const Tokens& tokens) {
    return faulty_.pool.rtree.match("", tokens).num_tokens;
  }
  size_t copied() { return core_.state.counters.chunks_copied; }
  int64_t calls() { return faulty_.faults.num_calls(); }
  PSet& pset() { return faulty_.pool.pset; }

  FaultyPool faulty_;
  Core core_;
};

}  // namespace vtensor
