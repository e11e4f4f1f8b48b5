// The stand-in's control functions for C++ tests: opened by path, as CudaDriver opens the library,
// and so the very same copy. REQUIRES: STANDIN_CUDA_PATH, set by CMake.
//
// Thread-safety: stateless; see standin_cuda.h.
#pragma once

#include <dlfcn.h>

#include <stdexcept>
#include <string>

#include "tests/cpp/standin_cuda/standin_cuda.h"

namespace vtensor {

class StandinControl {
 public:
  // fail("cuMemMap", 2, 999), live("mapping"), ...: see standin_cuda.h.
#define STANDIN_CONTROL(name) \
  decltype(&::standin_cuda_##name) const name = load<decltype(&::standin_cuda_##name)>(#name)
  STANDIN_CONTROL(fail);
  STANDIN_CONTROL(reset);
  STANDIN_CONTROL(calls);
  STANDIN_CONTROL(set_capacity);
  STANDIN_CONTROL(set_granularity);
  STANDIN_CONTROL(set_devices);
  STANDIN_CONTROL(set_attribute);
  STANDIN_CONTROL(forget_init);
  STANDIN_CONTROL(set_single_unmap);
  STANDIN_CONTROL(set_sync_timeout_ms);
  STANDIN_CONTROL(set_quiet);
  STANDIN_CONTROL(violations);
  STANDIN_CONTROL(last_violation);
  STANDIN_CONTROL(live);
  STANDIN_CONTROL(begin_kernel);
  STANDIN_CONTROL(end_kernel);
  STANDIN_CONTROL(running_kernels);
  STANDIN_CONTROL(launch);
#undef STANDIN_CONTROL

 private:
  template <typename Function>
  static Function load(const char* name) {
    void* library = dlopen(STANDIN_CUDA_PATH, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw std::runtime_error(dlerror());
    void* function = dlsym(library, (std::string("standin_cuda_") + name).c_str());
    if (function == nullptr) throw std::runtime_error(dlerror());
    return reinterpret_cast<Function>(function);
  }
};

}  // namespace vtensor
