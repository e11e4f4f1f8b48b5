// Opening libcuda and a device: every way in which there may be none is told apart.
#include "vtensor/driver/cuda/cuda_context.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

#include "tests/cpp/support/cuda_fixture.h"

namespace vtensor {
namespace {

class CudaContextTest : public CudaDriverTest {};

TEST_F(CudaContextTest, MissingLibraryNamesThePathAndTheWayOut) {
  auto missing = options();
  missing.libcuda_path = "/nonexistent/libcuda.so.1";
  try {
    const CudaDriver unused(missing);
    FAIL() << "opened a library that does not exist";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call(), "dlopen");
    EXPECT_TRUE(contains(error.what(), "/nonexistent/libcuda.so.1")) << error.what();
    EXPECT_TRUE(contains(error.what(), "host driver")) << error.what();
  }
}

TEST_F(CudaContextTest, LibraryPathComesFromTheEnvironmentWhenNotGiven) {
  auto from_environment = options();
  from_environment.libcuda_path.clear();
  ASSERT_EQ(setenv("FLEXINFER_LIBCUDA", STANDIN_CUDA_PATH, 1), 0);
  const CudaDriver opened(from_environment);
  unsetenv("FLEXINFER_LIBCUDA");
  EXPECT_EQ(opened.context()->api().path(), STANDIN_CUDA_PATH);
  EXPECT_EQ(opened.context()->device_name(), "Stand-in GPU 0");
}

TEST_F(CudaContextTest, DriverWithoutGetProcAddressIsReadBySymbolNames) {
  standin_.fail("cuGetProcAddress", 0, cuda::CUDA_ERROR_NOT_FOUND);
  EXPECT_EQ(driver().granularity(), kCudaChunk);
}

TEST_F(CudaContextTest, NoDeviceIsSaidWithTheCodeOfCuInit) {
  standin_.set_devices(0);
  try {
    const CudaDriver unused(options());
    FAIL() << "found a device";
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call(), "cuInit");
    EXPECT_EQ(error.code_name(), "CUDA_ERROR_NO_DEVICE");
    EXPECT_TRUE(contains(error.what(), "CUDA_VISIBLE_DEVICES")) << error.what();
  }
}

TEST_F(CudaContextTest, DeviceIndexOutOfRangeNamesIndexAndCount) {
  for (const int index : {-1, 2, 1000}) {
    EXPECT_THROW(CudaDriver(options(index)), std::invalid_argument);
  }
  const auto text = error_text([] { CudaDriver(options(7)); });
  EXPECT_TRUE(contains(text, "7") && contains(text, "2 device(s)")) << text;
}

TEST_F(CudaContextTest, DeviceWithoutVirtualMemoryManagementIsRefused) {
  standin_.set_attribute(cuda::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, 0);
  EXPECT_THROW(CudaDriver{options()}, DriverError);
  const auto text = error_text([] { CudaDriver{options()}; });
  EXPECT_TRUE(contains(text, "virtual memory management") && contains(text, "12.8")) << text;
}

TEST_F(CudaContextTest, DriverThatDoesNotKnowTheAttributeCountsAsTooOld) {
  standin_.fail("cuDeviceGetAttribute", 1, cuda::CUDA_ERROR_INVALID_VALUE);
  const auto text = error_text([] { CudaDriver{options()}; });
  EXPECT_TRUE(contains(text, "CUDA 10.2")) << text;
}

TEST_F(CudaContextTest, ZeroTailIsRefusedWithTheReason) {
  auto zero = options();
  zero.unmapped = UnmappedPolicy::kZero;
  const auto text = error_text([&] { CudaDriver{zero}; });
  EXPECT_THROW(CudaDriver{zero}, std::invalid_argument);
  EXPECT_TRUE(contains(text, "lazy zero page")) << text;
}

TEST_F(CudaContextTest, DescribesItself) {
  const CudaDriver second(options(1));
  EXPECT_EQ(second.name(), "cuda");
  EXPECT_EQ(second.device().type, Device::Type::kCuda);
  EXPECT_EQ(second.device().index, 1);
  EXPECT_TRUE(second.has_memory());
}

}  // namespace
}  // namespace vtensor
