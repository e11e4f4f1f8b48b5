// The host driver's handles: an offset in the pool's memfd, or a parcel and an offset in that.
//
//   bit 63   1: apart, in a parcel      bits 40 .. 62   which parcel      bits 0 .. 39   offset
#pragma once

#include <cstddef>
#include <cstdint>

#include "vtensor/driver/driver.h"
#include "vtensor/util/units.h"

namespace vtensor {

inline constexpr uint64_t kApartBit = uint64_t{1} << 63;
inline constexpr int kParcelShift = 40;
// Short of all that an offset can say, so that chunks of two parcels are never consecutive numbers.
inline constexpr size_t kMaxParcelBytes = (size_t{1} << kParcelShift) - kGiB;

constexpr uint64_t number(Handle handle) { return static_cast<uint64_t>(handle); }
constexpr bool is_apart(Handle handle) { return (number(handle) & kApartBit) != 0; }
constexpr uint32_t parcel_idx(Handle handle) {
  return static_cast<uint32_t>((number(handle) & ~kApartBit) >> kParcelShift);
}
constexpr uint64_t parcel_offset(Handle handle) {
  return number(handle) & ((uint64_t{1} << kParcelShift) - 1);
}
constexpr Handle apart_handle(uint32_t parcel, uint64_t offset) {
  return Handle{kApartBit | (uint64_t{parcel} << kParcelShift) | offset};
}

}  // namespace vtensor
