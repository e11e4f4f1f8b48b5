// The part of the CUDA driver's binary interface that this project calls, written down by hand.
//
// Why not <cuda.h>: one wheel must build on, and serve, machines without a toolkit, and NVIDIA's
// licence does not allow to ship the header. tests/cpp/driver/cuda_abi_test.cpp compares every
// size, offset, value, signature and symbol name below with the real header wherever one is
// installed.
//
// Types and constants only: stateless, so thread-safe. Names are CUDA's own, inside a namespace, so
// that both headers can be included together.
//
// Invariants:
//  1. Nothing here may differ from <cuda.h>; a field that we never set is still declared.
//  2. VTENSOR_CUDA_FUNCTIONS names each function the loader needs, once.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vtensor::cuda {

using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUmemGenericAllocationHandle = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUevent = struct CUevent_st*;

// The codes that this project returns, compares with or injects. The driver knows many more.
enum CUresult : int {
  CUDA_SUCCESS = 0,
  CUDA_ERROR_INVALID_VALUE = 1,
  CUDA_ERROR_OUT_OF_MEMORY = 2,
  CUDA_ERROR_NOT_INITIALIZED = 3,
  CUDA_ERROR_DEINITIALIZED = 4,
  CUDA_ERROR_NO_DEVICE = 100,
  CUDA_ERROR_INVALID_DEVICE = 101,
  CUDA_ERROR_INVALID_CONTEXT = 201,
  CUDA_ERROR_INVALID_HANDLE = 400,
  CUDA_ERROR_NOT_FOUND = 500,
  CUDA_ERROR_NOT_READY = 600,
  CUDA_ERROR_ILLEGAL_ADDRESS = 700,
  CUDA_ERROR_LAUNCH_TIMEOUT = 702,
  CUDA_ERROR_NOT_PERMITTED = 800,
  CUDA_ERROR_NOT_SUPPORTED = 801,
  CUDA_ERROR_UNKNOWN = 999,
};

enum CUdevice_attribute : int {
  CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
  CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
  CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
  CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
};

enum CUmemLocationType : int { CU_MEM_LOCATION_TYPE_DEVICE = 1 };
enum CUmemAllocationType : int { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum CUmemAllocationHandleType : int {
  CU_MEM_HANDLE_TYPE_NONE = 0,
  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
};
enum CUmemAllocationGranularity_flags : int {
  CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
  CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
};
enum CUmemAccess_flags : int {
  CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
  CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
  CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3,
};
enum CUstream_flags : unsigned int { CU_STREAM_NON_BLOCKING = 1 };
enum CUevent_flags : unsigned int { CU_EVENT_BLOCKING_SYNC = 1, CU_EVENT_DISABLE_TIMING = 2 };
enum CUstreamCaptureMode : int {
  CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
  CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
  CU_STREAM_CAPTURE_MODE_RELAXED = 2,
};
enum CUdriverProcAddressQueryResult : int {
  CU_GET_PROC_ADDRESS_SUCCESS = 0,
  CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
  CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2,
};

struct CUmemLocation {
  CUmemLocationType type;
  int id;
};

struct CUmemAllocationProp {
  CUmemAllocationType type;
  CUmemAllocationHandleType requestedHandleTypes;
  CUmemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct CUmemAccessDesc {
  CUmemLocation location;
  CUmemAccess_flags flags;
};

// X(name for cuGetProcAddress, symbol for dlsym, parameter list). The symbol carries the version
// suffix that <cuda.h> adds by macro; cuGetProcAddress picks it from the version asked for.
#define VTENSOR_CUDA_FUNCTIONS(X)                                                                 \
  X(cuInit, "cuInit", (unsigned int flags))                                                       \
  X(cuDriverGetVersion, "cuDriverGetVersion", (int* version))                                     \
  X(cuGetErrorName, "cuGetErrorName", (CUresult error, const char** name))                        \
  X(cuGetErrorString, "cuGetErrorString", (CUresult error, const char** text))                    \
  X(cuDeviceGetCount, "cuDeviceGetCount", (int* count))                                           \
  X(cuDeviceGet, "cuDeviceGet", (CUdevice * device, int ordinal))                                 \
  X(cuDeviceGetName, "cuDeviceGetName", (char* name, int capacity, CUdevice device))              \
  X(cuDeviceGetAttribute, "cuDeviceGetAttribute",                                                 \
    (int* value, CUdevice_attribute attribute, CUdevice device))                                  \
  X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * context, CUdevice device)) \
  X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (CUdevice device))                 \
  X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext context))                                 \
  X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * context))                                 \
  X(cuCtxSynchronize, "cuCtxSynchronize", ())                                                     \
  X(cuThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode",                       \
    (CUstreamCaptureMode * mode))                                                                 \
  X(cuMemGetInfo, "cuMemGetInfo_v2", (size_t* free_bytes, size_t* total_bytes))                   \
  X(cuMemGetAllocationGranularity, "cuMemGetAllocationGranularity",                               \
    (size_t* granularity, const CUmemAllocationProp* prop,                                        \
     CUmemAllocationGranularity_flags option))                                                    \
  X(cuMemAddressReserve, "cuMemAddressReserve",                                                   \
    (CUdeviceptr * ptr, size_t size, size_t alignment, CUdeviceptr hint,                          \
     unsigned long long flags))                                                                   \
  X(cuMemAddressFree, "cuMemAddressFree", (CUdeviceptr ptr, size_t size))                         \
  X(cuMemCreate, "cuMemCreate",                                                                   \
    (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp* prop,         \
     unsigned long long flags))                                                                   \
  X(cuMemRelease, "cuMemRelease", (CUmemGenericAllocationHandle handle))                          \
  X(cuMemExportToShareableHandle, "cuMemExportToShareableHandle",                                 \
    (void* shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,        \
     unsigned long long flags))                                                                   \
  X(cuMemImportFromShareableHandle, "cuMemImportFromShareableHandle",                             \
    (CUmemGenericAllocationHandle * handle, void* os_handle, CUmemAllocationHandleType type))     \
  X(cuMemMap, "cuMemMap",                                                                         \
    (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,            \
     unsigned long long flags))                                                                   \
  X(cuMemUnmap, "cuMemUnmap", (CUdeviceptr ptr, size_t size))                                     \
  X(cuMemSetAccess, "cuMemSetAccess",                                                             \
    (CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc, size_t count))                    \
  X(cuMemcpyDtoDAsync, "cuMemcpyDtoDAsync_v2",                                                    \
    (CUdeviceptr dst, CUdeviceptr src, size_t size, CUstream stream))                             \
  X(cuMemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2",                                                    \
    (CUdeviceptr dst, const void* src, size_t size, CUstream stream))                             \
  X(cuMemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2",                                                    \
    (void* dst, CUdeviceptr src, size_t size, CUstream stream))                                   \
  X(cuMemsetD8Async, "cuMemsetD8Async",                                                           \
    (CUdeviceptr dst, unsigned char value, size_t count, CUstream stream))                        \
  X(cuStreamCreate, "cuStreamCreate", (CUstream * stream, unsigned int flags))                    \
  X(cuStreamDestroy, "cuStreamDestroy_v2", (CUstream stream))                                     \
  X(cuStreamSynchronize, "cuStreamSynchronize", (CUstream stream))                                \
  X(cuEventCreate, "cuEventCreate", (CUevent * event, unsigned int flags))                        \
  X(cuEventDestroy, "cuEventDestroy_v2", (CUevent event))                                         \
  X(cuEventRecord, "cuEventRecord", (CUevent event, CUstream stream))                             \
  X(cuEventQuery, "cuEventQuery", (CUevent event))                                                \
  X(cuEventSynchronize, "cuEventSynchronize", (CUevent event))

// cuInit_t, cuMemMap_t, ...: the function pointer types.
#define VTENSOR_CUDA_POINTER_TYPE(name, symbol, params) using name##_t = CUresult(*) params;
VTENSOR_CUDA_FUNCTIONS(VTENSOR_CUDA_POINTER_TYPE)
#undef VTENSOR_CUDA_POINTER_TYPE

// cuGetProcAddress_v2 (CUDA 12.0): how all of the above are found.
using cuGetProcAddress_t = CUresult (*)(const char* symbol, void** function, int cuda_version,
                                        uint64_t flags, CUdriverProcAddressQueryResult* status);

// The version passed to cuGetProcAddress: every driver that has its _v2 form knows 12.0.
inline constexpr int kCudaAbiVersion = 12000;

}  // namespace vtensor::cuda
