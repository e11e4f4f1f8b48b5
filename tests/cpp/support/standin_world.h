// What tests of the stand-in libcuda.so.1 share: a context, and two chunks mapped side by side.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/cpp/standin_cuda/standin_control.h"
#include "vtensor/driver/cuda/cuda_context.h"
#include "vtensor/util/units.h"

namespace vtensor {

using namespace cuda;  // NOLINT: these files speak the driver's own names

inline constexpr size_t kUnit = 2 * kMiB;

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

}  // namespace vtensor
