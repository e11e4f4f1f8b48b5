// HostDriver: what is in chunks.
#include <cstring>

#include "vtensor/driver/host/host_driver.h"
#include "vtensor/driver/host/host_handle.h"

namespace vtensor {

// A chunk's bytes have been touched in the window: see HostMemfd::leave_window(). Only where a
// chunk is huge pages, which come back by one fault each (3 us); small ones would cost 1 us each.
void HostDriver::forget(Handle handle) const noexcept {
  if (!huge_pages_) return;
  size_t size_bytes = 0;
  {
    const std::lock_guard lock(mutex_);
    size_bytes = ledger_.chunk_bytes();
  }
  if (size_bytes % kHugePageBytes != 0) return;
  const Extent extent = extent_of_mapped(number(handle));
  extent.memory.leave_window(extent.offset, size_bytes);
}

std::byte* HostDriver::bytes_at(Handle handle, size_t offset, size_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  ledger_.require_bytes(handle, offset, size_bytes);
  const Extent extent = extent_of(number(handle));
  return extent.memory.at(extent.offset + offset);
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

}  // namespace vtensor
