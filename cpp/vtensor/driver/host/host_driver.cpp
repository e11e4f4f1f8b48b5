#include "vtensor/driver/host/host_driver.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>
#include <vector>

#include "vtensor/driver/host/host_call.h"
#include "vtensor/driver/host/host_handle.h"
#include "vtensor/driver/host/host_memory.h"
#include "vtensor/util/error.h"
#include "vtensor/util/text.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

constexpr size_t kMemoryCreditBytes = 64 * kMiB;

int protection(Access access) {
  if (access == Access::kNone) return PROT_NONE;
  return access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
}

size_t derived_mapping_limit(const std::string& system_root) {
  const size_t limit = max_map_count(system_root) / 4 * 3;
  return limit - std::min(limit, current_map_count(system_root));
}

}  // namespace

HostDriver::HostDriver(const HostOptions& options)
    : options_(options),
      page_bytes_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
      owner_pid_(getpid()),
      capacity_bytes_(options.capacity_bytes != 0 ? options.capacity_bytes
                                                  : available_bytes(options.system_root) / 4 * 3),
      mapping_limit_(options.mapping_limit != 0 ? options.mapping_limit
                                                : derived_mapping_limit(options.system_root)),
      memfd_(capacity_bytes_, page_bytes_),
      huge_pages_(options.huge_pages && probe_huge_pages()),
      ledger_(page_bytes_) {}

HostDriver::~HostDriver() {
  for (const auto& [addr, size_bytes] : ledger_.ranges()) munmap(pointer(addr), size_bytes);
}

// --- ranges ---

uintptr_t HostDriver::reserve(size_t size_bytes, size_t alignment_bytes) {
  ledger_.require_range_shape(size_bytes, alignment_bytes);
  const bool zero = options_.unmapped == UnmappedPolicy::kZero;
  const uintptr_t addr =
      reserve_aligned(size_bytes, alignment_bytes, zero ? PROT_READ : PROT_NONE, page_bytes_);
  if (zero) madvise(pointer(addr), size_bytes, MADV_HUGEPAGE);
  const std::lock_guard lock(mutex_);
  ledger_.add_range(addr, size_bytes);
  return addr;
}

void HostDriver::free(uintptr_t addr, size_t size_bytes) {
  {
    // Forgotten first: once unmapped, another thread may be given the same addresses.
    const std::lock_guard lock(mutex_);
    ledger_.remove_range(addr, size_bytes);
  }
  if (munmap(pointer(addr), size_bytes) == 0) return;
  const int code = errno;
  {
    const std::lock_guard lock(mutex_);
    ledger_.add_range(addr, size_bytes);
  }
  errno = code;
  fail_mapping("munmap", span_text(addr, size_bytes));
}

// --- chunks ---

Handle HostDriver::create(size_t chunk_bytes) {
  const Handle handle = claim(chunk_bytes);
  try {
    commit(memfd_, number(handle), chunk_bytes);
  } catch (...) {
    unclaim(handle, chunk_bytes);
    throw;
  }
  return handle;
}

void HostDriver::release(Handle handle, size_t chunk_bytes) {
  HostParcel* parcel = nullptr;
  {
    const std::lock_guard lock(mutex_);
    ledger_.begin_release(handle, chunk_bytes);
    if (is_apart(handle)) parcel = parcels_[parcel_idx(handle)].get();
  }
  // A forked child shares the file: its copy of the bookkeeping must not punch its parent's memory.
  if (getpid() != owner_pid_) return;
  try {
    parcel != nullptr ? parcel->drop(parcel_offset(handle), chunk_bytes)
                      : memfd_.punch(number(handle), chunk_bytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ledger_.undo_release(handle);
    throw;
  }
  finish_release(handle, chunk_bytes);
}

// Its bytes must be below the cap, and to be had.
void HostDriver::require_capacity(size_t size_bytes) {
  const size_t free_bytes = capacity_bytes_ - created_bytes_;
  if (size_bytes > free_bytes) {
    throw OutOfMemoryError(size_bytes, free_bytes, capacity_bytes_,
                           "the host driver's capacity_bytes is reached");
  }
  if (size_bytes > memory_credit_bytes_) {
    require_memory(size_bytes);
    memory_credit_bytes_ = std::max(size_bytes, kMemoryCreditBytes);
  }
}

// Takes a place in the file and its bytes out of the cap, or throws OutOfMemoryError.
Handle HostDriver::claim(size_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  ledger_.require_chunk_shape(chunk_bytes);
  require_capacity(chunk_bytes);
  const Handle handle = ledger_.add_chunk(chunk_bytes);
  created_bytes_ += chunk_bytes;
  memory_credit_bytes_ -= chunk_bytes;
  return handle;
}

void HostDriver::unclaim(Handle handle, size_t chunk_bytes) {
  {
    const std::lock_guard lock(mutex_);
    ledger_.begin_release(handle, chunk_bytes);
  }
  finish_release(handle, chunk_bytes);
}

void HostDriver::finish_release(Handle handle, size_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  ledger_.finish_release(handle);
  created_bytes_ -= chunk_bytes;
  if (!is_apart(handle)) return;
  parcels_[parcel_idx(handle)]->forget_place(parcel_offset(handle));
  drop_parcel_if_empty(parcel_idx(handle));
}

// In a container nobody fails an allocation: the kernel kills. So ask before taking.
void HostDriver::require_memory(size_t size_bytes) {
  const size_t available = available_bytes(options_.system_root);
  const size_t obtainable = available - std::min(available, options_.reserve_headroom_bytes);
  if (size_bytes > obtainable) {
    throw OutOfMemoryError(
        size_bytes, obtainable, capacity_bytes_,
        "the system has " + std::to_string(available) + " bytes available, of which " +
            std::to_string(options_.reserve_headroom_bytes) + " are kept as headroom");
  }
}

// Backs an extent with zeroed memory, all of it or nothing.
void HostDriver::commit(HostMemfd& memory, uint64_t offset, size_t size_bytes) {
  try {
    if (huge_pages_ && size_bytes % kHugePageBytes == 0) {
      if (memory.commit_huge(offset, size_bytes)) return;
      require_memory(size_bytes);  // a refused collapse can be the first sign of shortage
    }
    memory.commit_small(offset, size_bytes);
  } catch (...) {
    memory.punch(offset, size_bytes);
    throw;
  }
}

// Whether this kernel collapses memfd pages, found by doing it once. A machine too short of memory
// for the trial gets small pages.
bool HostDriver::probe_huge_pages() {
  bool active = false;
  try {
    active = memfd_.commit_huge(0, kHugePageBytes);
  } catch (const Error&) {
  }
  memfd_.punch(0, kHugePageBytes);
  return active;
}

// --- mappings ---

// Only recorded here; set_access() makes the system call, with the final protection. Measured, a
// mmap without access followed by mprotect costs 3.9-4.6 us a run, one call with the right
// protection 3.0. Until set_access() the range goes on showing no chunk: no byte of a chunk can be
// reached, which is rule 5.
void HostDriver::map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  ledger_.map(addr, handles, chunk_bytes);
  try {
    require_mappings_left(ledger_.num_mappings());
  } catch (...) {
    ledger_.unmap(addr, handles.size() * chunk_bytes, chunk_bytes);
    throw;
  }
}

void HostDriver::set_access(uintptr_t addr, size_t size_bytes, Access access) {
  std::vector<Ledger::Run> before;
  {
    const std::lock_guard lock(mutex_);
    const size_t num_mappings = ledger_.num_mappings();
    before = ledger_.set_access(addr, size_bytes, access);
    try {
      if (ledger_.num_mappings() > num_mappings) require_mappings_left(ledger_.num_mappings());
    } catch (...) {
      ledger_.undo_set_access(before);
      throw;
    }
  }
  size_t num_done = 0;
  try {
    for (; num_done < before.size(); ++num_done) apply(before[num_done], access);
  } catch (...) {
    for (size_t i = 0; i <= num_done; ++i) show(before[i]);
    const std::lock_guard lock(mutex_);
    ledger_.undo_set_access(before);
    throw;
  }
}

void HostDriver::unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) {
  std::vector<Ledger::Run> before;
  {
    const std::lock_guard lock(mutex_);
    before = ledger_.unmap(addr, size_bytes, chunk_bytes);
  }
  if (before.empty()) return;
  try {
    show_unmapped(addr, size_bytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ledger_.undo_unmap(before);
    throw;
  }
}

// In the books only. Returns what was there, and in `after` what to map now.
std::vector<Ledger::Run> HostDriver::record_remap(uintptr_t addr, std::span<const Handle> handles,
                                                  size_t chunk_bytes, Access access,
                                                  std::vector<Ledger::Run>& after) {
  const std::lock_guard lock(mutex_);
  const size_t size_bytes = checked_mul(handles.size(), chunk_bytes, "remap size");
  const size_t num_mappings = ledger_.num_mappings();
  const std::vector<Ledger::Run> before = ledger_.unmap(addr, size_bytes, chunk_bytes);
  bool mapped = false;
  try {
    ledger_.map(addr, handles, chunk_bytes);
    mapped = true;
    after = ledger_.set_access(addr, size_bytes, access);
    if (ledger_.num_mappings() > num_mappings) require_mappings_left(ledger_.num_mappings());
  } catch (...) {
    if (mapped) ledger_.unmap(addr, size_bytes, chunk_bytes);
    ledger_.undo_unmap(before);
    throw;
  }
  return before;
}

void HostDriver::remap(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes,
                       Access access) {
  if (handles.empty()) return;
  std::vector<Ledger::Run> after;
  const std::vector<Ledger::Run> before = record_remap(addr, handles, chunk_bytes, access, after);
  try {
    for (const Ledger::Run& run : after) apply(run, access);
  } catch (...) {
    for (const Ledger::Run& run : before) show(run);
    const std::lock_guard lock(mutex_);
    ledger_.unmap(addr, handles.size() * chunk_bytes, chunk_bytes);
    ledger_.undo_unmap(before);
    throw;
  }
}

// The count includes the windows.
void HostDriver::require_mappings_left(size_t num_mappings) const {
  const size_t num_held = num_mappings + num_windows();
  if (num_held <= mapping_limit_) return;
  throw MappingLimitError(
      "mmap", ENOMEM, "ENOMEM", "num_mappings=" + std::to_string(num_held),
      "the driver's limit of " + std::to_string(mapping_limit_) +
          " mappings is reached; it is kept below vm.max_map_count = " +
          std::to_string(max_map_count(options_.system_root)) +
          ". Raise that (sysctl -w vm.max_map_count=...) or use a larger chunk_bytes");
}

// Changes the access of one run; run.access is what it has now.
void HostDriver::apply(const Ledger::Run& run, Access access) const {
  if (run.access == access) return;
  const Extent extent = extent_of_mapped(run.offset);
  if (access == Access::kCopyOnWrite) {
    extent.memory.map_private_at(run.addr, extent.offset, run.size_bytes);
    return;
  }
  if (run.access == Access::kNone || run.access == Access::kCopyOnWrite) {
    extent.memory.map_at(run.addr, extent.offset, run.size_bytes);
    if (access == Access::kReadWrite) return;  // as the window
  }
  if (mprotect(pointer(run.addr), run.size_bytes, protection(access)) != 0) {
    fail_mapping("mprotect", span_text(run.addr, run.size_bytes));
  }
}

// Brings back what a run showed, whatever is mapped there now.
void HostDriver::show(Ledger::Run run) const noexcept {
  const Access access = std::exchange(run.access, Access::kNone);
  try {
    if (access == Access::kNone) {
      show_unmapped(run.addr, run.size_bytes);
    } else {
      apply(run, access);
    }
  } catch (const Error&) {  // the error that made us undo is the one to report
  }
}

// Brings back what unmapped addresses show. One call over any number of chunks.
void HostDriver::show_unmapped(uintptr_t addr, size_t size_bytes) const {
  const bool zero = options_.unmapped == UnmappedPolicy::kZero;
  if (mmap(pointer(addr), size_bytes, zero ? PROT_READ : PROT_NONE, kReservation | MAP_FIXED, -1,
           0) != MAP_FAILED) {
    // Zeros then come from the one huge zero page: reading 256 MiB takes 0.3 ms instead of 42.
    if (zero) madvise(pointer(addr), size_bytes, MADV_HUGEPAGE);
    return;
  }
  // At the system's mapping limit replacing fails, but protecting does not. The chunks can no
  // longer be reached, and the next map() or free() of these addresses removes them for good.
  if (mprotect(pointer(addr), size_bytes, PROT_NONE) != 0) {
    fail_mapping("mprotect", span_text(addr, size_bytes));
  }
}

// --- counts ---

size_t HostDriver::created_bytes() const {
  const std::lock_guard lock(mutex_);
  return created_bytes_;
}

size_t HostDriver::num_mappings() const {
  const std::lock_guard lock(mutex_);
  return ledger_.num_mappings() + num_windows();
}

}  // namespace vtensor
