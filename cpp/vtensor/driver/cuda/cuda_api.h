// CudaApi: libcuda opened at run time, as a table of function pointers.
//
// Thread-safety: immutable after load(); all members may be used from any thread.
//
// Invariants:
//  1. Every pointer of the table is set, and cuInit() has succeeded: load() throws otherwise.
//  2. The library is never closed: the driver keeps threads and exit handlers of its own, so
//     unloading it under them would crash, and its memory is shared with torch anyway.
//  3. Every failed driver call leaves here as DriverError with call, code, symbol and arguments.
#pragma once

#include <memory>
#include <sstream>
#include <string>

#include "vtensor/driver/cuda/cuda_abi.h"

namespace vtensor {

// "addr=0x7f.., size=2097152" from name-value pairs; integers named *addr and *ptr print as hex.
template <typename... Pairs>
std::string cuda_args(const Pairs&... pairs);

class CudaApi {
 public:
  // Opens `path`, or else $FLEXINFER_LIBCUDA, or else "libcuda.so.1", and initialises the driver.
  // Throws DriverError when there is no library, no device, or a driver without the VMM functions.
  static std::shared_ptr<const CudaApi> load(const std::string& path = "");

#define VTENSOR_CUDA_MEMBER(name, symbol, params) cuda::name##_t name = nullptr;
  VTENSOR_CUDA_FUNCTIONS(VTENSOR_CUDA_MEMBER)
#undef VTENSOR_CUDA_MEMBER

  // Throws DriverError unless `code` is success. `arguments` is called only on failure, because
  // printing them costs more than the driver call in the map path.
  template <typename Arguments>
  void check(cuda::CUresult code, const char* call, const Arguments& arguments) const {
    if (code != cuda::CUDA_SUCCESS) [[unlikely]] {
      fail(code, call, arguments());
    }
  }

  [[noreturn]] void fail(cuda::CUresult code, const char* call, const std::string& arguments,
                         const std::string& detail = "") const;

  // "CUDA_ERROR_INVALID_VALUE"; for a code that the driver does not know, "CUDA_ERROR_<number>".
  std::string error_name(cuda::CUresult code) const;

  // The driver's CUDA version as text, "12.8"; "unknown" where it will not say.
  std::string driver_version() const;

  const std::string& path() const noexcept { return path_; }

 private:
  CudaApi(std::string path, void* library);

  void initialise() const;

  std::string path_;
};

namespace internal {

inline void append_cuda_args(std::ostringstream&) {}

template <typename Value, typename... Rest>
void append_cuda_args(std::ostringstream& out, const std::string& name, const Value& value,
                      const Rest&... rest) {
  const bool is_address = name.ends_with("addr") || name.ends_with("ptr");
  out << (out.tellp() == 0 ? "" : ", ") << name << '=' << (is_address ? "0x" : "")
      << (is_address ? std::hex : std::dec) << value << std::dec;
  append_cuda_args(out, rest...);
}

}  // namespace internal

template <typename... Pairs>
std::string cuda_args(const Pairs&... pairs) {
  std::ostringstream out;
  internal::append_cuda_args(out, pairs...);
  return out.str();
}

}  // namespace vtensor
