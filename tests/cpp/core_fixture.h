// What the tests of pool/, ops/, sched/ and the manager share: small geometries, a pool on a driver
// that can be told to fail, and token sequences.
#pragma once

#include <cstring>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "vtensor/error.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/pool/pool.h"
#include "vtensor/sched/integrity.h"
#include "vtensor/sched/scheduler.h"
#include "vtensor/units.h"
#include "vtensor/vmm/faulty_driver.h"
#include "vtensor/vmm/host_driver.h"
#include "vtensor/vmm/sim_driver.h"

namespace vtensor {

inline constexpr size_t kChunk = 4 * kKiB;

using Tokens = std::vector<Token>;

// first, first + 1, ...
inline Tokens tokens_from(Token first, size_t count) {
  Tokens tokens(count);
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

inline Tokens joined(Tokens tokens, const Tokens& more) {
  tokens.insert(tokens.end(), more.begin(), more.end());
  return tokens;
}

// Four tokens a chunk, two planes, unless told otherwise.
inline Geometry small_geometry(size_t token_bytes = kKiB, size_t num_planes = 2,
                               size_t max_slots = 4) {
  Geometry geometry;
  geometry.num_planes = num_planes;
  geometry.token_bytes = token_bytes;
  geometry.chunk_bytes = kChunk;
  geometry.max_tokens = 64;
  geometry.max_slots = max_slots;
  return geometry;
}

inline std::unique_ptr<Driver> sim_driver() {
  return std::make_unique<SimDriver>(SimOptions{.capacity_bytes = 256 * kMiB});
}

inline std::unique_ptr<Driver> host_driver(TailPolicy tail = TailPolicy::kZero) {
  return std::make_unique<HostDriver>(
      HostOptions{.capacity_bytes = 64 * kMiB, .tail = tail, .huge_pages = false});
}

// A pool whose driver fails on demand.
struct FaultyPool {
  explicit FaultyPool(const Geometry& geometry = small_geometry(), size_t budget_chunks = 64,
                      std::unique_ptr<Driver> inner = sim_driver())
      : FaultyPool(std::make_unique<FaultyDriver>(std::move(inner)), geometry, budget_chunks) {}

  FaultyDriver& faults;
  Pool pool;

  // The k-th driver call from now on fails.
  void fail_at(int64_t k, bool persistent = false) {
    faults.set_plan({.fail_at = k, .persistent = persistent});
  }
  void fail_never() { faults.set_plan({}); }

 private:
  FaultyPool(std::unique_ptr<FaultyDriver> driver, const Geometry& geometry, size_t budget_chunks)
      : faults(*driver), pool(std::move(driver), geometry, budget_chunks) {}
};

}  // namespace vtensor
