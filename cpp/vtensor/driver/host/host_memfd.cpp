#include "vtensor/driver/host/host_memfd.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

#include "vtensor/driver/host/host_call.h"
#include "vtensor/util/error.h"
#include "vtensor/util/text.h"
#include "vtensor/util/units.h"

#ifndef MADV_COLLAPSE  // since Linux 6.1; older headers lack it, older kernels answer EINVAL
#define MADV_COLLAPSE 25
#endif

namespace vtensor {
namespace {

// The file is sparse and the window only addresses: neither costs memory.
size_t space_for(size_t capacity_bytes) {
  return checked_mul(ceil_div(std::max(capacity_bytes, size_t{1}), kHugePageBytes), kHugePageBytes,
                     "capacity");
}

}  // namespace

HostMemfd::HostMemfd(size_t capacity_bytes, size_t page_bytes)
    : capacity_bytes_(capacity_bytes),
      page_bytes_(page_bytes),
      space_bytes_(space_for(capacity_bytes)) {
  create_file();
  open_window();
}

HostMemfd::HostMemfd(FileDescriptor file, size_t space_bytes, size_t page_bytes)
    : capacity_bytes_(space_bytes),
      page_bytes_(page_bytes),
      space_bytes_(space_bytes),
      file_(std::move(file)) {
  open_window();
}

HostMemfd::~HostMemfd() { munmap(window_, space_bytes_); }

void HostMemfd::create_file() {
  file_ = FileDescriptor(memfd_create("vtensor", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (fd() < 0) fail("memfd_create", "vtensor");
  // Its size once and for all: growing it later would wait for other threads' fallocate.
  if (ftruncate(fd(), static_cast<off_t>(space_bytes_)) != 0) {
    fail("ftruncate", "size_bytes=" + std::to_string(space_bytes_));
  }
}

void HostMemfd::open_window() {
  const uintptr_t addr = reserve_aligned(space_bytes_, kHugePageBytes, PROT_NONE, page_bytes_);
  if (mmap(pointer(addr), space_bytes_, PROT_READ | PROT_WRITE,
           MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd(), 0) == MAP_FAILED) {
    const int code = errno;
    munmap(pointer(addr), space_bytes_);
    errno = code;
    fail("mmap", "size_bytes=" + std::to_string(space_bytes_));
  }
  window_ = static_cast<std::byte*>(pointer(addr));
  // Every mapping of a chunk is cloned from the window and inherits these two.
  madvise(window_, space_bytes_, MADV_DONTDUMP);
  madvise(window_, space_bytes_, MADV_DONTFORK);
}

// In pieces, because fallocate drops all its work when a signal arrives, and a profiler sends many.
void HostMemfd::commit_small(uint64_t offset, size_t size_bytes) {
  for (size_t done = 0; done < size_bytes; done += kHugePageBytes) {
    const auto start = static_cast<off_t>(offset + done);
    const auto length = static_cast<off_t>(std::min(kHugePageBytes, size_bytes - done));
    if (uninterrupted([&] { return fallocate(fd(), 0, start, length); }) == 0) continue;
    if (errno == ENOSPC || errno == ENOMEM) {
      const std::string name = errno_text(errno);
      throw OutOfMemoryError(size_bytes, done, capacity_bytes_, "fallocate: " + name);
    }
    fail("fallocate", "offset=" + hex_text(offset + done) + ", size=" + std::to_string(length));
  }
}

// One small page in each huge page, then MADV_COLLAPSE: the only way to huge pages in a memfd that
// needs no rights and no configuration (feasibility 1.2: 130 us for 2 MiB, where 512 small pages
// cost 480, and mapping, touching and unmapping the chunk become 10-50 times cheaper). Collapse
// needs something present in the range, hence the small page.
bool HostMemfd::commit_huge(uint64_t offset, size_t size_bytes) {
  for (uint64_t page = offset; page < offset + size_bytes; page += kHugePageBytes) {
    commit_small(page, page_bytes_);
  }
  const int rc =
      uninterrupted([&] { return madvise(window_ + offset, size_bytes, MADV_COLLAPSE); });
  leave_window(offset, size_bytes);
  return rc == 0;
}

void HostMemfd::punch(uint64_t offset, size_t size_bytes) {
  const int rc = uninterrupted([&] {
    return fallocate(fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                     static_cast<off_t>(size_bytes));
  });
  if (rc != 0) {
    fail("fallocate(PUNCH_HOLE)",
         "offset=" + hex_text(offset) + ", size_bytes=" + std::to_string(size_bytes));
  }
}

// By mremap with an old size of 0: unlike mmap, the clone inherits DONTDUMP and DONTFORK, which
// would cost another 0.7 us each.
void HostMemfd::map_at(uintptr_t addr, uint64_t offset, size_t size_bytes) const {
  if (mremap(window_ + offset, 0, size_bytes, MREMAP_MAYMOVE | MREMAP_FIXED, pointer(addr)) ==
      MAP_FAILED) {
    fail_mapping("mremap", span_text(addr, size_bytes));
  }
}

void HostMemfd::map_private_at(uintptr_t addr, uint64_t offset, size_t size_bytes) const {
  if (mmap(pointer(addr), size_bytes, PROT_READ | PROT_WRITE,
           MAP_PRIVATE | MAP_FIXED | MAP_NORESERVE, fd(),
           static_cast<off_t>(offset)) == MAP_FAILED) {
    fail_mapping("mmap", span_text(addr, size_bytes));
  }
  madvise(pointer(addr), size_bytes, MADV_DONTDUMP);
  madvise(pointer(addr), size_bytes, MADV_DONTFORK);
}

// A failure only leaves the bytes counted.
void HostMemfd::leave_window(uint64_t offset, size_t size_bytes) const noexcept {
  if (size_bytes > 0) madvise(window_ + offset, size_bytes, MADV_DONTNEED);
}

size_t HostMemfd::resident_bytes() const {
  struct stat status{};
  if (fstat(fd(), &status) != 0) fail("fstat", "vtensor");
  return static_cast<size_t>(status.st_blocks) * 512;
}

// A line is "start-end rwxp offset device inode path"; what nobody may touch shows nothing.
std::optional<std::map<uintptr_t, HostMemfd::Extent>> HostMemfd::shown() const {
  struct stat status{};
  if (fstat(fd(), &status) != 0) fail("fstat", "vtensor");
  std::map<uintptr_t, Extent> extents;
  std::ifstream file("/proc/self/maps");
  for (std::string line; std::getline(file, line);) {
    if (line.find("memfd:") == std::string::npos) continue;
    uintptr_t start = 0;
    uintptr_t end = 0;
    uint64_t offset = 0;
    uint64_t inode = 0;
    char access[5] = {};
    constexpr const char* kForm = "%" SCNxPTR "-%" SCNxPTR " %4s %" SCNx64 " %*s %" SCNu64;
    if (std::sscanf(line.c_str(), kForm, &start, &end, access, &offset, &inode) != 5) continue;
    if (inode == status.st_ino && access[0] == 'r') extents[start] = {offset, end - start};
  }
  if (extents.erase(reinterpret_cast<uintptr_t>(window_)) == 0) return std::nullopt;
  return extents;
}

}  // namespace vtensor
