#include "vtensor/util/error.h"

#include <utility>

namespace vtensor {
namespace {

std::string out_of_memory_text(size_t asked_bytes, size_t free_bytes, size_t budget_bytes,
                               const std::string& detail) {
  return "out of KV memory: asked for " + std::to_string(asked_bytes) + " bytes, " +
         std::to_string(free_bytes) + " bytes obtainable, budget " + std::to_string(budget_bytes) +
         " bytes" + (detail.empty() ? "" : "; " + detail);
}

std::string driver_text(const std::string& call, int code, const std::string& code_name,
                        const std::string& arguments, const std::string& detail) {
  return call + "(" + arguments + ") failed with " + code_name + " (" + std::to_string(code) + ")" +
         (detail.empty() ? "" : ": " + detail);
}

}  // namespace

OutOfMemoryError::OutOfMemoryError(size_t asked_bytes, size_t free_bytes, size_t budget_bytes,
                                   const std::string& detail)
    : Error(out_of_memory_text(asked_bytes, free_bytes, budget_bytes, detail)),
      asked_bytes_(asked_bytes),
      free_bytes_(free_bytes),
      budget_bytes_(budget_bytes) {}

DriverError::DriverError(std::string call, int code, std::string code_name, std::string arguments,
                         const std::string& detail)
    : Error(driver_text(call, code, code_name, arguments, detail)),
      call_(std::move(call)),
      code_(code),
      code_name_(std::move(code_name)),
      arguments_(std::move(arguments)) {}

}  // namespace vtensor
