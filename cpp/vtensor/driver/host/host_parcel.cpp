#include "vtensor/driver/host/host_parcel.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <cerrno>
#include <stdexcept>
#include <string>

#include "vtensor/driver/host/host_call.h"
#include "vtensor/util/error.h"
#include "vtensor/util/text.h"

namespace vtensor {
namespace {

// False: others hold some of it, and the lock is for one alone.
bool try_lock(int fd, short kind, uint64_t offset, size_t size_bytes) {
  struct flock range{};
  range.l_type = kind;
  range.l_whence = SEEK_SET;
  range.l_start = static_cast<off_t>(offset);
  range.l_len = static_cast<off_t>(size_bytes);
  if (uninterrupted([&] { return fcntl(fd, F_OFD_SETLK, &range); }) == 0) return true;
  if (errno == EAGAIN || errno == EACCES) return false;
  fail("fcntl(F_OFD_SETLK)",
       "offset=" + hex_text(offset) + ", size_bytes=" + std::to_string(size_bytes));
}

// Who tries for the write lock has it for a moment only.
void hold_range(int fd, uint64_t offset, size_t size_bytes) {
  if (try_lock(fd, F_RDLCK, offset, size_bytes)) return;
  throw std::invalid_argument("the chunk at " + hex_text(offset) +
                              " of a received file has been given up by who sent it");
}

// Another opening of the same file, whose locks are its own.
FileDescriptor open_again(int fd) {
  FileDescriptor opened(open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC));
  if (opened.get() < 0) fail("open", "/proc/self/fd/" + std::to_string(fd));
  return opened;
}

FileDescriptor open_received(int fd) {
  constexpr int kFixed = F_SEAL_SHRINK | F_SEAL_GROW;
  if (const int seals = fcntl(fd, F_GET_SEALS); seals < 0 || (seals & kFixed) != kFixed) {
    throw std::invalid_argument("a received file is no memfd of fixed size: it holds no chunks");
  }
  return open_again(fd);
}

size_t file_bytes(int fd) {
  struct stat status{};
  if (fstat(fd, &status) != 0) fail("fstat", "a received file");
  if (status.st_size == 0) throw std::invalid_argument("a received file is empty");
  return static_cast<size_t>(status.st_size);
}

}  // namespace

HostParcel::HostParcel(size_t capacity_bytes, size_t page_bytes)
    : memory_(capacity_bytes, page_bytes) {}

HostParcel::HostParcel(int received_fd, size_t page_bytes)
    : memory_(open_received(received_fd), file_bytes(received_fd), page_bytes), is_shared_(true) {}

std::optional<uint64_t> HostParcel::take_place(size_t chunk_bytes) {
  if (is_shared_) return std::nullopt;
  uint64_t offset = offsets_.empty() ? 0 : *offsets_.rbegin() + chunk_bytes;
  if (offset + chunk_bytes > memory_.space_bytes()) {  // a hole, where one is left
    offset = 0;
    for (auto taken = offsets_.begin(); taken != offsets_.end() && *taken == offset; ++taken) {
      offset += chunk_bytes;
    }
    if (offset + chunk_bytes > memory_.space_bytes()) return std::nullopt;
  }
  offsets_.insert(offset);
  return offset;
}

void HostParcel::hold(std::span<const uint64_t> offsets, size_t chunk_bytes) {
  if (offsets.empty()) throw std::invalid_argument("no chunk is in a received file");
  for (const uint64_t offset : offsets) {
    if (offset % chunk_bytes != 0 || offset > memory_.space_bytes() ||
        chunk_bytes > memory_.space_bytes() - offset) {
      throw std::invalid_argument("a chunk at " + hex_text(offset) + " is not in the file of " +
                                  std::to_string(memory_.space_bytes()) + " bytes received for it");
    }
    if (!offsets_.insert(offset).second) {
      throw std::invalid_argument("the chunk at " + hex_text(offset) + " was sent twice");
    }
    hold_range(memory_.fd(), offset, chunk_bytes);
  }
  if (memory_.resident_bytes() < offsets.size() * chunk_bytes) {
    throw std::invalid_argument("a received file lacks memory behind its chunks");
  }
}

FileDescriptor HostParcel::lend(std::span<const uint64_t> offsets, size_t chunk_bytes) {
  if (!is_shared_) {
    if (fcntl(memory_.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
      fail("fcntl(F_ADD_SEALS)", "vtensor");
    }
    for (const uint64_t offset : offsets_) hold_range(memory_.fd(), offset, chunk_bytes);
    is_shared_ = true;
  }
  FileDescriptor file = open_again(memory_.fd());
  for (const uint64_t offset : offsets) hold_range(file.get(), offset, chunk_bytes);
  return file;
}

// Two that give up at once refuse each other the lock; the second attempt comes when the first one
// of both has let go.
void HostParcel::drop(uint64_t offset, size_t chunk_bytes) {
  if (!is_shared_) return memory_.punch(offset, chunk_bytes);
  for (int attempt = 0; attempt < 2; ++attempt) {
    if (try_lock(memory_.fd(), F_WRLCK, offset, chunk_bytes)) {
      try {
        memory_.punch(offset, chunk_bytes);
      } catch (...) {
        try_lock(memory_.fd(), F_RDLCK, offset, chunk_bytes);
        throw;
      }
      attempt = 1;
    }
    try_lock(memory_.fd(), F_UNLCK, offset, chunk_bytes);
  }
}

}  // namespace vtensor
