#include "vtensor/driver/cuda/cuda_api.h"

#include <dlfcn.h>

#include <cstdlib>
#include <utility>

#include "vtensor/util/error.h"

namespace vtensor {
namespace {

constexpr char kPathVariable[] = "FLEXINFER_LIBCUDA";

std::string library_path(const std::string& path) {
  if (!path.empty()) return path;
  const char* from_environment = std::getenv(kPathVariable);
  if (from_environment != nullptr && *from_environment != '\0') return from_environment;
  return "libcuda.so.1";
}

void* open_library(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* reason = dlerror();
    throw DriverError("dlopen", -1, "LIBCUDA_NOT_FOUND", cuda_args("path", path),
                      std::string(reason == nullptr ? "" : reason) +
                          "; no NVIDIA driver here? Use the host driver, or name the library in " +
                          kPathVariable);
  }
  return library;
}

// The function behind an unsuffixed name: by cuGetProcAddress where there is one, because only it
// chooses the variant of the version asked for; by its suffixed symbol on drivers before 12.0.
void* find_function(void* library, const char* name, const char* symbol) {
  static_assert(sizeof(void*) == sizeof(cuda::cuGetProcAddress_t));
  const auto get_proc_address =
      reinterpret_cast<cuda::cuGetProcAddress_t>(dlsym(library, "cuGetProcAddress_v2"));
  void* function = nullptr;
  if (get_proc_address != nullptr) {
    cuda::CUdriverProcAddressQueryResult status{};
    const auto code = get_proc_address(name, &function, cuda::kCudaAbiVersion, 0, &status);
    if (code != cuda::CUDA_SUCCESS) function = nullptr;
  }
  return function != nullptr ? function : dlsym(library, symbol);
}

void* require_function(void* library, const std::string& path, const char* name,
                       const char* symbol) {
  void* function = find_function(library, name, symbol);
  if (function == nullptr) {
    throw DriverError("dlsym", cuda::CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND",
                      cuda_args("path", path, "symbol", symbol),
                      "this driver is too old for virtual memory management: it needs CUDA 10.2 "
                      "(driver 440.33) or later");
  }
  return function;
}

}  // namespace

std::shared_ptr<const CudaApi> CudaApi::load(const std::string& path) {
  const std::string resolved = library_path(path);
  std::shared_ptr<const CudaApi> api(new CudaApi(resolved, open_library(resolved)));
  api->initialise();
  return api;
}

CudaApi::CudaApi(std::string path, void* library) : path_(std::move(path)) {
#define VTENSOR_CUDA_LOAD(name, symbol, params) \
  name = reinterpret_cast<cuda::name##_t>(require_function(library, path_, #name, symbol));
  VTENSOR_CUDA_FUNCTIONS(VTENSOR_CUDA_LOAD)
#undef VTENSOR_CUDA_LOAD
}

void CudaApi::initialise() const {
  const auto code = cuInit(0);
  if (code == cuda::CUDA_SUCCESS) return;
  const char* devices = std::getenv("CUDA_VISIBLE_DEVICES");
  fail(code, "cuInit", cuda_args("flags", 0),
       path_ + " was opened, but no CUDA device can be used (CUDA_VISIBLE_DEVICES=" +
           (devices == nullptr ? "unset" : devices) + "); use the host driver instead");
}

void CudaApi::fail(cuda::CUresult code, const char* call, const std::string& arguments,
                   const std::string& detail) const {
  throw DriverError(call, code, error_name(code), arguments, detail);
}

std::string CudaApi::error_name(cuda::CUresult code) const {
  const char* name = nullptr;
  if (cuGetErrorName(code, &name) != cuda::CUDA_SUCCESS || name == nullptr) {
    return "CUDA_ERROR_" + std::to_string(static_cast<int>(code));
  }
  return name;
}

std::string CudaApi::driver_version() const {
  int version = 0;
  if (cuDriverGetVersion(&version) != cuda::CUDA_SUCCESS) return "unknown";
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace vtensor
