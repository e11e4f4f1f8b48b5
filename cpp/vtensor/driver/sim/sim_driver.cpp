#include "vtensor/driver/sim/sim_driver.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <string>
#include <thread>

#include "vtensor/driver/work_clock.h"
#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

// A sleep overshoots by about 60 us, so what is shorter is spun.
constexpr int64_t kSpinNs = 100'000;

void wait(int64_t duration_ns) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::nanoseconds(duration_ns);
  if (duration_ns > kSpinNs) {
    std::this_thread::sleep_until(end);
  } else {
    while (Clock::now() < end) {
    }
  }
}

}  // namespace

SimLatency SimLatency::a100() {
  SimLatency latency;
  // A100, 2 MiB chunks: the published range of each call (reserve 2-19, create 29-193, map 1.5-2,
  // set_access 36-38, unmap 26-34, release 23; vAttention, 2024, and others), the middle of it.
  latency[CallKind::kReserve] = {.per_call_us = 10};
  latency[CallKind::kFree] = {.per_call_us = 10};  // not published: as reserve
  latency[CallKind::kCreate] = {.per_chunk_us = 110};
  latency[CallKind::kRelease] = {.per_chunk_us = 23};
  latency[CallKind::kMap] = {.per_chunk_us = 1.75};
  latency[CallKind::kSetAccess] = {.per_call_us = 37};  // one call a run, however long
  latency[CallKind::kUnmap] = {.per_chunk_us = 30};
  // Not measured but computed: a launch, then 1.5 TB/s of HBM2e (a copy reads and writes) or
  // 25 GB/s of PCIe 4.
  latency[CallKind::kCopy] = {.per_call_us = 5, .per_mib_us = 1.4};
  latency[CallKind::kFill] = {.per_call_us = 5, .per_mib_us = 0.7};
  latency[CallKind::kRead] = {.per_call_us = 10, .per_mib_us = 42};
  latency[CallKind::kWrite] = {.per_call_us = 10, .per_mib_us = 42};
  return latency;
}

SimDriver::SimDriver(const SimOptions& options)
    : options_(options), ledger_(options.granularity_bytes) {
  if (options.granularity_bytes == 0) throw std::invalid_argument("granularity_bytes is 0");
}

uintptr_t SimDriver::reserve(size_t size_bytes, size_t alignment_bytes) {
  ledger_.require_range_shape(size_bytes, alignment_bytes);
  uintptr_t addr = 0;
  {
    const std::lock_guard lock(mutex_);
    addr = round_up(next_addr_, alignment_bytes);
    if (addr < next_addr_ || __builtin_add_overflow(addr, size_bytes, &next_addr_)) {
      throw DriverError("reserve", 0, "NO_ADDRESSES", "size_bytes=" + std::to_string(size_bytes));
    }
    ledger_.add_range(addr, size_bytes);
  }
  spend(CallKind::kReserve, 0, size_bytes);
  return addr;
}

void SimDriver::free(uintptr_t addr, size_t size_bytes) {
  {
    const std::lock_guard lock(mutex_);
    ledger_.remove_range(addr, size_bytes);
  }
  spend(CallKind::kFree, 0, size_bytes);
}

Handle SimDriver::create(size_t chunk_bytes) {
  Handle handle{};
  {
    const std::lock_guard lock(mutex_);
    ledger_.require_chunk_shape(chunk_bytes);
    const size_t free_bytes = options_.capacity_bytes - created_bytes_;
    if (chunk_bytes > free_bytes) {
      throw OutOfMemoryError(chunk_bytes, free_bytes, options_.capacity_bytes,
                             "the simulated device is full");
    }
    handle = ledger_.add_chunk(chunk_bytes);
    created_bytes_ += chunk_bytes;
  }
  spend(CallKind::kCreate, 1, chunk_bytes);
  return handle;
}

void SimDriver::release(Handle handle, size_t chunk_bytes) {
  {
    const std::lock_guard lock(mutex_);
    ledger_.begin_release(handle, chunk_bytes);
    ledger_.finish_release(handle);
    created_bytes_ -= chunk_bytes;
  }
  spend(CallKind::kRelease, 1, chunk_bytes);
}

void SimDriver::map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) {
  {
    const std::lock_guard lock(mutex_);
    ledger_.map(addr, handles, chunk_bytes);
  }
  spend(CallKind::kMap, handles.size(), handles.size() * chunk_bytes);
}

void SimDriver::set_access(uintptr_t addr, size_t size_bytes, Access access) {
  if (access == Access::kCopyOnWrite) {
    throw std::invalid_argument("sim: memory cannot be mapped copy-on-write");
  }
  size_t num_chunks = 0;
  {
    const std::lock_guard lock(mutex_);
    ledger_.set_access(addr, size_bytes, access);
    if (size_bytes > 0) num_chunks = size_bytes / ledger_.chunk_bytes();
  }
  spend(CallKind::kSetAccess, num_chunks, size_bytes);
}

void SimDriver::unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) {
  {
    const std::lock_guard lock(mutex_);
    ledger_.unmap(addr, size_bytes, chunk_bytes);
  }
  spend(CallKind::kUnmap, size_bytes / chunk_bytes, size_bytes);
}

std::optional<Handle> SimDriver::mapped_at(uintptr_t addr) const {
  const std::lock_guard lock(mutex_);
  return ledger_.mapped_at(addr);
}

void SimDriver::copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
                     size_t size_bytes) {
  require_bytes(dst, dst_offset, size_bytes);
  require_bytes(src, src_offset, size_bytes);
  spend(CallKind::kCopy, 0, size_bytes);
}

void SimDriver::fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte) {
  require_bytes(dst, dst_offset, size_bytes);
  spend(CallKind::kFill, 0, size_bytes);
}

void SimDriver::read(Handle src, size_t src_offset, std::span<std::byte> out) {
  require_bytes(src, src_offset, out.size());
  std::ranges::fill(out, std::byte{0});
  spend(CallKind::kRead, 0, out.size());
}

void SimDriver::write(Handle dst, size_t dst_offset, std::span<const std::byte> in) {
  require_bytes(dst, dst_offset, in.size());
  spend(CallKind::kWrite, 0, in.size());
}

size_t SimDriver::created_bytes() const {
  const std::lock_guard lock(mutex_);
  return created_bytes_;
}

void SimDriver::spend(CallKind kind, size_t num_chunks, size_t size_bytes) {
  const CallCost& cost = options_.latency[kind];
  const double mib = static_cast<double>(size_bytes) / static_cast<double>(kMiB);
  const double us = cost.per_call_us + cost.per_chunk_us * static_cast<double>(num_chunks) +
                    cost.per_mib_us * mib;
  const auto duration_ns = static_cast<int64_t>(us * 1e3);
  elapsed_ns_ += duration_ns;
  if (duration_ns == 0) return;
  if (options_.real_time) {
    wait(duration_ns);
  } else {
    simulated_ns += duration_ns;
  }
}

void SimDriver::require_bytes(Handle handle, size_t offset_bytes, size_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  ledger_.require_bytes(handle, offset_bytes, size_bytes);
}

}  // namespace vtensor
