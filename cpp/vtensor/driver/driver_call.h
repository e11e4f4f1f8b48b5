// DriverCall: one call to a Driver as data, shared by the wrappers that watch or disturb calls.
// Plain values; no thread-safety of their own.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "vtensor/driver/driver.h"

namespace vtensor {

enum class CallKind {
  kReserve,
  kFree,
  kCreate,
  kRelease,
  kMap,
  kSetAccess,
  kUnmap,
  kCopy,
  kFill,
  kRead,
  kWrite,
  kRemap,
  kSend,
  kReceive,
};

inline constexpr size_t kNumCallKinds = 14;

inline constexpr std::array<std::string_view, kNumCallKinds> kCallNames = {
    "reserve", "free", "create", "release", "map",   "set_access", "unmap",
    "copy",    "fill", "read",   "write",   "remap", "send",       "receive"};

constexpr size_t call_idx(CallKind kind) { return static_cast<size_t>(kind); }
constexpr std::string_view call_name(CallKind kind) { return kCallNames[call_idx(kind)]; }

// Only the fields that a kind of call has are set; the others keep their defaults.
struct DriverCall {
  CallKind kind{};
  uintptr_t addr = 0;                 // reserve: the result, once it has succeeded
  Handle handle{};                    // create: the result; copy: the destination
  Handle source{};                    // copy
  std::span<const Handle> handles{};  // map, remap; valid only while the call lasts
  size_t offset_bytes = 0;            // in `handle`
  size_t source_offset_bytes = 0;     // in `source`
  size_t size_bytes = 0;
  size_t chunk_bytes = 0;  // create, release, map, unmap, remap
  size_t alignment_bytes = 0;
  Access access = Access::kNone;
  int64_t start_ns = 0;     // steady clock; set by wrappers that measure
  int64_t duration_ns = 0;  // the same
  bool ok = false;          // true once the inner driver has returned
};

// The clock of start_ns.
inline int64_t steady_now_ns() {
  using std::chrono::steady_clock;
  return std::chrono::nanoseconds(steady_clock::now().time_since_epoch()).count();
}

}  // namespace vtensor
