// Initialisation, devices, contexts, error names and cuGetProcAddress.
#include <algorithm>
#include <cstring>

#include "state.h"

namespace {

using namespace standin;  // NOLINT

// A primary context's address: device d's is &context_places[d].
char context_places[kMaxDevices];

CUcontext context_of(int device) { return reinterpret_cast<CUcontext>(&context_places[device]); }

int device_of(CUcontext context) {
  for (int device = 0; device < kMaxDevices; ++device) {
    if (context == context_of(device)) return device;
  }
  return -1;
}

bool is_device(int device) { return device >= 0 && device < state().num_devices; }

CUresult bad_device(const char* function, int device) {
  return violation(CUDA_ERROR_INVALID_DEVICE, function,
                   "device " + std::to_string(device) + " does not exist");
}

struct ErrorText {
  CUresult code;
  const char* name;
};

constexpr ErrorText kErrors[] = {
#define STANDIN_ERROR(name) {name, #name}
    STANDIN_ERROR(CUDA_SUCCESS),
    STANDIN_ERROR(CUDA_ERROR_INVALID_VALUE),
    STANDIN_ERROR(CUDA_ERROR_OUT_OF_MEMORY),
    STANDIN_ERROR(CUDA_ERROR_NOT_INITIALIZED),
    STANDIN_ERROR(CUDA_ERROR_DEINITIALIZED),
    STANDIN_ERROR(CUDA_ERROR_NO_DEVICE),
    STANDIN_ERROR(CUDA_ERROR_INVALID_DEVICE),
    STANDIN_ERROR(CUDA_ERROR_INVALID_CONTEXT),
    STANDIN_ERROR(CUDA_ERROR_INVALID_HANDLE),
    STANDIN_ERROR(CUDA_ERROR_NOT_FOUND),
    STANDIN_ERROR(CUDA_ERROR_NOT_READY),
    STANDIN_ERROR(CUDA_ERROR_ILLEGAL_ADDRESS),
    STANDIN_ERROR(CUDA_ERROR_LAUNCH_TIMEOUT),
    STANDIN_ERROR(CUDA_ERROR_NOT_PERMITTED),
    STANDIN_ERROR(CUDA_ERROR_NOT_SUPPORTED),
    STANDIN_ERROR(CUDA_ERROR_UNKNOWN),
#undef STANDIN_ERROR
};

CUresult error_text(const char* function, CUresult error, const char** text) {
  STANDIN_ENTER(function, Needs::kNothing);
  for (const auto& entry : kErrors) {
    if (entry.code == error) {
      *text = entry.name;
      return CUDA_SUCCESS;
    }
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

STANDIN_EXPORT CUresult cuInit(unsigned int flags) {
  STANDIN_ENTER("cuInit", Needs::kNothing);
  if (flags != 0) return violation(CUDA_ERROR_INVALID_VALUE, "cuInit", "flags must be 0");
  if (state().num_devices == 0) return CUDA_ERROR_NO_DEVICE;
  state().initialised = true;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDriverGetVersion(int* version) {
  STANDIN_ENTER("cuDriverGetVersion", Needs::kNothing);
  *version = kDriverVersion;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  return error_text("cuGetErrorName", error, name);
}

STANDIN_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return error_text("cuGetErrorString", error, text);
}

STANDIN_EXPORT CUresult cuDeviceGetCount(int* count) {
  STANDIN_ENTER("cuDeviceGetCount", Needs::kInit);
  *count = state().num_devices;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  STANDIN_ENTER("cuDeviceGet", Needs::kInit);
  if (!is_device(ordinal)) return bad_device("cuDeviceGet", ordinal);
  *device = ordinal;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDeviceGetName(char* name, int capacity, CUdevice device) {
  STANDIN_ENTER("cuDeviceGetName", Needs::kInit);
  if (!is_device(device)) return bad_device("cuDeviceGetName", device);
  const std::string text = "Stand-in GPU " + std::to_string(device);
  if (capacity <= static_cast<int>(text.size())) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(name, text.c_str(), text.size() + 1);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                             CUdevice device) {
  STANDIN_ENTER("cuDeviceGetAttribute", Needs::kInit);
  if (!is_device(device)) return bad_device("cuDeviceGetAttribute", device);
  const auto it = state().attributes.find(attribute);
  if (it == state().attributes.end()) return CUDA_ERROR_INVALID_VALUE;
  *value = it->second;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  STANDIN_ENTER("cuDevicePrimaryCtxRetain", Needs::kInit);
  if (!is_device(device)) return bad_device("cuDevicePrimaryCtxRetain", device);
  ++state().num_retains[device];
  *context = context_of(device);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  STANDIN_ENTER("cuDevicePrimaryCtxRelease", Needs::kInit);
  if (device < 0 || device >= kMaxDevices) return bad_device("cuDevicePrimaryCtxRelease", device);
  if (state().num_retains[device] == 0) {
    return violation(CUDA_ERROR_INVALID_CONTEXT, "cuDevicePrimaryCtxRelease",
                     "released more often than retained");
  }
  --state().num_retains[device];
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext context) {
  STANDIN_ENTER("cuCtxPushCurrent", Needs::kInit);
  const int device = device_of(context);
  if (device < 0 || state().num_retains[device] == 0) {
    return violation(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPushCurrent", "not a retained context");
  }
  context_stack().push_back(device);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  STANDIN_ENTER("cuCtxPopCurrent", Needs::kInit);
  if (context_stack().empty()) {
    return violation(CUDA_ERROR_INVALID_CONTEXT, "cuCtxPopCurrent", "the stack is empty");
  }
  if (context != nullptr) *context = context_of(context_stack().back());
  context_stack().pop_back();
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxSetCurrent(CUcontext context) {
  STANDIN_ENTER("cuCtxSetCurrent", Needs::kInit);
  if (!context_stack().empty()) context_stack().pop_back();
  if (context == nullptr) return CUDA_SUCCESS;
  const int device = device_of(context);
  if (device < 0 || state().num_retains[device] == 0) {
    return violation(CUDA_ERROR_INVALID_CONTEXT, "cuCtxSetCurrent", "not a retained context");
  }
  context_stack().push_back(device);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuCtxGetCurrent(CUcontext* context) {
  STANDIN_ENTER("cuCtxGetCurrent", Needs::kInit);
  *context = current_device() < 0 ? nullptr : context_of(current_device());
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  STANDIN_ENTER("cuThreadExchangeStreamCaptureMode", Needs::kInit);
  thread_local CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
  if (*mode < CU_STREAM_CAPTURE_MODE_GLOBAL || *mode > CU_STREAM_CAPTURE_MODE_RELAXED) {
    return violation(CUDA_ERROR_INVALID_VALUE, "cuThreadExchangeStreamCaptureMode", "bad mode");
  }
  std::swap(current, *mode);
  return CUDA_SUCCESS;
}

// Declared here under their exported names, to be found by cuGetProcAddress.
#define STANDIN_DECLARE(name, symbol, params) \
  extern "C" CUresult standin_##name params __asm__(symbol);
VTENSOR_CUDA_FUNCTIONS(STANDIN_DECLARE)
#undef STANDIN_DECLARE

STANDIN_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function, int cuda_version,
                                            uint64_t flags,
                                            CUdriverProcAddressQueryResult* status) {
  STANDIN_ENTER("cuGetProcAddress", Needs::kNothing);
  if (flags > 2) return violation(CUDA_ERROR_INVALID_VALUE, "cuGetProcAddress", "bad flags");
  if (cuda_version > kDriverVersion) return CUDA_ERROR_INVALID_VALUE;
  static const std::map<std::string, void*> functions = {
#define STANDIN_ENTRY(name, symbol, params) {#name, reinterpret_cast<void*>(&standin_##name)},
      VTENSOR_CUDA_FUNCTIONS(STANDIN_ENTRY)
#undef STANDIN_ENTRY
          {"cuCtxSetCurrent", reinterpret_cast<void*>(&cuCtxSetCurrent)},
      {"cuCtxGetCurrent", reinterpret_cast<void*>(&cuCtxGetCurrent)},
  };
  const auto it = functions.find(symbol);
  *function = it == functions.end() ? nullptr : it->second;
  if (status != nullptr) {
    *status =
        *function == nullptr ? CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND : CU_GET_PROC_ADDRESS_SUCCESS;
  }
  return CUDA_SUCCESS;
}
