// The control functions (standin_cuda.h) and the report at exit.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#include "standin_cuda.h"
#include "state.h"

namespace {

using standin::State;
using standin::state;

constexpr const char* kKinds[] = {"reservation", "allocation", "handle", "mapping",
                                  "context",     "stream",     "event"};

uint64_t live_of_kind(const State& s, const std::string& kind) {
  if (kind == "reservation") return s.reservations.size();
  if (kind == "allocation") return s.num_allocations;
  if (kind == "handle") return s.handles.size();
  if (kind == "mapping") return s.mappings.size();
  if (kind == "event") return s.events.size();
  uint64_t count = 0;
  for (int device = 0; device < standin::kMaxDevices; ++device) {
    if (kind == "context") count += static_cast<uint64_t>(s.num_retains[device]);
    if (kind == "bytes") count += s.used_bytes[device];
  }
  if (kind == "stream") {
    for (const auto& [handle, stream] : s.streams) {
      if (handle >= 0x1000) ++count;  // default streams are nobody's
    }
  }
  return count;
}

uint64_t live(const State& s, const char* kind) {
  if (kind != nullptr) return live_of_kind(s, kind);
  uint64_t count = 0;
  for (const char* each : kKinds) count += live_of_kind(s, each);
  return count;
}

__attribute__((destructor)) void report_at_exit() {
  const char* wanted = std::getenv("STANDIN_CUDA_REPORT");
  if (wanted == nullptr || *wanted == '\0') return;
  State& s = state();
  const std::lock_guard lock(s.mutex);
  std::fprintf(stderr, "STANDIN CUDA at exit: %llu violation(s)",
               static_cast<unsigned long long>(s.num_violations));
  for (const char* kind : kKinds) {
    std::fprintf(stderr, ", %s %llu", kind, static_cast<unsigned long long>(live_of_kind(s, kind)));
  }
  std::fprintf(stderr, "\n");
  const bool bad = s.num_violations != 0 || live(s, nullptr) != 0;
  if (std::string(wanted) == "fail" && bad) _exit(97);
}

}  // namespace

STANDIN_EXPORT void standin_cuda_fail(const char* function, int nth, int code) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const uint64_t at_call = nth == 0 ? 0 : s.calls[function] + static_cast<uint64_t>(nth);
  s.injections.emplace(function, standin::Injection{at_call, static_cast<standin::CUresult>(code)});
}

STANDIN_EXPORT void standin_cuda_reset() {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  s.calls.clear();
  s.injections.clear();
  s.num_violations = 0;
  s.last_violation.clear();
  s.quiet = false;
  s.single_unmap = false;
  s.sync_timeout_ms = 20000;
  s.read_environment();
}

STANDIN_EXPORT uint64_t standin_cuda_calls(const char* function) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  uint64_t count = 0;
  for (const auto& [name, calls] : s.calls) {
    if (function == nullptr || name == function) count += calls;
  }
  return count;
}

STANDIN_EXPORT void standin_cuda_set_capacity(uint64_t bytes_per_device) {
  const std::lock_guard lock(state().mutex);
  state().capacity_bytes = bytes_per_device;
}

STANDIN_EXPORT void standin_cuda_set_granularity(uint64_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().granularity = bytes;
}

STANDIN_EXPORT void standin_cuda_set_devices(int num_devices) {
  const std::lock_guard lock(state().mutex);
  state().num_devices = num_devices < standin::kMaxDevices ? num_devices : standin::kMaxDevices;
}

STANDIN_EXPORT void standin_cuda_set_attribute(int attribute, int value) {
  const std::lock_guard lock(state().mutex);
  state().attributes[attribute] = value;
}

STANDIN_EXPORT void standin_cuda_forget_init() {
  const std::lock_guard lock(state().mutex);
  state().initialised = false;
}

STANDIN_EXPORT void standin_cuda_set_single_unmap(int on) {
  const std::lock_guard lock(state().mutex);
  state().single_unmap = on != 0;
}

STANDIN_EXPORT void standin_cuda_set_sync_timeout_ms(int milliseconds) {
  const std::lock_guard lock(state().mutex);
  state().sync_timeout_ms = milliseconds;
}

STANDIN_EXPORT void standin_cuda_set_quiet(int on) {
  const std::lock_guard lock(state().mutex);
  state().quiet = on != 0;
}

STANDIN_EXPORT uint64_t standin_cuda_violations() {
  const std::lock_guard lock(state().mutex);
  return state().num_violations;
}

STANDIN_EXPORT const char* standin_cuda_last_violation() {
  thread_local std::string text;
  const std::lock_guard lock(state().mutex);
  text = state().last_violation;
  return text.c_str();
}

STANDIN_EXPORT uint64_t standin_cuda_live(const char* kind) {
  const std::lock_guard lock(state().mutex);
  return live(state(), kind);
}
