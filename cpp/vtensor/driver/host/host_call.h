// The host driver's system calls: their errors, and addresses at any alignment. No state.
#pragma once

#include <sys/mman.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

#include "vtensor/util/error.h"
#include "vtensor/util/text.h"
#include "vtensor/util/units.h"

namespace vtensor {

inline constexpr int kReservation = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// Throws a DriverError of errno.
[[noreturn]] inline void fail(const char* call, const std::string& arguments) {
  const int code = errno;
  throw DriverError(call, code, errno_text(code), arguments);
}

// For calls that take no memory: there ENOMEM is the system's limit on mappings.
[[noreturn]] inline void fail_mapping(const char* call, const std::string& arguments) {
  if (errno != ENOMEM) fail(call, arguments);
  throw MappingLimitError(call, ENOMEM, "ENOMEM", arguments,
                          "the process has about vm.max_map_count mappings. Raise that (sysctl -w "
                          "vm.max_map_count=...) or use a larger chunk_bytes");
}

inline void* pointer(uintptr_t addr) { return reinterpret_cast<void*>(addr); }

// Repeats a call that a signal interrupted.
template <class Call>
int uninterrupted(Call&& call) {
  int rc = 0;
  do {
    rc = call();
  } while (rc != 0 && errno == EINTR);
  return rc;
}

// Addresses without memory; `prot` says what reading them does. mmap reserves at page alignment
// only: take more and cut both ends off. Throws DriverError.
inline uintptr_t reserve_aligned(size_t size_bytes, size_t alignment_bytes, int prot,
                                 size_t page_bytes) {
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

}  // namespace vtensor
