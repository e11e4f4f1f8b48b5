// HostMemfd: the host driver's memory, one sparse memfd, and a window that shows all of it.
//
//   memfd    [ memory ][ hole ][ memory ] ...        sparse: its size costs nothing
//   window   [ all of it, read-write, for good ]     addresses only; where contents are changed
//
// Which extents are in use is the caller's affair (ledger.h), and so is a bound on them.
//
// Thread-safety: all members may be called from any thread, for extents that do not overlap.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "vtensor/util/file_descriptor.h"
#include "vtensor/util/units.h"

namespace vtensor {

inline constexpr size_t kHugePageBytes = 2 * kMiB;

class HostMemfd {
 public:
  struct Extent {
    uint64_t offset;
    size_t size_bytes;
  };

  // For up to `capacity_bytes` of memory. Throws DriverError when the system refuses the memfd or
  // the window.
  HostMemfd(size_t capacity_bytes, size_t page_bytes);
  // What another process has given us, `space_bytes` of it. Throws DriverError.
  HostMemfd(FileDescriptor file, size_t space_bytes, size_t page_bytes);
  ~HostMemfd();  // the memory goes back when the last mapping of it is gone
  HostMemfd(const HostMemfd&) = delete;
  HostMemfd& operator=(const HostMemfd&) = delete;

  int fd() const noexcept { return file_.get(); }
  size_t space_bytes() const noexcept { return space_bytes_; }
  std::byte* at(uint64_t offset) const noexcept { return window_ + offset; }

  // Backs an extent with zeroed memory, by small pages. Throws OutOfMemoryError or DriverError with
  // a part of it done: punch() takes that back.
  void commit_small(uint64_t offset, size_t size_bytes);
  // By huge pages. False: there are none to be had now, and a part may be done by small ones.
  // REQUIRES: multiples of kHugePageBytes.
  bool commit_huge(uint64_t offset, size_t size_bytes);
  // Gives the memory of an extent back to the system. Throws DriverError.
  void punch(uint64_t offset, size_t size_bytes);

  // Shows an extent at `addr` too, read-write, in the place of what is mapped there. Throws
  // MappingLimitError or DriverError.
  void map_at(uintptr_t addr, uint64_t offset, size_t size_bytes) const;
  // The same, but a page that is written there becomes a copy that only these addresses show.
  void map_private_at(uintptr_t addr, uint64_t offset, size_t size_bytes) const;

  // Takes an extent out of the window's page tables once it has been touched there; the memory
  // stays. Else it counts twice in the process's resident set, here and where it is mapped.
  void leave_window(uint64_t offset, size_t size_bytes) const noexcept;

  size_t resident_bytes() const;  // what the system holds for the memfd
  // Where the system shows it (/proc/self/maps), the window left out; nothing if it does not tell.
  // Slow (0.5 us per mapping of the process); torn where others map meanwhile.
  std::optional<std::map<uintptr_t, Extent>> shown() const;

 private:
  void create_file();
  void open_window();

  const size_t capacity_bytes_;
  const size_t page_bytes_;
  const size_t space_bytes_;  // of the file and the window
  FileDescriptor file_;
  std::byte* window_ = nullptr;
};

}  // namespace vtensor
