#include "vtensor/vmm/host_driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "vtensor/error.h"
#include "vtensor/units.h"
#include "vtensor/vmm/host_memory.h"
#include "vtensor/vmm/text.h"

#ifndef MADV_COLLAPSE  // since Linux 6.1; older headers lack it, older kernels answer EINVAL
#define MADV_COLLAPSE 25
#endif

namespace vtensor {
namespace {

constexpr size_t kHugePageBytes = 2 * kMiB;
constexpr size_t kMemoryCreditBytes = 64 * kMiB;
constexpr int kReservation = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

[[noreturn]] void fail(const char* call, const std::string& arguments) {
  const int code = errno;
  throw DriverError(call, code, errno_text(code), arguments);
}

// For calls that take no memory: there ENOMEM is the system's limit on mappings.
[[noreturn]] void fail_mapping(const char* call, const std::string& arguments) {
  if (errno != ENOMEM) fail(call, arguments);
  throw MappingLimitError(call, ENOMEM, "ENOMEM", arguments,
                          "the process has about vm.max_map_count mappings. Raise that (sysctl -w "
                          "vm.max_map_count=...) or use a larger chunk_bytes");
}

void* pointer(uintptr_t addr) { return reinterpret_cast<void*>(addr); }
uint64_t number(Handle handle) { return static_cast<uint64_t>(handle); }

int protection(Access access) {
  if (access == Access::kNone) return PROT_NONE;
  return access == Access::kRead ? PROT_READ : PROT_READ | PROT_WRITE;
}

// Repeats a call that a signal interrupted.
template <class Call>
int uninterrupted(Call&& call) {
  int rc = 0;
  do {
    rc = call();
  } while (rc != 0 && errno == EINTR);
  return rc;
}

// mmap reserves at page alignment only: take more and cut both ends off.
uintptr_t reserve_aligned(size_t size_bytes, size_t alignment_bytes, int prot, size_t page_bytes) {
  const size_t slack_bytes = alignment_bytes - page_bytes;
  const std::string arguments = "size_bytes=" + std::to_string(size_bytes) +
                                ", alignment_bytes=" + std::to_string(alignment_bytes);
  if (size_bytes > std::numeric_limits<size_t>::max() - slack_bytes) {
    errno = ENOMEM;
    fail("mmap", arguments);
  }
  void* start = mmap(nullptr, size_bytes + slack_bytes, prot, kReservation, -1, 0);
  if (start == MAP_FAILED) fail("mmap", arguments);
  const uintptr_t begin = reinterpret_cast<uintptr_t>(start);
  const uintptr_t addr = round_up(begin, alignment_bytes);
  const size_t before_bytes = addr - begin;
  const size_t after_bytes = slack_bytes - before_bytes;
  if (before_bytes > 0) munmap(start, before_bytes);
  if (after_bytes > 0) munmap(pointer(addr + size_bytes), after_bytes);
  return addr;
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
      ledger_(page_bytes_) {
  capacity_bytes_ = options_.capacity_bytes != 0 ? options_.capacity_bytes
                                                 : available_bytes(options_.system_root) / 4 * 3;
  mapping_limit_ = options_.mapping_limit != 0 ? options_.mapping_limit
                                               : derived_mapping_limit(options_.system_root);
  // Twice the capacity, so that free extents too small for a chunk (sizes may be mixed) do not
  // count as shortage. The file is sparse and the window only addresses: neither costs memory.
  space_bytes_ = round_up(checked_mul(std::max(capacity_bytes_, kHugePageBytes), 2, "capacity"),
                          kHugePageBytes);
  offsets_ = OffsetAllocator(space_bytes_);
  try {
    open_window();
    huge_pages_ = options_.huge_pages && probe_huge_pages();
  } catch (...) {
    close_window();
    throw;
  }
}

HostDriver::~HostDriver() {
  for (const auto& [addr, size_bytes] : ledger_.ranges()) munmap(pointer(addr), size_bytes);
  close_window();
}

void HostDriver::open_window() {
  const std::string arguments = "size_bytes=" + std::to_string(space_bytes_);
  fd_ = memfd_create("vtensor", MFD_CLOEXEC);
  if (fd_ < 0) fail("memfd_create", "vtensor");
  // Its size once and for all: growing it later would wait for other threads' fallocate.
  if (ftruncate(fd_, static_cast<off_t>(space_bytes_)) != 0) fail("ftruncate", arguments);
  const uintptr_t addr = reserve_aligned(space_bytes_, kHugePageBytes, PROT_NONE, page_bytes_);
  window_ = static_cast<std::byte*>(pointer(addr));
  if (mmap(window_, space_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
           fd_, 0) == MAP_FAILED) {
    fail("mmap", arguments);
  }
  // Every mapping of a chunk is cloned from the window and inherits these two.
  madvise(window_, space_bytes_, MADV_DONTDUMP);
  madvise(window_, space_bytes_, MADV_DONTFORK);
}

void HostDriver::close_window() noexcept {
  if (window_ != nullptr) munmap(window_, space_bytes_);
  if (fd_ >= 0) close(fd_);  // the last reference to the chunks: their memory goes back
}

// --- ranges ---

uintptr_t HostDriver::reserve(size_t size_bytes, size_t alignment_bytes) {
  ledger_.require_range_shape(size_bytes, alignment_bytes);
  const bool zero = options_.tail == TailPolicy::kZero;
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
  const uint64_t offset = claim(chunk_bytes);
  try {
    commit(offset, chunk_bytes);
  } catch (...) {
    unclaim(offset, chunk_bytes);
    throw;
  }
  return Handle{offset};
}

void HostDriver::release(Handle handle, size_t chunk_bytes) {
  {
    const std::lock_guard lock(mutex_);
    ledger_.remove_chunk(handle, chunk_bytes);
  }
  // A forked child shares the file: its copy of the bookkeeping must not punch its parent's memory.
  if (getpid() != owner_pid_) return;
  try {
    punch(number(handle), chunk_bytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ledger_.add_chunk(handle, chunk_bytes);
    throw;
  }
  const std::lock_guard lock(mutex_);
  offsets_.give_back(number(handle), chunk_bytes);
  created_bytes_ -= chunk_bytes;
}

// Takes an extent and its bytes out of the cap, or throws OutOfMemoryError.
uint64_t HostDriver::claim(size_t chunk_bytes) {
  ledger_.require_chunk_shape(chunk_bytes);
  const std::lock_guard lock(mutex_);
  const size_t free_bytes = capacity_bytes_ - created_bytes_;
  if (chunk_bytes > free_bytes) {
    throw OutOfMemoryError(chunk_bytes, free_bytes, capacity_bytes_,
                           "the host driver's capacity_bytes is reached");
  }
  if (chunk_bytes > memory_credit_bytes_) {
    require_memory(chunk_bytes);
    memory_credit_bytes_ = std::max(chunk_bytes, kMemoryCreditBytes);
  }
  const bool whole_huge_pages = chunk_bytes % kHugePageBytes == 0;
  const auto offset = offsets_.take(chunk_bytes, whole_huge_pages ? kHugePageBytes : page_bytes_);
  if (!offset) {
    throw OutOfMemoryError(chunk_bytes, free_bytes, capacity_bytes_,
                           "the file is fragmented by chunks of different sizes");
  }
  ledger_.add_chunk(Handle{*offset}, chunk_bytes);
  created_bytes_ += chunk_bytes;
  memory_credit_bytes_ -= chunk_bytes;
  return *offset;
}

void HostDriver::unclaim(uint64_t offset, size_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  ledger_.remove_chunk(Handle{offset}, chunk_bytes);
  offsets_.give_back(offset, chunk_bytes);
  created_bytes_ -= chunk_bytes;
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
void HostDriver::commit(uint64_t offset, size_t size_bytes) {
  try {
    if (huge_pages_ && size_bytes % kHugePageBytes == 0) {
      if (commit_huge(offset, size_bytes)) return;
      require_memory(size_bytes);  // a refused collapse can be the first sign of shortage
    }
    commit_small(offset, size_bytes);
  } catch (...) {
    punch(offset, size_bytes);
    throw;
  }
}

// One small page in each huge page, then MADV_COLLAPSE: the only way to huge pages in a memfd that
// needs no rights and no configuration (feasibility 1.2: 130 us for 2 MiB, where 512 small pages
// cost 480, and mapping, touching and unmapping the chunk become 10-50 times cheaper). Collapse
// needs something present in the range, hence the small page. False: no huge page to be had now.
bool HostDriver::commit_huge(uint64_t offset, size_t size_bytes) {
  for (uint64_t page = offset; page < offset + size_bytes; page += kHugePageBytes) {
    commit_small(page, page_bytes_);
  }
  const int rc =
      uninterrupted([&] { return madvise(window_ + offset, size_bytes, MADV_COLLAPSE); });
  leave_window(offset, size_bytes);
  return rc == 0;
}

// In pieces, because fallocate drops all its work when a signal arrives, and a profiler sends many.
void HostDriver::commit_small(uint64_t offset, size_t size_bytes) {
  for (size_t done = 0; done < size_bytes; done += kHugePageBytes) {
    const auto start = static_cast<off_t>(offset + done);
    const auto length = static_cast<off_t>(std::min(kHugePageBytes, size_bytes - done));
    if (uninterrupted([&] { return fallocate(fd_, 0, start, length); }) == 0) continue;
    if (errno == ENOSPC || errno == ENOMEM) {
      const std::string name = errno_text(errno);
      throw OutOfMemoryError(size_bytes, done, capacity_bytes_, "fallocate: " + name);
    }
    fail("fallocate", "offset=" + hex_text(offset + done) + ", size=" + std::to_string(length));
  }
}

void HostDriver::punch(uint64_t offset, size_t size_bytes) {
  const int rc = uninterrupted([&] {
    return fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(size_bytes));
  });
  if (rc != 0) {
    fail("fallocate(PUNCH_HOLE)",
         "offset=" + hex_text(offset) + ", size_bytes=" + std::to_string(size_bytes));
  }
}

// Whether this kernel collapses memfd pages, found by doing it once. A machine too short of memory
// for the trial gets small pages.
bool HostDriver::probe_huge_pages() {
  bool active = false;
  try {
    active = commit_huge(0, kHugePageBytes);
  } catch (const Error&) {
  }
  punch(0, kHugePageBytes);
  return active;
}

// --- mappings ---

// Only recorded here; set_access() makes the system call, with the final protection. Measured, a
// mmap without access followed by mprotect costs 3.9-4.6 us a run, one call with the right
// protection 3.0. Until set_access() the range goes on showing its tail: no byte of a chunk can be
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
    for (size_t i = 0; i <= num_done; ++i) take_back(before[i], access);
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
    show_tail(addr, size_bytes);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    ledger_.undo_unmap(before);
    throw;
  }
}

// The count includes the window.
void HostDriver::require_mappings_left(size_t num_mappings) const {
  if (num_mappings + 1 <= mapping_limit_) return;
  throw MappingLimitError(
      "mmap", ENOMEM, "ENOMEM", "num_mappings=" + std::to_string(num_mappings + 1),
      "the driver's limit of " + std::to_string(mapping_limit_) +
          " mappings is reached; it is kept below vm.max_map_count = " +
          std::to_string(max_map_count(options_.system_root)) +
          ". Raise that (sysctl -w vm.max_map_count=...) or use a larger chunk_bytes");
}

// Changes the access of one run; run.access is what it has now. A run that has none yet is cloned
// from the window, by mremap with an old size of 0: unlike mmap, the clone inherits DONTDUMP and
// DONTFORK, which would cost another 0.7 us each.
void HostDriver::apply(const Ledger::Run& run, Access access) const {
  if (run.access == access) return;
  if (run.access == Access::kNone) {
    if (mremap(window_ + run.offset, 0, run.size_bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
               pointer(run.addr)) == MAP_FAILED) {
      fail_mapping("mremap", span_text(run.addr, run.size_bytes));
    }
    if (access == Access::kReadWrite) return;  // as the window
  }
  if (mprotect(pointer(run.addr), run.size_bytes, protection(access)) != 0) {
    fail_mapping("mprotect", span_text(run.addr, run.size_bytes));
  }
}

// Undoes apply(run, access), wholly or partly done.
void HostDriver::take_back(Ledger::Run run, Access access) const noexcept {
  try {
    const Access before = std::exchange(run.access, access);
    if (before == Access::kNone) {
      show_tail(run.addr, run.size_bytes);
    } else {
      apply(run, before);
    }
  } catch (const Error&) {  // the error that made us undo is the one to report
  }
}

// Brings back what unmapped addresses show. One call over any number of chunks.
void HostDriver::show_tail(uintptr_t addr, size_t size_bytes) const {
  const bool zero = options_.tail == TailPolicy::kZero;
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

// --- contents ---

// Takes a chunk out of the window's page tables again, once its bytes have been touched there; the
// memory stays. Else it would count twice in the process's resident set: here and where it is
// mapped. Only where a chunk is huge pages, which come back by one fault each (3 us); small ones
// would cost 1 us each.
void HostDriver::forget(Handle handle) const noexcept {
  if (!huge_pages_) return;
  size_t size_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    size_bytes = ledger_.chunk_bytes(handle);
  }
  if (size_bytes % kHugePageBytes == 0) leave_window(number(handle), size_bytes);
}

// A failure only leaves the bytes counted.
void HostDriver::leave_window(uint64_t offset, size_t size_bytes) const noexcept {
  if (size_bytes > 0) madvise(window_ + offset, size_bytes, MADV_DONTNEED);
}

std::byte* HostDriver::bytes_at(Handle handle, size_t offset, size_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  ledger_.require_bytes(handle, offset, size_bytes);
  return window_ + number(handle) + offset;
}

void HostDriver::copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
                      size_t size_bytes) {
  const std::byte* from = bytes_at(src, src_offset, size_bytes);
  std::byte* to = bytes_at(dst, dst_offset, size_bytes);
  std::memmove(to, from, size_bytes);
  forget(src);
  forget(dst);
}

void HostDriver::fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte value) {
  std::byte* to = bytes_at(dst, dst_offset, size_bytes);
  std::memset(to, static_cast<int>(value), size_bytes);
  forget(dst);
}

void HostDriver::read(Handle src, size_t src_offset, std::span<std::byte> out) {
  const std::byte* from = bytes_at(src, src_offset, out.size());
  if (out.empty()) return;
  std::memcpy(out.data(), from, out.size());
  forget(src);
}

void HostDriver::write(Handle dst, size_t dst_offset, std::span<const std::byte> in) {
  std::byte* to = bytes_at(dst, dst_offset, in.size());
  if (in.empty()) return;
  std::memcpy(to, in.data(), in.size());
  forget(dst);
}

// --- counts ---

size_t HostDriver::created_bytes() const {
  const std::lock_guard lock(mutex_);
  return created_bytes_;
}

size_t HostDriver::resident_bytes() const {
  struct stat status{};
  if (fstat(fd_, &status) != 0) fail("fstat", "vtensor");
  return static_cast<size_t>(status.st_blocks) * 512;
}

size_t HostDriver::num_mappings() const {
  const std::lock_guard lock(mutex_);
  return ledger_.num_mappings() + 1;
}

}  // namespace vtensor
