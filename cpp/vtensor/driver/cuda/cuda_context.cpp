#include "vtensor/driver/cuda/cuda_context.h"

#include <array>
#include <stdexcept>
#include <utility>

#include "vtensor/util/error.h"

namespace vtensor {

CudaContext::CudaContext(std::shared_ptr<const CudaApi> api, int device_index)
    : api_(std::move(api)), device_index_(device_index) {
  int num_devices = 0;
  api_->check(api_->cuDeviceGetCount(&num_devices), "cuDeviceGetCount", [] { return ""; });
  if (device_index < 0 || device_index >= num_devices) {
    throw std::invalid_argument("CUDA device index " + std::to_string(device_index) +
                                " is out of range: this process sees " +
                                std::to_string(num_devices) + " device(s)");
  }
  api_->check(api_->cuDeviceGet(&device_, device_index), "cuDeviceGet",
              [&] { return cuda_args("ordinal", device_index); });
  require_vmm();
  api_->check(api_->cuDevicePrimaryCtxRetain(&context_, device_), "cuDevicePrimaryCtxRetain",
              [&] { return cuda_args("device", device_); });
}

// A failure cannot be reported from here; at process exit the driver may be gone already.
CudaContext::~CudaContext() { (void)api_->cuDevicePrimaryCtxRelease(device_); }

void CudaContext::require_vmm() const {
  int supported = 0;
  const auto code = api_->cuDeviceGetAttribute(
      &supported, cuda::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_);
  // A driver that does not know the attribute answers "invalid value": the same news as a plain 0.
  const bool unknown_attribute = code == cuda::CUDA_ERROR_INVALID_VALUE;
  const auto arguments = [&] {
    return cuda_args("attribute", "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED", "device", device_);
  };
  if (!unknown_attribute) api_->check(code, "cuDeviceGetAttribute", arguments);
  if (supported == 0) {
    api_->fail(cuda::CUDA_ERROR_NOT_SUPPORTED, "cuDeviceGetAttribute", arguments(),
               "device " + std::to_string(device_index_) + " (" + device_name() + ", CUDA driver " +
                   api_->driver_version() +
                   ") has no virtual memory management: it needs a driver with CUDA 10.2 or later, "
                   "and not every virtual GPU has it; use the host driver instead");
  }
}

bool CudaContext::has(cuda::CUdevice_attribute attribute) const {
  int value = 0;
  api_->check(api_->cuDeviceGetAttribute(&value, attribute, device_), "cuDeviceGetAttribute", [&] {
    return cuda_args("attribute", static_cast<int>(attribute), "device", device_);
  });
  return value != 0;
}

std::string CudaContext::device_name() const {
  std::array<char, 256> name{};
  const auto code = api_->cuDeviceGetName(name.data(), static_cast<int>(name.size()), device_);
  return code == cuda::CUDA_SUCCESS ? std::string(name.data()) : "unknown device";
}

CudaContext::Scope::Scope(const CudaContext& context) : api_(context.api()) {
  api_.check(api_.cuCtxPushCurrent(context.context_), "cuCtxPushCurrent",
             [&] { return cuda_args("device", context.device_); });
  const auto code = api_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
  if (code != cuda::CUDA_SUCCESS) {
    cuda::CUcontext popped = nullptr;
    (void)api_.cuCtxPopCurrent(&popped);
    api_.fail(code, "cuThreadExchangeStreamCaptureMode", cuda_args("mode", "RELAXED"));
  }
}

CudaContext::Scope::~Scope() {
  (void)api_.cuThreadExchangeStreamCaptureMode(&capture_mode_);
  cuda::CUcontext popped = nullptr;
  (void)api_.cuCtxPopCurrent(&popped);
}

}  // namespace vtensor
