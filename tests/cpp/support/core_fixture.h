// What the tests of pool/, ops/, core/ and the manager share: small geometries, the drivers that
// they run on, a pool on a driver that can be told to fail, and token sequences.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/standin_cuda/standin_control.h"
#include "tests/cpp/support/faulty_driver.h"
#include "vtensor/core/core.h"
#include "vtensor/core/integrity.h"
#include "vtensor/driver/cuda/cuda_driver.h"
#include "vtensor/driver/host/host_driver.h"
#include "vtensor/driver/sim/sim_driver.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/pool/pool.h"
#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

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

// Four tokens per chunk, two planes, unless told otherwise.
inline Geometry small_geometry(size_t token_bytes = kKiB, size_t num_planes = 2,
                               size_t max_slots = 4) {
  Geometry geometry;
  for (size_t i = 0; i < num_planes; ++i) geometry.add_plane(1);
  geometry.token_bytes = token_bytes;
  geometry.chunk_bytes = kChunk;
  geometry.max_tokens = 64;
  geometry.max_slots = max_slots;
  return geometry;
}

inline std::unique_ptr<Driver> sim_driver() {
  return std::make_unique<SimDriver>(SimOptions{.capacity_bytes = 256 * kMiB});
}

inline std::unique_ptr<Driver> host_driver(UnmappedPolicy unmapped = kDefaultUnmapped) {
  return std::make_unique<HostDriver>(
      HostOptions{.capacity_bytes = 64 * kMiB, .unmapped = unmapped, .huge_pages = false});
}

// CUDA on the stand-in libcuda.so.1, whose device pointers are addresses of this process.
inline std::unique_ptr<Driver> cuda_driver() {
  return std::make_unique<CudaDriver>(
      CudaOptions{.libcuda_path = STANDIN_CUDA_PATH, .window_slab_bytes = 4 * kMiB});
}

enum class On { kSim, kHost, kCuda };

inline std::string name_of(On driver) {
  return driver == On::kSim ? "Sim" : driver == On::kHost ? "Host" : "Cuda";
}

inline std::unique_ptr<Driver> make_driver(On driver) {
  switch (driver) {
    case On::kSim:
      return sim_driver();
    case On::kHost:
      return host_driver();
    case On::kCuda:
      break;
  }
  return cuda_driver();
}

// While it lives, the stand-in takes chunks as small as the host's. In the end nothing may be alive
// in it, and no rule of CUDA's may have been broken.
class StandinScope {
 public:
  explicit StandinScope(On driver) {
    if (driver != On::kCuda) return;
    standin_.emplace();
    standin_->reset();
    standin_->set_granularity(kChunk);
  }
  ~StandinScope() {
    if (!standin_) return;
    EXPECT_EQ(standin_->live(nullptr), 0U) << "objects are still alive in the CUDA driver";
    EXPECT_EQ(standin_->violations(), 0U) << standin_->last_violation();
    standin_->reset();
  }
  StandinScope(const StandinScope&) = delete;
  StandinScope& operator=(const StandinScope&) = delete;

  const StandinControl& operator*() const { return *standin_; }  // Requires: On::kCuda.

 private:
  std::optional<StandinControl> standin_;
};

// A test for several drivers. All that a derived fixture owns is gone before the last check.
class DriverTest : public testing::TestWithParam<On> {
 protected:
  StandinScope standin_{GetParam()};
};

// The driver that the running test is for.
inline std::unique_ptr<Driver> param_driver() { return make_driver(DriverTest::GetParam()); }

#define VTENSOR_ON_DRIVERS(fixture, ...)                                   \
  INSTANTIATE_TEST_SUITE_P(Drivers, fixture, testing::Values(__VA_ARGS__), \
                           [](const auto& info) { return name_of(info.param); })
#define VTENSOR_ON_EVERY_DRIVER(fixture) VTENSOR_ON_DRIVERS(fixture, On::kSim, On::kHost, On::kCuda)
// For tests that look at contents.
#define VTENSOR_ON_EVERY_MEMORY(fixture) VTENSOR_ON_DRIVERS(fixture, On::kHost, On::kCuda)

// A pool whose driver, by default the running test's, fails on demand.
struct FaultyPool {
  explicit FaultyPool(const Geometry& geometry = small_geometry(), size_t budget_chunks = 64,
                      std::unique_ptr<Driver> inner = param_driver())
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
