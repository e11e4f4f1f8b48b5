// SimDriver: no memory at all, only a capacity, strict rules and the time that calls would take.
// For capacity studies far above this machine's memory, and scheduler tests in microseconds.
//
// Addresses are made up: never touch them. Contents do not exist: copy, fill and write check their
// arguments and take their time, read gives zeros.
//
// Thread-safety: as driver.h says; one mutex, not held while waiting.
//
// Invariants:
//  1. Rules 1, 4, 6 (by refusing) and 7 of driver.h hold, with the same errors as on the host.
//  2. Addresses are never used twice, so a stale one is always found.
//  3. elapsed_us() = the sum of the costs of all calls that succeeded, whichever thread made them.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string_view>

#include "vtensor/driver/driver.h"
#include "vtensor/driver/driver_call.h"
#include "vtensor/driver/ledger.h"

namespace vtensor {

// Microseconds of one call: per_call + per_chunk x chunks + per_mib x MiB.
struct CallCost {
  double per_call_us = 0;
  double per_chunk_us = 0;
  double per_mib_us = 0;
};

struct SimLatency {
  std::array<CallCost, kNumCallKinds> costs{};

  CallCost& operator[](CallKind kind) { return costs[call_idx(kind)]; }
  const CallCost& operator[](CallKind kind) const { return costs[call_idx(kind)]; }

  static SimLatency none() { return {}; }
  static SimLatency a100();  // published cuMem* costs at 2 MiB; see the source for each number
};

struct SimOptions {
  size_t capacity_bytes = size_t{80} << 30;  // cap on created chunks
  SimLatency latency{};                      // none
  bool real_time = false;                    // calls really take their time; else work_clock.h
  size_t granularity_bytes = 4096;           // 2 MiB on CUDA
};

class SimDriver final : public Driver {
 public:
  explicit SimDriver(const SimOptions& options = {});

  std::string_view name() const noexcept override { return "sim"; }
  Device device() const noexcept override { return {Device::Type::kCpu, 0}; }
  bool has_memory() const noexcept override { return false; }
  size_t granularity() const noexcept override { return options_.granularity_bytes; }

  uintptr_t reserve(size_t size_bytes, size_t alignment_bytes) override;
  void free(uintptr_t addr, size_t size_bytes) override;
  Handle create(size_t chunk_bytes) override;
  void release(Handle handle, size_t chunk_bytes) override;
  void map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) override;
  void set_access(uintptr_t addr, size_t size_bytes, Access access) override;
  void unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) override;
  std::optional<Handle> mapped_at(uintptr_t addr) const override;
  void copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
            size_t size_bytes) override;
  void fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte value) override;
  void read(Handle src, size_t src_offset, std::span<std::byte> out) override;
  void write(Handle dst, size_t dst_offset, std::span<const std::byte> in) override;

  size_t created_bytes() const;
  double elapsed_us() const noexcept { return static_cast<double>(elapsed_ns_.load()) / 1e3; }

 private:
  void spend(CallKind kind, size_t num_chunks, size_t size_bytes);
  void require_bytes(Handle handle, size_t offset_bytes, size_t size_bytes) const;

  const SimOptions options_;
  std::atomic<int64_t> elapsed_ns_{0};

  mutable std::mutex mutex_;  // guards all below
  Ledger ledger_;
  size_t created_bytes_ = 0;
  uintptr_t next_addr_ = uintptr_t{1} << 44;
};

}  // namespace vtensor
