// cuda_abi.h against NVIDIA's own header, wherever one is installed.
#include "vtensor/driver/cuda/cuda_abi.h"

#include <gtest/gtest.h>

#include <string_view>
#include <tuple>
#include <type_traits>

#if __has_include(<cuda.h>)
#include <cuda.h>

namespace {

namespace ours = vtensor::cuda;

// Passed in the same kind of register with the same width.
template <typename A, typename B>
constexpr bool same_parameter =
    sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B> &&
    std::is_class_v<A> == std::is_class_v<B> &&
    std::is_floating_point_v<A> == std::is_floating_point_v<B>;

template <typename A, typename B>
struct SameAbi : std::false_type {};

template <typename RA, typename... A, typename RB, typename... B>
  requires(sizeof...(A) == sizeof...(B))
struct SameAbi<RA (*)(A...), RB (*)(B...)>
    : std::bool_constant<same_parameter<RA, RB> && (same_parameter<A, B> && ...)> {};

#define VTENSOR_SAME_FUNCTION(name, symbol, params) \
  static_assert(SameAbi<ours::name##_t, decltype(&::name)>::value, symbol);
VTENSOR_CUDA_FUNCTIONS(VTENSOR_SAME_FUNCTION)
#undef VTENSOR_SAME_FUNCTION
// The parameter lists of the two forms differ, and cuda.h renames only from CUDA 12 on.
#if CUDA_VERSION >= 12000
static_assert(SameAbi<ours::cuGetProcAddress_t, decltype(&::cuGetProcAddress)>::value);
#endif

#define VTENSOR_SAME_SIZE(type) \
  static_assert(sizeof(ours::type) == sizeof(::type) && alignof(ours::type) == alignof(::type))
VTENSOR_SAME_SIZE(CUresult);
VTENSOR_SAME_SIZE(CUdevice);
VTENSOR_SAME_SIZE(CUdeviceptr);
VTENSOR_SAME_SIZE(CUcontext);
VTENSOR_SAME_SIZE(CUstream);
VTENSOR_SAME_SIZE(CUevent);
VTENSOR_SAME_SIZE(CUmemGenericAllocationHandle);
VTENSOR_SAME_SIZE(CUdevice_attribute);
VTENSOR_SAME_SIZE(CUmemLocation);
VTENSOR_SAME_SIZE(CUmemAllocationProp);
VTENSOR_SAME_SIZE(CUmemAccessDesc);
VTENSOR_SAME_SIZE(CUmemAllocationGranularity_flags);
VTENSOR_SAME_SIZE(CUstreamCaptureMode);
VTENSOR_SAME_SIZE(CUdriverProcAddressQueryResult);

#define VTENSOR_SAME_FIELD(type, field)                                   \
  static_assert(offsetof(ours::type, field) == offsetof(::type, field) && \
                sizeof(ours::type::field) == sizeof(::type::field))
VTENSOR_SAME_FIELD(CUmemLocation, type);
VTENSOR_SAME_FIELD(CUmemLocation, id);
VTENSOR_SAME_FIELD(CUmemAllocationProp, type);
VTENSOR_SAME_FIELD(CUmemAllocationProp, requestedHandleTypes);
VTENSOR_SAME_FIELD(CUmemAllocationProp, location);
VTENSOR_SAME_FIELD(CUmemAllocationProp, win32HandleMetaData);
VTENSOR_SAME_FIELD(CUmemAllocationProp, allocFlags);
VTENSOR_SAME_FIELD(CUmemAllocationProp, allocFlags.compressionType);
VTENSOR_SAME_FIELD(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable);
VTENSOR_SAME_FIELD(CUmemAllocationProp, allocFlags.usage);
VTENSOR_SAME_FIELD(CUmemAllocationProp, allocFlags.reserved);
VTENSOR_SAME_FIELD(CUmemAccessDesc, location);
VTENSOR_SAME_FIELD(CUmemAccessDesc, flags);

#define VTENSOR_SAME_VALUE(name) \
  static_assert(static_cast<long>(ours::name) == static_cast<long>(::name))
VTENSOR_SAME_VALUE(CUDA_SUCCESS);
VTENSOR_SAME_VALUE(CUDA_ERROR_INVALID_VALUE);
VTENSOR_SAME_VALUE(CUDA_ERROR_OUT_OF_MEMORY);
VTENSOR_SAME_VALUE(CUDA_ERROR_NOT_INITIALIZED);
VTENSOR_SAME_VALUE(CUDA_ERROR_DEINITIALIZED);
VTENSOR_SAME_VALUE(CUDA_ERROR_NO_DEVICE);
VTENSOR_SAME_VALUE(CUDA_ERROR_INVALID_DEVICE);
VTENSOR_SAME_VALUE(CUDA_ERROR_INVALID_CONTEXT);
VTENSOR_SAME_VALUE(CUDA_ERROR_INVALID_HANDLE);
VTENSOR_SAME_VALUE(CUDA_ERROR_NOT_FOUND);
VTENSOR_SAME_VALUE(CUDA_ERROR_NOT_READY);
VTENSOR_SAME_VALUE(CUDA_ERROR_ILLEGAL_ADDRESS);
VTENSOR_SAME_VALUE(CUDA_ERROR_LAUNCH_TIMEOUT);
VTENSOR_SAME_VALUE(CUDA_ERROR_NOT_PERMITTED);
VTENSOR_SAME_VALUE(CUDA_ERROR_NOT_SUPPORTED);
VTENSOR_SAME_VALUE(CUDA_ERROR_UNKNOWN);
VTENSOR_SAME_VALUE(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
VTENSOR_SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
VTENSOR_SAME_VALUE(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
VTENSOR_SAME_VALUE(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
VTENSOR_SAME_VALUE(CU_MEM_LOCATION_TYPE_DEVICE);
VTENSOR_SAME_VALUE(CU_MEM_ALLOCATION_TYPE_PINNED);
VTENSOR_SAME_VALUE(CU_MEM_HANDLE_TYPE_NONE);
VTENSOR_SAME_VALUE(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
VTENSOR_SAME_VALUE(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
VTENSOR_SAME_VALUE(CU_MEM_ALLOC_GRANULARITY_MINIMUM);
VTENSOR_SAME_VALUE(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
VTENSOR_SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_NONE);
VTENSOR_SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READ);
VTENSOR_SAME_VALUE(CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
VTENSOR_SAME_VALUE(CU_STREAM_NON_BLOCKING);
VTENSOR_SAME_VALUE(CU_EVENT_BLOCKING_SYNC);
VTENSOR_SAME_VALUE(CU_EVENT_DISABLE_TIMING);
VTENSOR_SAME_VALUE(CU_STREAM_CAPTURE_MODE_GLOBAL);
VTENSOR_SAME_VALUE(CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
VTENSOR_SAME_VALUE(CU_STREAM_CAPTURE_MODE_RELAXED);
VTENSOR_SAME_VALUE(CU_GET_PROC_ADDRESS_SUCCESS);
VTENSOR_SAME_VALUE(CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
VTENSOR_SAME_VALUE(CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);

// What was checked is compiled above; here are the symbol names, which cuda.h adds its suffixes to.
TEST(CudaAbiTest, SymbolsHaveTheSuffixesOfCudaH) {
#define VTENSOR_TEXT(name) #name
#define VTENSOR_SAME_SYMBOL(name, symbol, params) \
  EXPECT_EQ(std::string_view(VTENSOR_TEXT(name)), symbol);
  VTENSOR_CUDA_FUNCTIONS(VTENSOR_SAME_SYMBOL)
#undef VTENSOR_SAME_SYMBOL
  RecordProperty("cuda_version", CUDA_VERSION);
}

}  // namespace

#else

TEST(CudaAbiTest, SymbolsHaveTheSuffixesOfCudaH) {
  GTEST_SKIP() << "no <cuda.h> on this machine: cuda_abi.h was not compared with NVIDIA's header. "
                  "Configure with -DVTENSOR_CUDA_INCLUDE=<folder>, e.g. of nvidia-cuda-runtime.";
}

#endif
