// The stand-in libcuda.so.1 itself: each broken rule is caught, and the right calls are not. A
// stand-in that forgives would make every other test on it worthless.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/standin_cuda/standin_control.h"
#include "vtensor/driver/cuda/cuda_context.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

using namespace cuda;  // NOLINT: this file speaks the driver's own names

constexpr size_t kUnit = 2 * kMiB;

class StandinCudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    control_.reset();
    control_.set_quiet(1);
    api_ = CudaApi::load(STANDIN_CUDA_PATH);
    context_ = std::make_unique<CudaContext>(api_, 0);
    scope_ = std::make_unique<CudaContext::Scope>(*context_);
  }

  void TearDown() override {
    scope_.reset();
    context_.reset();
    EXPECT_EQ(control_.live(nullptr), 0u);
    control_.reset();
  }

  static CUmemAllocationProp prop(int device = 0) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
    return prop;
  }

  CUdeviceptr reserve(size_t size_bytes) {
    CUdeviceptr addr = 0;
    EXPECT_EQ(api_->cuMemAddressReserve(&addr, size_bytes, 0, 0, 0), CUDA_SUCCESS);
    return addr;
  }

  CUmemGenericAllocationHandle create(size_t size_bytes = kUnit) {
    const auto properties = prop();
    CUmemGenericAllocationHandle handle = 0;
    EXPECT_EQ(api_->cuMemCreate(&handle, size_bytes, &properties, 0), CUDA_SUCCESS);
    return handle;
  }

  CUresult set_access(CUdeviceptr addr, size_t size_bytes, CUmemAccess_flags flags,
                      int device = 0) {
    const CUmemAccessDesc desc{{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
    return api_->cuMemSetAccess(addr, size_bytes, &desc, 1);
  }

  // Two chunks at a range of three, read-write.
  void map_two() {
    addr_ = reserve(3 * kUnit);
    for (size_t i = 0; i < 2; ++i) {
      handles_[i] = create();
      ASSERT_EQ(api_->cuMemMap(addr_ + i * kUnit, kUnit, 0, handles_[i], 0), CUDA_SUCCESS);
    }
    ASSERT_EQ(set_access(addr_, 2 * kUnit, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), CUDA_SUCCESS);
  }

  void unmap_two() {
    EXPECT_EQ(api_->cuMemUnmap(addr_, 2 * kUnit), CUDA_SUCCESS);
    for (const auto handle : handles_) EXPECT_EQ(api_->cuMemRelease(handle), CUDA_SUCCESS);
    EXPECT_EQ(api_->cuMemAddressFree(addr_, 3 * kUnit), CUDA_SUCCESS);
  }

  // Each must be answered with an error and counted, and must change nothing.
  void expect_violations(
      const std::vector<std::pair<const char*, std::function<CUresult()>>>& misuses) {
    for (const auto& [what, misuse] : misuses) {
      const auto violations = control_.violations();
      const auto live = control_.live(nullptr);
      EXPECT_NE(misuse(), CUDA_SUCCESS) << what;
      EXPECT_EQ(control_.violations(), violations + 1) << what;
      EXPECT_EQ(control_.live(nullptr), live) << what;
    }
  }

  StandinControl control_;
  std::shared_ptr<const CudaApi> api_;
  std::unique_ptr<CudaContext> context_;
  std::unique_ptr<CudaContext::Scope> scope_;
  CUdeviceptr addr_ = 0;
  CUmemGenericAllocationHandle handles_[2] = {};
};

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

// ---------------------------------------------------------------------------- kernels and streams

TEST_F(StandinCudaTest, ChangesUnderAKernelInFlightAreCaught) {
  map_two();
  constexpr auto kRead = CU_MEM_ACCESS_FLAGS_PROT_READ;
  const auto kernel = control_.begin_kernel(0, addr_ + kUnit - 8, 8);
  ASSERT_NE(kernel, 0u);
  expect_violations({{"unmap", [&] { return api_->cuMemUnmap(addr_, kUnit); }},
                     {"unmap of a run", [&] { return api_->cuMemUnmap(addr_, 2 * kUnit); }},
                     {"set_access", [&] { return set_access(addr_, kUnit, kRead); }}});
  EXPECT_EQ(set_access(addr_ + kUnit, kUnit, kRead), CUDA_SUCCESS) << "the neighbour is idle";
  control_.end_kernel(kernel);
  EXPECT_EQ(set_access(addr_, kUnit, kRead), CUDA_SUCCESS);
  unmap_two();
}

TEST_F(StandinCudaTest, KernelOnUnreadableMemoryIsCaught) {
  map_two();
  EXPECT_EQ(control_.begin_kernel(0, addr_, 3 * kUnit), 0u);
  EXPECT_EQ(control_.violations(), 1u);
  EXPECT_EQ(control_.running_kernels(), 0u);
  unmap_two();
}

TEST_F(StandinCudaTest, FillUnderAKernelIsCaughtThroughAnyAlias) {
  map_two();
  const CUdeviceptr alias = reserve(kUnit);
  ASSERT_EQ(api_->cuMemMap(alias, kUnit, 0, handles_[0], 0), CUDA_SUCCESS);
  ASSERT_EQ(set_access(alias, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), CUDA_SUCCESS);
  CUstream stream = nullptr;
  ASSERT_EQ(api_->cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), CUDA_SUCCESS);

  const auto kernel = control_.begin_kernel(0, addr_, 64);
  EXPECT_EQ(api_->cuMemsetD8Async(alias + 64, 0, 64, stream), CUDA_SUCCESS);
  EXPECT_EQ(control_.violations(), 0u) << "other bytes of the chunk: the append path";
  EXPECT_EQ(api_->cuMemsetD8Async(alias, 0, 64, stream), CUDA_SUCCESS);
  EXPECT_EQ(control_.violations(), 1u);
  EXPECT_EQ(api_->cuMemcpyDtoDAsync(addr_ + kUnit, alias, 64, stream), CUDA_SUCCESS);
  EXPECT_EQ(control_.violations(), 1u) << "reading what a kernel reads is fine: copy-on-write";
  control_.end_kernel(kernel);

  EXPECT_EQ(api_->cuStreamDestroy(stream), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemUnmap(alias, kUnit), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemAddressFree(alias, kUnit), CUDA_SUCCESS);
  unmap_two();
}

TEST_F(StandinCudaTest, LaunchThatWritesThroughOneAliasAndReadsThroughAnotherIsCaught) {
  map_two();
  const CUdeviceptr alias = reserve(kUnit);
  ASSERT_EQ(api_->cuMemMap(alias, kUnit, 0, handles_[0], 0), CUDA_SUCCESS);
  ASSERT_EQ(set_access(alias, kUnit, CU_MEM_ACCESS_FLAGS_PROT_READWRITE), CUDA_SUCCESS);
  const uint64_t append[] = {addr_ + 128, 64};
  const uint64_t earlier[] = {alias, 128, addr_, 192};
  EXPECT_EQ(control_.launch(earlier, 2, append, 1), 1) << "other bytes, and its own through itself";
  EXPECT_EQ(control_.violations(), 0u);
  const uint64_t same[] = {alias, 129};
  EXPECT_EQ(control_.launch(same, 1, append, 1), 0);
  EXPECT_EQ(control_.violations(), 1u);
  const uint64_t twice[] = {addr_, 8, alias, 8};
  EXPECT_EQ(control_.launch(nullptr, 0, twice, 2), 0);
  EXPECT_EQ(control_.violations(), 2u);
  const auto kernel = control_.begin_kernel(0, alias + 128, 64);
  EXPECT_EQ(control_.launch(nullptr, 0, append, 1), 0) << "a grid that was there before reads it";
  control_.end_kernel(kernel);
  EXPECT_EQ(control_.launch(nullptr, 0, append, 1), 1);
  EXPECT_EQ(api_->cuMemUnmap(alias, kUnit), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuMemAddressFree(alias, kUnit), CUDA_SUCCESS);
  unmap_two();
}

TEST_F(StandinCudaTest, AStreamRunsInOrder) {
  map_two();
  CUevent event = nullptr;
  ASSERT_EQ(api_->cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), CUDA_SUCCESS);
  auto* first = reinterpret_cast<unsigned char*>(addr_);

  const auto kernel = control_.begin_kernel(0, addr_, 64);
  ASSERT_EQ(api_->cuEventRecord(event, nullptr), CUDA_SUCCESS);
  ASSERT_EQ(api_->cuMemsetD8Async(addr_, 5, 64, nullptr), CUDA_SUCCESS);
  EXPECT_EQ(api_->cuEventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_NE(*first, 5) << "the fill is behind the kernel";
  control_.end_kernel(kernel);
  EXPECT_EQ(api_->cuEventQuery(event), CUDA_SUCCESS);
  EXPECT_EQ(*first, 5);
  EXPECT_EQ(control_.violations(), 0u) << control_.last_violation();

  EXPECT_EQ(api_->cuEventDestroy(event), CUDA_SUCCESS);
  unmap_two();
}

TEST_F(StandinCudaTest, ForgottenKernelIsReportedInsteadOfHanging) {
  map_two();
  control_.set_sync_timeout_ms(10);
  const auto kernel = control_.begin_kernel(0, addr_, 64);
  expect_violations({{"synchronize", [&] { return api_->cuStreamSynchronize(nullptr); }}});
  control_.end_kernel(kernel);
  control_.set_quiet(1);
  expect_violations({{"end twice", [&] {
                        control_.end_kernel(kernel);
                        return CUDA_ERROR_INVALID_HANDLE;
                      }}});
  unmap_two();
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
