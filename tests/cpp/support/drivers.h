// The drivers that the conformance suite runs on. A new driver is one more line in all_drivers().
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/cpp/standin_cuda/standin_control.h"
#include "tests/cpp/support/faulty_driver.h"
#include "tests/cpp/support/limited_driver.h"
#include "vtensor/driver/cuda/cuda_driver.h"
#include "vtensor/driver/host/host_driver.h"
#include "vtensor/driver/sim/sim_driver.h"
#include "vtensor/driver/wrappers/metered_driver.h"
#include "vtensor/driver/wrappers/tracing_driver.h"
#include "vtensor/util/units.h"

namespace vtensor {

struct DriverCase {
  std::string name;
  std::function<std::unique_ptr<Driver>()> make;  // with at least 64 MiB to create chunks from
  std::optional<UnmappedPolicy> unmapped{};       // what unmapped addresses show, where they exist
  bool cpu_addresses = false;                     // addresses may be dereferenced by this process
  bool refuses_mapped_release = true;             // rule 6; CUDA keeps the memory instead
};

inline std::unique_ptr<Driver> make_host(UnmappedPolicy unmapped = UnmappedPolicy::kGuard) {
  return std::make_unique<HostDriver>(
      HostOptions{.capacity_bytes = 64 * kMiB, .unmapped = unmapped});
}

inline std::unique_ptr<Driver> make_sim() {
  return std::make_unique<SimDriver>(SimOptions{.capacity_bytes = 64 * kMiB});
}

// On the stand-in libcuda.so.1, whose device pointers are addresses of this process.
inline std::unique_ptr<Driver> make_cuda() {
  StandinControl().set_capacity(64 * kMiB);
  return std::make_unique<CudaDriver>(CudaOptions{.libcuda_path = STANDIN_CUDA_PATH});
}

// On this machine's own libcuda.so.1: its first GPU, of which the tests take 64 MiB at most.
inline std::unique_ptr<Driver> make_real_cuda() {
  return std::make_unique<LimitedDriver>(std::make_unique<CudaDriver>(), 64 * kMiB);
}

inline std::vector<DriverCase> all_drivers() {
  constexpr auto kGuard = UnmappedPolicy::kGuard;
  constexpr auto kZero = UnmappedPolicy::kZero;
  std::vector<DriverCase> cases = {
      {"HostGuard", [] { return make_host(kGuard); }, kGuard, true},
      {"HostZero", [] { return make_host(kZero); }, kZero, true},
      {"Sim", [] { return make_sim(); }},
      {"Cuda", [] { return make_cuda(); }, kGuard, true},
      {"Faulty", [] { return std::make_unique<FaultyDriver>(make_host()); }, kGuard, true},
      {"Tracing",
       [] { return std::make_unique<TracingDriver>(make_host(), [](const DriverCall&) {}); },
       kGuard, true},
      {"Metered", [] { return std::make_unique<MeteredDriver>(make_host()); }, kGuard, true},
      {"Limited", [] { return std::make_unique<LimitedDriver>(make_host(), 64 * kMiB); }, kGuard,
       true},
  };
  // Only where scripts/gpu_check.sh says that there is one: elsewhere the stand-in is all there is.
  if (std::getenv("FLEXINFER_TEST_REAL_CUDA") != nullptr) {
    cases.push_back({"RealCuda", [] { return make_real_cuda(); }, std::nullopt, false});
  }
  return cases;
}

// Whether this process may read or write one byte at `addr`. Asks the kernel, which answers EFAULT
// where an access of our own would end the process.
inline bool is_readable(uintptr_t addr) {
  std::array<int, 2> ends{};
  if (pipe(ends.data()) != 0) return false;
  const bool readable = ::write(ends[1], reinterpret_cast<const void*>(addr), 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return readable;
}

// Writes a zero byte there.
inline bool is_writable(uintptr_t addr) {
  const int zeros = open("/dev/zero", O_RDONLY | O_CLOEXEC);
  const bool writable = ::read(zeros, reinterpret_cast<void*>(addr), 1) == 1;
  close(zeros);
  return writable;
}

inline unsigned char& byte_at(uintptr_t addr) { return *reinterpret_cast<unsigned char*>(addr); }

}  // namespace vtensor
