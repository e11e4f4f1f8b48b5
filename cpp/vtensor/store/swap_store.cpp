#include "vtensor/store/swap_store.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "vtensor/util/error.h"

namespace vtensor {
namespace {

// FNV-1a over words: tells a damaged or mixed-up copy; no defence against an attacker.
uint64_t checksum_of(std::span<const std::byte> bytes) {
  constexpr uint64_t kPrime = 0x100000001b3ULL;
  uint64_t hash = 0xcbf29ce484222325ULL;
  size_t i = 0;
  for (; i + sizeof(uint64_t) <= bytes.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes.data() + i, sizeof(word));
    hash = (hash ^ word) * kPrime;
    hash ^= hash >> 29;
  }
  for (; i < bytes.size(); ++i) hash = (hash ^ static_cast<uint64_t>(bytes[i])) * kPrime;
  return hash;
}

[[noreturn]] void throw_errno(const char* call, const std::string& arguments) {
  const int code = errno;
  throw DriverError(call, code, std::strerror(code), arguments, "the swap file is not usable");
}

int open_unlinked(const std::string& directory) {
  std::string path = directory + "/flexinfer-swap-XXXXXX";
  const int file = ::mkostemp(path.data(), O_CLOEXEC);
  if (file < 0) throw_errno("mkostemp", path);
  ::unlink(path.c_str());
  return file;
}

// Runs pread or pwrite until all bytes are through.
template <typename Call, typename Byte>
void transfer(const char* name, Call call, int file, std::span<Byte> bytes, size_t offset) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t moved =
        call(file, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (moved < 0 && errno == EINTR) continue;
    if (moved <= 0) throw_errno(name, "offset=" + std::to_string(offset + done));
    done += static_cast<size_t>(moved);
  }
}

}  // namespace

SwapStore::SwapStore(size_t capacity_bytes, size_t max_put_bytes, const std::string& directory)
    : capacity_bytes_(capacity_bytes), max_put_bytes_(max_put_bytes) {
  if (!directory.empty()) file_ = open_unlinked(directory);
}

SwapStore::~SwapStore() {
  if (file_ >= 0) ::close(file_);
}

SwapStore::Ticket SwapStore::put(std::span<const std::byte> bytes) {
  Entry entry{bytes.size(), checksum_of(bytes), 1, {}};
  const bool recycled = !free_tickets_.empty();
  const Ticket ticket = recycled ? free_tickets_.pop_lowest() : next_ticket_;
  if (file_ < 0) {
    entry.bytes.assign(bytes.begin(), bytes.end());
  } else {
    try {
      transfer("pwrite", ::pwrite, file_, bytes, ticket * max_put_bytes_);
    } catch (...) {
      if (recycled) free_tickets_.insert(ticket);
      throw;
    }
  }
  if (!recycled) ++next_ticket_;
  used_bytes_ += bytes.size();
  entries_.emplace(ticket, std::move(entry));
  return ticket;
}

std::vector<std::byte> SwapStore::get(Ticket ticket) const {
  const Entry& entry = entries_.at(ticket);
  std::vector<std::byte> bytes = entry.bytes;
  if (file_ >= 0) {
    bytes.resize(entry.num_bytes);
    transfer("pread", ::pread, file_, std::span(bytes), ticket * max_put_bytes_);
  }
  if (checksum_of(bytes) != entry.checksum) {
    throw IntegrityError("swapped KV contents do not have their checksum any more");
  }
  return bytes;
}

void SwapStore::drop(Ticket ticket) {
  const auto entry = entries_.find(ticket);
  if (entry == entries_.end() || --entry->second.num_holders > 0) return;
  used_bytes_ -= entry->second.num_bytes;
  entries_.erase(entry);
  free_tickets_.insert(ticket);
}

}  // namespace vtensor
