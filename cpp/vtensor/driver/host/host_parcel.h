// HostParcel: memory apart from the pool's, in a memfd of its own that other processes may hold.
//
//   this process                     the kernel                          another process
//   window, chunks mapped  ------->  memfd [chunk 0][chunk 1][ hole ]  <-------  window, mapped
//   file opened here: read lock ->        [locked  ][locked ]          <- read lock: file opened
//   there
//
// Who holds a chunk has a read lock on its bytes, by a file opened for itself (`man F_OFD_SETLK`):
// a reference count that the kernel keeps, over processes, and that goes with a process however it
// ends. Who gives a chunk up and can have the write lock was the last: it punches the hole. What is
// on its way is held by the file that travels.
//
// Thread-safety: members that change `offsets` are for the driver's mutex; the others make system
// calls and may be called from any thread, for different chunks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <span>

#include "vtensor/driver/host/host_memfd.h"

namespace vtensor {

class HostParcel {
 public:
  // An empty one. Throws DriverError.
  HostParcel(size_t capacity_bytes, size_t page_bytes);
  // What another process has sent. Throws std::invalid_argument where that is no memfd, or one that
  // may still shrink: touching it then would end this process.
  HostParcel(int received_fd, size_t page_bytes);

  HostMemfd& memory() noexcept { return memory_; }
  const HostMemfd& memory() const noexcept { return memory_; }

  // A place for one more chunk; nullopt: it is full, or no longer this process's alone.
  std::optional<uint64_t> take_place(size_t chunk_bytes);
  void forget_place(uint64_t offset) { offsets_.erase(offset); }
  const std::set<uint64_t>& offsets() const noexcept { return offsets_; }

  // Makes these chunks of another process's memory this process's too, all or none.
  void hold(std::span<const uint64_t> offsets, size_t chunk_bytes);
  // A file that shows this memory and holds these chunks. Throws DriverError.
  FileDescriptor lend(std::span<const uint64_t> offsets, size_t chunk_bytes);
  // Gives a chunk up: its memory goes back to the system if nobody else holds it.
  void drop(uint64_t offset, size_t chunk_bytes);

 private:
  HostMemfd memory_;
  std::set<uint64_t> offsets_;  // of chunks that this process has
  bool is_shared_ = false;      // others may hold some of it
};

}  // namespace vtensor
