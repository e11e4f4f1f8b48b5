// Epochs: events, and work ordered by them, against the stand-in's model of kernels in flight.
#include "vtensor/driver/cuda/cuda_event.h"

#include <gtest/gtest.h>

#include <chrono>
#include <thread>
#include <utility>

#include "tests/cpp/support/cuda_fixture.h"

namespace vtensor {
namespace {

class CudaEventTest : public CudaDriverTest {};

TEST_F(CudaEventTest, EventThatWasNeverRecordedIsDone) {
  const CudaEvent event(driver().context());
  EXPECT_TRUE(event.done());
}

TEST_F(CudaEventTest, EventIsDoneWhenTheKernelsBeforeItHaveEnded) {
  const uintptr_t addr = map_range(create(1));
  CudaEvent event(driver().context());
  const auto before = standin_.begin_kernel(0, addr, 64);
  event.record(0);
  const auto after = standin_.begin_kernel(0, addr, 64);
  EXPECT_FALSE(event.done());
  standin_.end_kernel(before);
  EXPECT_TRUE(event.done());
  standin_.end_kernel(after);
}

TEST_F(CudaEventTest, SynchronizeSleepsUntilTheEpochCloses) {
  const uintptr_t addr = map_range(create(1));
  CudaEvent event(driver().context());
  const auto kernel = standin_.begin_kernel(0, addr, kCudaChunk);
  event.record(0);
  std::thread device([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    standin_.end_kernel(kernel);
  });
  event.synchronize();
  EXPECT_EQ(standin_.running_kernels(), 0u);
  device.join();
  driver().unmap(addr, kCudaChunk, kCudaChunk);
}

TEST_F(CudaEventTest, EventMovesAndOutlivesItsDriver) {
  CudaEvent event(driver().context());
  event.record(0);
  CudaEvent moved(std::move(event));
  driver_.reset();
  EXPECT_TRUE(moved.done());
  event = std::move(moved);
  EXPECT_TRUE(event.done());
}

TEST_F(CudaEventTest, CreateDoesNotStandBehindRunningKernels) {
  const uintptr_t addr = map_range(create(1));
  CudaEvent event(driver().context());
  const auto kernel = standin_.begin_kernel(0, addr, kCudaChunk);
  event.record(0);
  (void)create(1);  // would wait for ever
  EXPECT_FALSE(event.done());
  standin_.end_kernel(kernel);
}

// The driver cannot see kernels; the stand-in can, so that the layers above are caught.
TEST_F(CudaEventTest, ChangesUnderARunningKernelAreCaught) {
  const auto chunks = create(2);
  const uintptr_t addr = map_range(chunks);
  const auto kernel = standin_.begin_kernel(0, addr + kCudaChunk, 64);
  standin_.set_quiet(1);
  EXPECT_THROW(driver().unmap(addr, 2 * kCudaChunk, kCudaChunk), DriverError);
  EXPECT_THROW(driver().set_access(addr, 2 * kCudaChunk, Access::kRead), DriverError);
  EXPECT_NO_THROW(driver().unmap(addr, kCudaChunk, kCudaChunk)) << "its neighbour is free to go";
  driver().fill(chunks[1], kCudaChunk - 64, 64, std::byte{}) /* bytes the kernel does not touch */;
  driver().fill(chunks[1], 0, 64, std::byte{});
  EXPECT_EQ(standin_.violations(), 3u) << standin_.last_violation();
  standin_.end_kernel(kernel);
  driver().unmap(addr + kCudaChunk, kCudaChunk, kCudaChunk);
  num_expected_violations_ = 3;
}

}  // namespace
}  // namespace vtensor
