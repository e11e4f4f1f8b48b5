// The stand-in libcuda.so.1 itself: each broken rule is caught, and the right calls are not. A
// stand-in that forgives would make every other test on it worthless.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/standin_world.h"

namespace vtensor {
namespace {

TEST_F(StandinCudaTest, RightUseIsNoViolation) {
  map_two();
  *reinterpret_cast<int*>(addr_) = 7;
  EXPECT_EQ(*reinterpret_cast<int*>(addr_), 7);
  unmap_two();
  EXPECT_EQ(control_.violations(), 0u) << control_.last_violation();
}

TEST_F(StandinCudaTest, MisuseOfMemoryIsCaught) {
  map_two();
  const auto foreign = [&] {
    const auto properties = prop(1);
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(api_->cuMemCreate(&handle, kUnit, &properties, 0), CUDA_SUCCESS);
    return handle;
  }();
  const CUdeviceptr foreign_addr = reserve(kUnit);
  ASSERT_EQ(api_->cuMemMap(foreign_addr, kUnit, 0, foreign, 0), CUDA_SUCCESS);
  const auto released = create();
  ASSERT_EQ(api_->cuMemRelease(released), CUDA_SUCCESS);

  const auto good = prop();
  const auto bad_device = prop(2);
  CUmemAllocationProp bad_type = good;
  bad_type.type = {};
  const CUdeviceptr hole = addr_ + 2 * kUnit;
  CUdeviceptr ptr = 0;
  CUmemGenericAllocationHandle handle = 0;
  constexpr auto kRw = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

  expect_violations({
      {"reserve: size", [&] { return api_->cuMemAddressReserve(&ptr, 4096, 0, 0, 0); }},
      {"reserve: nothing", [&] { return api_->cuMemAddressReserve(&ptr, 0, 0, 0, 0); }},
      {"reserve: flags", [&] { return api_->cuMemAddressReserve(&ptr, kUnit, 0, 0, 1); }},
      {"reserve: alignment", [&] { return api_->cuMemAddressReserve(&ptr, kUnit, 3, 0, 0); }},
      {"free: while mapped", [&] { return api_->cuMemAddressFree(addr_, 3 * kUnit); }},
      {"free: part", [&] { return api_->cuMemAddressFree(addr_, kUnit); }},
      {"free: unknown", [&] { return api_->cuMemAddressFree(addr_ + kUnit, kUnit); }},
      {"create: size", [&] { return api_->cuMemCreate(&handle, kMiB, &good, 0); }},
      {"create: flags", [&] { return api_->cuMemCreate(&handle, kUnit, &good, 1); }},
      {"create: device", [&] { return api_->cuMemCreate(&handle, kUnit, &bad_device, 0); }},
      {"create: type", [&] { return api_->cuMemCreate(&handle, kUnit, &bad_type, 0); }},
      {"release: twice", [&] { return api_->cuMemRelease(released); }},
      {"map: offset", [&] { return api_->cuMemMap(hole, kUnit, kUnit, handles_[0], 0); }},
      {"map: flags", [&] { return api_->cuMemMap(hole, kUnit, 0, handles_[0], 1); }},
      {"map: overlap", [&] { return api_->cuMemMap(addr_, kUnit, 0, handles_[0], 0); }},
      {"map: not aligned", [&] { return api_->cuMemMap(hole + 4096, kUnit, 0, handles_[0], 0); }},
      {"map: not reserved",
       [&] { return api_->cuMemMap(addr_ - kUnit, kUnit, 0, handles_[0], 0); }},
      {"map: too much", [&] { return api_->cuMemMap(hole, 2 * kUnit, 0, handles_[0], 0); }},
      {"map: released handle", [&] { return api_->cuMemMap(hole, kUnit, 0, released, 0); }},
      {"unmap: hole", [&] { return api_->cuMemUnmap(hole, kUnit); }},
      {"unmap: into a hole", [&] { return api_->cuMemUnmap(addr_, 3 * kUnit); }},
      {"unmap: part", [&] { return api_->cuMemUnmap(addr_, kMiB); }},
      {"set_access: hole", [&] { return set_access(addr_, 3 * kUnit, kRw); }},
      {"set_access: size", [&] { return set_access(addr_, kMiB, kRw); }},
      {"set_access: flags", [&] { return set_access(addr_, kUnit, CUmemAccess_flags{2}); }},
      {"set_access: device", [&] { return set_access(addr_, kUnit, kRw, 9); }},
      {"set_access: other device's", [&] { return set_access(foreign_addr, kUnit, kRw); }},
  });
  EXPECT_EQ(api_->cuMemUnmap(foreign_addr, kUnit), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemRelease(foreign), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemAddressFree(foreign_addr, kUnit), CUDA_SUCCESS);
  unmap_two();
}

TEST_F(StandinCudaTest, PartOfALargeMappingCanNotBeUnmapped) {
  const CUdeviceptr addr = reserve(2 * kUnit);
  const auto handle = create(2 * kUnit);
  ASSERT_EQ(api_->cuMemMap(addr, 2 * kUnit, 0, handle, 0), CUDA_SUCCESS);
  expect_violations({{"first half", [&] { return api_->cuMemUnmap(addr, kUnit); }},
                     {"second half", [&] { return api_->cuMemUnmap(addr + kUnit, kUnit); }}});
  EXPECT_EQ(api_->cuMemUnmap(addr, 2 * kUnit), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemAddressFree(addr, 2 * kUnit), CUDA_SUCCESS);
}

TEST_F(StandinCudaTest, MisuseOfSharedMemoryIsCaught) {
  constexpr auto kFile = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  const auto plain = create(kUnit);
  auto exportable = prop();
  exportable.requestedHandleTypes = kFile;
  CUmemGenericAllocationHandle own = 0;
  ASSERT_EQ(api_->cuMemCreate(&own, kUnit, &exportable, 0), CUDA_SUCCESS);
  int fd = -1;
  ASSERT_EQ(api_->cuMemExportToShareableHandle(&fd, own, kFile, 0), CUDA_SUCCESS);
  auto* const file = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  CUmemGenericAllocationHandle imported = 0;
  ASSERT_EQ(api_->cuMemImportFromShareableHandle(&imported, file, kFile), CUDA_SUCCESS);
  const auto send = [&](CUmemGenericAllocationHandle handle, auto type, unsigned flags) {
    int sent = -1;
    return api_->cuMemExportToShareableHandle(&sent, handle, type, flags);
  };
  expect_violations({
      {"export: not created for it", [&] { return send(plain, kFile, 0); }},
      {"export: no handle", [&] { return send(12345, kFile, 0); }},
      {"export: flags", [&] { return send(own, kFile, 1); }},
      {"export: type", [&] { return send(own, CU_MEM_HANDLE_TYPE_NONE, 0); }},
      {"import: type",
       [&] {
         return api_->cuMemImportFromShareableHandle(&imported, file, CU_MEM_HANDLE_TYPE_NONE);
       }},
  });
  EXPECT_EQ(api_->cuMemRelease(own), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemRelease(plain), CUDA_SUCCESS);
  EXPECT_EQ(control_.live("bytes"), 0u);  // what remains is another process's
  EXPECT_EQ(api_->cuMemRelease(imported), CUDA_SUCCESS);
  close(fd);
}

TEST_F(StandinCudaTest, MisuseOfContextsAndInitIsCaught) {
  CUcontext context = nullptr;
  const auto in_new_thread = [](const std::function<CUresult()>& call) {
    CUresult code = CUDA_SUCCESS;
    std::thread([&] { code = call(); }).join();
    return code;
  };
  CUdeviceptr ptr = 0;
  expect_violations({
      {"no context",
       [&] {
         return in_new_thread([&] { return api_->cuMemAddressReserve(&ptr, kUnit, 0, 0, 0); });
       }},
      {"pop too often",
       [&] { return in_new_thread([&] { return api_->cuCtxPopCurrent(&context); }); }},
      {"push of nothing", [&] { return api_->cuCtxPushCurrent(nullptr); }},
      {"device", [&] { return api_->cuDevicePrimaryCtxRetain(&context, 5); }},
      {"release not retained", [&] { return api_->cuDevicePrimaryCtxRelease(1); }},
      {"init flags", [&] { return api_->cuInit(1); }},
  });
  control_.forget_init();
  expect_violations({{"no init", [&] { return api_->cuMemAddressReserve(&ptr, kUnit, 0, 0, 0); }}});
  ASSERT_EQ(api_->cuInit(0), CUDA_SUCCESS);
}

TEST_F(StandinCudaTest, MisuseOfCopiesIsCaught) {
  map_two();
  ASSERT_EQ(set_access(addr_ + kUnit, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READ), CUDA_SUCCESS);
  char byte = 0;
  expect_violations({
      {"write read-only", [&] { return api_->cuMemsetD8Async(addr_ + kUnit, 0, 1, nullptr); }},
      {"write into a hole", [&] { return api_->cuMemsetD8Async(addr_, 0, 3 * kUnit, nullptr); }},
      {"copy to read-only",
       [&] { return api_->cuMemcpyDtoDAsync(addr_ + kUnit, addr_, 64, nullptr); }},
      {"copy that overlaps",
       [&] { return api_->cuMemcpyDtoDAsync(addr_, addr_ + 8, 64, nullptr); }},
      {"read of a hole",
       [&] { return api_->cuMemcpyDtoHAsync(&byte, addr_ + 2 * kUnit, 1, nullptr); }},
      {"unknown stream",
       [&] {
         return api_->cuMemsetD8Async(addr_, 0, 1, reinterpret_cast<CUstream>(uintptr_t{0x77}));
       }},
      {"unknown event", [&] { return api_->cuEventQuery(nullptr); }},
      {"destroy no stream", [&] { return api_->cuStreamDestroy(nullptr); }},
  });
  EXPECT_EQ(api_->cuMemcpyDtoDAsync(addr_, addr_ + kUnit, 64, nullptr), CUDA_SUCCESS);
  unmap_two();
}

TEST_F(StandinCudaTest, ReleasedHandleKeepsItsMemoryUntilTheLastUnmap) {
  const CUdeviceptr addr = reserve(kUnit);
  const auto handle = create();
  ASSERT_EQ(api_->cuMemMap(addr, kUnit, 0, handle, 0), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemRelease(handle), CUDA_SUCCESS);
  EXPECT_EQ(control_.live("bytes"), kUnit);
  EXPECT_EQ(api_->cuMemUnmap(addr, kUnit), CUDA_SUCCESS);
  EXPECT_EQ(control_.live("bytes"), 0u);
  EXPECT_EQ(api_->cuMemAddressFree(addr, kUnit), CUDA_SUCCESS);
  EXPECT_EQ(control_.violations(), 0u);
}

TEST_F(StandinCudaTest, NewMemoryIsNotZero) {
  map_two();
  EXPECT_EQ(*reinterpret_cast<unsigned char*>(addr_), 0xCD);
  EXPECT_EQ(*reinterpret_cast<unsigned char*>(addr_ + kUnit - 1), 0xCD);
  unmap_two();
}

TEST_F(StandinCudaTest, CapacityIsExactForEachDevice) {
  control_.set_capacity(2 * kUnit);
  const auto first = create(2 * kUnit);
  const auto properties = prop();
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(api_->cuMemCreate(&handle, kUnit, &properties, 0), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(control_.violations(), 0u) << "shortage is no misuse";
  EXPECT_EQ(api_->cuMemRelease(first), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemRelease(create(2 * kUnit)), CUDA_SUCCESS);
}

TEST_F(StandinCudaTest, InjectedFailureHitsTheNthCallOnly) {
  control_.fail("cuDriverGetVersion", 2, 999);
  int version = 0;
  EXPECT_EQ(api_->cuDriverGetVersion(&version), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuDriverGetVersion(&version), CUDA_ERROR_UNKNOWN);
  EXPECT_EQ(api_->cuDriverGetVersion(&version), CUDA_SUCCESS);
  EXPECT_EQ(control_.calls("cuDriverGetVersion"), 3u);
}

TEST_F(StandinCudaTest, EnvironmentSetsDevicesCapacityAndFailures) {
  setenv("STANDIN_CUDA_DEVICES", "1", 1);
  setenv("STANDIN_CUDA_CAPACITY_BYTES", "0x400000", 1);
  setenv("STANDIN_CUDA_FAIL", "cuDriverGetVersion:2:3,cuMemCreate:1:2", 1);
  control_.reset();
  control_.set_quiet(1);
  int count = 0;
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  EXPECT_EQ(api_->cuDeviceGetCount(&count), CUDA_SUCCESS);
  EXPECT_EQ(count, 1);
  EXPECT_EQ(api_->cuMemGetInfo(&free_bytes, &total_bytes), CUDA_SUCCESS);
  EXPECT_EQ(total_bytes, 4 * kMiB);
  EXPECT_EQ(api_->cuDriverGetVersion(&count), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuDriverGetVersion(&count), CUDA_ERROR_NOT_INITIALIZED);
  const auto properties = prop();
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_EQ(api_->cuMemCreate(&handle, kUnit, &properties, 0), CUDA_ERROR_OUT_OF_MEMORY);
  for (const char* name : {"DEVICES", "CAPACITY_BYTES", "FAIL"}) {
    unsetenv((std::string("STANDIN_CUDA_") + name).c_str());
  }
}

// ------------------------------------------------------------------------------- report at exit

TEST_F(StandinCudaTest, ReportAtExitFailsTheProcessWhenAnythingIsLeft) {
  const auto exit_code = [&](bool leak) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("STANDIN_CUDA_REPORT", "fail", 1);
      if (!freopen("/dev/null", "w", stderr)) _exit(1);
      if (!leak) {
        scope_.reset();
        context_.reset();
      }
      std::exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WEXITSTATUS(status);
  };
  EXPECT_EQ(exit_code(true), 97);
  EXPECT_EQ(exit_code(false), 0);
}

}  // namespace
}  // namespace vtensor
