// HostDriver: what the system shows, held against the driver's books.
#include <algorithm>
#include <iterator>
#include <string>

#include "vtensor/driver/host/host_driver.h"
#include "vtensor/driver/host/host_handle.h"
#include "vtensor/util/error.h"
#include "vtensor/util/text.h"

namespace vtensor {
namespace {

std::optional<Handle> shown_at(const std::map<uintptr_t, HostMemfd::Extent>& extents,
                               uintptr_t addr) {
  const auto above = extents.upper_bound(addr);
  if (above == extents.begin()) return std::nullopt;
  const auto& [start, extent] = *std::prev(above);
  if (addr - start >= extent.size_bytes) return std::nullopt;
  return Handle{extent.offset + (addr - start)};
}

std::string text(std::optional<Handle> handle) {
  return handle ? "the chunk at " + hex_text(static_cast<uint64_t>(*handle)) : "nothing";
}

}  // namespace

// What the system shows at `addr`, of the file where the driver has mapped something. Each file is
// read when it is first asked for; nullopt in `read`: it does not tell.
std::optional<Handle> HostDriver::shown_handle(uintptr_t addr, Readings& read) const {
  const std::optional<Handle> mapped = mapped_at(addr);
  const bool apart = mapped && is_apart(*mapped);
  const uint64_t file = apart ? number(apart_handle(parcel_idx(*mapped), 0)) : 0;
  if (!read.contains(file)) read[file] = extent_of_mapped(file).memory.shown();
  if (!read[file]) return mapped;
  const std::optional<Handle> shown = shown_at(*read[file], addr);
  return apart && shown ? Handle{file + number(*shown)} : shown;
}

// Read again where something is wrong: a mapping that another thread makes elsewhere may have torn
// the first reading.
void HostDriver::verify_mapped(std::span<const uintptr_t> addrs) const {
  for (int readings_left = 3;;) {
    Readings read;
    const auto wrong = std::ranges::find_if(
        addrs, [&](uintptr_t addr) { return shown_handle(addr, read) != mapped_at(addr); });
    if (wrong == addrs.end()) return;
    if (--readings_left > 0) continue;
    throw IntegrityError("the system shows " + text(shown_handle(*wrong, read)) + " at " +
                         hex_text(*wrong) + ", where the driver has mapped " +
                         text(mapped_at(*wrong)));
  }
}

}  // namespace vtensor
