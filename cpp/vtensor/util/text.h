// How addresses, ranges and error numbers are printed in this folder's messages. No state.
#pragma once

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

namespace vtensor {

inline std::string hex_text(uint64_t value) {
  char buffer[19];
  std::snprintf(buffer, sizeof(buffer), "0x%llx", static_cast<unsigned long long>(value));
  return buffer;
}

// "addr=0x7f0000000000, size_bytes=2097152"
inline std::string span_text(uintptr_t addr, size_t size_bytes) {
  return "addr=" + hex_text(addr) + ", size_bytes=" + std::to_string(size_bytes);
}

// The symbol of an errno value. By hand because strerrorname_np is younger (glibc 2.32) than the
// oldest system that wheels are built for.
inline std::string errno_text(int code) {
  static constexpr std::pair<int, const char*> kNames[] = {
      {EACCES, "EACCES"}, {EAGAIN, "EAGAIN"}, {EBUSY, "EBUSY"},   {EFBIG, "EFBIG"},
      {EINTR, "EINTR"},   {EINVAL, "EINVAL"}, {EIO, "EIO"},       {EMFILE, "EMFILE"},
      {ENFILE, "ENFILE"}, {ENOENT, "ENOENT"}, {ENOMEM, "ENOMEM"}, {ENOSPC, "ENOSPC"},
      {ENOSYS, "ENOSYS"}, {EPERM, "EPERM"},
  };
  for (const auto& [value, name] : kNames) {
    if (value == code) return name;
  }
  return "errno";
}

}  // namespace vtensor
