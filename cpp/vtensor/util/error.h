// The exception tree of the core. Expected shortage is a value, never one of these.
//
//   std::runtime_error
//   └── Error                    everything the core raises on purpose   (VTensorError in Python)
//       ├── OutOfMemoryError     physical memory or the budget is exhausted      (+ MemoryError)
//       ├── DriverError          a driver call failed: call, code, arguments
//       │   └── MappingLimitError  the system's limit on mappings is near: names limit and remedy
//       ├── ReleasedError        a handle was used after its release              (+ LookupError)
//       └── IntegrityError       check_integrity() found a broken invariant
//
// Caller mistakes are std::invalid_argument (ValueError) and std::out_of_range (LookupError).
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace vtensor {

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

class OutOfMemoryError : public Error {
 public:
  // Sizes in bytes. `detail` says who ran out and what would help.
  OutOfMemoryError(size_t asked_bytes, size_t free_bytes, size_t budget_bytes,
                   const std::string& detail);

  size_t asked_bytes() const noexcept { return asked_bytes_; }
  size_t free_bytes() const noexcept { return free_bytes_; }
  size_t budget_bytes() const noexcept { return budget_bytes_; }

 private:
  size_t asked_bytes_;
  size_t free_bytes_;
  size_t budget_bytes_;
};

class DriverError : public Error {
 public:
  // `call`: the failed system or driver function; `code`: errno or CUresult; `code_name`: its
  // symbol
  // ("ENOMEM", "CUDA_ERROR_INVALID_VALUE"); `arguments`: printable, e.g. "addr=0x7f..,
  // size=2097152".
  DriverError(std::string call, int code, std::string code_name, std::string arguments,
              const std::string& detail = "");

  const std::string& call() const noexcept { return call_; }
  int code() const noexcept { return code_; }
  const std::string& code_name() const noexcept { return code_name_; }
  const std::string& arguments() const noexcept { return arguments_; }

 private:
  std::string call_;
  int code_;
  std::string code_name_;
  std::string arguments_;
};

class MappingLimitError : public DriverError {
  using DriverError::DriverError;
};

class ReleasedError : public Error {
  using Error::Error;
};

class IntegrityError : public Error {
  using Error::Error;
};

}  // namespace vtensor
