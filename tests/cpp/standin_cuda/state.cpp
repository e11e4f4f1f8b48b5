#include "state.h"

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace standin {
namespace {

uint64_t number_from(const char* variable, uint64_t fallback) {
  const char* text = std::getenv(variable);
  return text == nullptr || *text == '\0' ? fallback : std::strtoull(text, nullptr, 0);
}

void read_injections(State& s) {
  const char* text = std::getenv("STANDIN_CUDA_FAIL");
  std::istringstream items(text == nullptr ? "" : text);
  for (std::string item; std::getline(items, item, ',');) {
    std::istringstream fields(item);
    std::string function, nth, code;
    if (std::getline(fields, function, ':') && std::getline(fields, nth, ':') &&
        std::getline(fields, code, ':')) {
      s.injections.emplace(function, Injection{std::strtoull(nth.c_str(), nullptr, 0),
                                               static_cast<CUresult>(std::atoi(code.c_str()))});
    } else {
      std::fprintf(stderr, "STANDIN CUDA: cannot read STANDIN_CUDA_FAIL item '%s'\n", item.c_str());
    }
  }
}

}  // namespace

void State::read_environment() {
  capacity_bytes = number_from("STANDIN_CUDA_CAPACITY_BYTES", uint64_t{8} << 30);
  granularity = number_from("STANDIN_CUDA_GRANULARITY_BYTES", kDefaultGranularity);
  if (granularity < kPageBytes || (granularity & (granularity - 1)) != 0) {
    std::fprintf(stderr, "STANDIN CUDA: granularity %zu is not a power of two of whole pages\n",
                 granularity);
    granularity = kDefaultGranularity;
  }
  num_devices = static_cast<int>(number_from("STANDIN_CUDA_DEVICES", kMaxDevices));
  if (num_devices < 0 || num_devices > kMaxDevices) num_devices = kMaxDevices;
  attributes = {{CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 4},
                {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
                {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
                {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 1},
                {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1}};
  read_injections(*this);
}

// Never destroyed: threads and atexit handlers of the test may still call the driver.
State& state() {
  static State* const instance = [] {
    auto* s = new State;
    s->read_environment();
    return s;
  }();
  return *instance;
}

std::vector<int>& context_stack() {
  thread_local std::vector<int> stack;
  return stack;
}

int current_device() { return context_stack().empty() ? -1 : context_stack().back(); }

CUresult enter(const char* function, Needs needs) {
  State& s = state();
  const uint64_t call = ++s.calls[function];
  const auto [first, last] = s.injections.equal_range(function);
  for (auto it = first; it != last; ++it) {
    if (it->second.at_call == 0) return it->second.code;
    if (it->second.at_call == call) {
      const CUresult code = it->second.code;
      s.injections.erase(it);
      return code;
    }
  }
  if (needs != Needs::kNothing && !s.initialised) {
    return violation(CUDA_ERROR_NOT_INITIALIZED, function, "cuInit has not been called");
  }
  if (needs == Needs::kContext && current_device() < 0) {
    return violation(CUDA_ERROR_INVALID_CONTEXT, function, "no context is current on this thread");
  }
  if (needs == Needs::kContext && s.num_retains[current_device()] == 0) {
    return violation(CUDA_ERROR_INVALID_CONTEXT, function, "the current context was released");
  }
  return CUDA_SUCCESS;
}

CUresult violation(CUresult code, const char* function, const std::string& text) {
  State& s = state();
  ++s.num_violations;
  s.last_violation = std::string(function) + ": " + text;
  if (!s.quiet) std::fprintf(stderr, "STANDIN CUDA VIOLATION: %s\n", s.last_violation.c_str());
  const char* abort_wanted = std::getenv("STANDIN_CUDA_ABORT");
  if (abort_wanted != nullptr && std::string(abort_wanted) == "1") std::abort();
  return code;
}

std::string hex(uint64_t value) {
  std::ostringstream out;
  out << "0x" << std::hex << value;
  return out.str();
}

std::string range_text(uint64_t addr, size_t size_bytes) {
  return "[" + hex(addr) + ", +" + hex(size_bytes) + ")";
}

}  // namespace standin
