// SwapStore: KV contents outside the device's memory, in host memory or in a file, with checksums.
//
// The file is unlinked as soon as it is open: nothing stays behind, whatever happens to the
// process. Thread-safety: none; the manager's mutex guards it.
//
// Invariant: used_bytes() is the sum of what has been put and not dropped by each of its holders,
// and
// <= capacity_bytes().
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "vtensor/util/id_set.h"

namespace vtensor {

class SwapStore {
 public:
  using Ticket = uint32_t;

  // `directory`: where the file goes; empty: host memory. No put() is larger than `max_put_bytes`.
  // Throws DriverError when the file cannot be made.
  SwapStore(size_t capacity_bytes, size_t max_put_bytes, const std::string& directory);
  ~SwapStore();
  SwapStore(const SwapStore&) = delete;
  SwapStore& operator=(const SwapStore&) = delete;

  size_t used_bytes() const { return used_bytes_; }
  size_t capacity_bytes() const { return capacity_bytes_; }
  bool is_in_memory() const { return file_ < 0; }
  bool has_room(size_t num_bytes) const { return num_bytes <= capacity_bytes_ - used_bytes_; }

  // Requires: has_room(bytes.size()).
  Ticket put(std::span<const std::byte> bytes);
  // The same ticket for one more holder: it lasts until each has dropped it.
  void share(Ticket ticket) { ++entries_.at(ticket).num_holders; }
  // The bytes of a ticket. Throws IntegrityError when they are not what was put.
  std::vector<std::byte> get(Ticket ticket) const;
  void drop(Ticket ticket);

 private:
  struct Entry {
    size_t num_bytes = 0;
    uint64_t checksum = 0;
    size_t num_holders = 1;
    std::vector<std::byte> bytes;  // empty when in the file
  };

  size_t capacity_bytes_;
  size_t max_put_bytes_;
  size_t used_bytes_ = 0;
  int file_ = -1;
  IdSet free_tickets_;
  Ticket next_ticket_ = 0;
  std::unordered_map<Ticket, Entry> entries_;
};

}  // namespace vtensor
