// The stand-in's kernels and streams: what changes under a kernel in flight is caught.
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/support/standin_world.h"

namespace vtensor {
namespace {

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

}  // namespace
}  // namespace vtensor
