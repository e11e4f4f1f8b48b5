// Any driver call may fail at any time: a typed error, and nothing leaks. CudaDriver and CudaEvent
// on the stand-in, every function at every call of one scenario.

#include <gtest/gtest.h>

#include <memory>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/cpp/support/cuda_fixture.h"

namespace vtensor {
namespace {

// Everything that a driver and an event can do. `driver` and `event` belong to the caller, so that
// they are destroyed after the injection, as in a program that goes on.
void use_everything(const CudaOptions& options, std::unique_ptr<CudaDriver>& driver,
                    std::unique_ptr<CudaEvent>& event) {
  driver = std::make_unique<CudaDriver>(options);
  event = std::make_unique<CudaEvent>(driver->context());
  const uintptr_t addr = driver->reserve(3 * kCudaChunk, kCudaChunk);
  const Handle chunks[] = {driver->create(kCudaChunk), driver->create(kCudaChunk),
                           driver->create(kCudaChunk)};
  driver->map(addr, chunks, kCudaChunk);
  driver->set_access(addr, 3 * kCudaChunk, Access::kReadWrite);
  std::vector<std::byte> bytes(64, std::byte{1});
  driver->write(chunks[0], 0, bytes);
  driver->copy(chunks[1], 0, chunks[0], 0, 64);
  driver->fill(chunks[2], 0, 64, std::byte{2});
  driver->read(chunks[1], 0, bytes);
  event->record(0);
  (void)event->done();
  event->synchronize();
  driver->unmap(addr, kCudaChunk, kCudaChunk);
  driver->unmap(addr + kCudaChunk, 2 * kCudaChunk, kCudaChunk);
  for (const Handle chunk : chunks) driver->release(chunk, kCudaChunk);
  const Handle apart[] = {driver->create_apart(kCudaChunk, {})};
  const std::vector<Handle> received = driver->receive(driver->send(apart), kCudaChunk);
  driver->release(apart[0], kCudaChunk);
  driver->release(received[0], kCudaChunk);
  driver->free(addr, 3 * kCudaChunk);
}

struct Fault {
  const char* function;
  bool may_be_hidden = false;  // called where nothing may be thrown, or where there is another way
};

void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.function; }

class CudaFaultTest : public ::testing::TestWithParam<Fault> {};

TEST_P(CudaFaultTest, AnyCallMayFailAtAnyTimeAndNothingLeaks) {
  const StandinControl standin;
  standin.reset();
  CudaOptions options;
  options.libcuda_path = STANDIN_CUDA_PATH;
  const auto [function, may_be_hidden] = GetParam();

  std::unique_ptr<CudaDriver> driver;
  std::unique_ptr<CudaEvent> event;
  use_everything(options, driver, event);
  const auto num_calls = static_cast<int>(standin.calls(function));
  ASSERT_GT(num_calls, 0) << "the scenario does not call it";

  for (const int code : {cuda::CUDA_ERROR_INVALID_VALUE, cuda::CUDA_ERROR_OUT_OF_MEMORY,
                         cuda::CUDA_ERROR_ILLEGAL_ADDRESS}) {
    for (int nth = 1; nth <= num_calls; ++nth) {
      driver.reset();
      event.reset();
      ASSERT_EQ(standin.live(nullptr), 0u);
      standin.reset();
      standin.fail(function, nth, code);
      bool failed = false;
      try {
        use_everything(options, driver, event);
      } catch (const Error& error) {
        failed = true;
        EXPECT_FALSE(std::string(error.what()).empty());
      } catch (const std::invalid_argument&) {  // so it says that a file is no chunk
        failed = true;
        EXPECT_EQ(code, cuda::CUDA_ERROR_INVALID_VALUE);
      }
      EXPECT_TRUE(failed || may_be_hidden) << function << " call " << nth << " code " << code;
      EXPECT_EQ(standin.violations(), 0u) << standin.last_violation();
    }
  }
  driver.reset();
  event.reset();
  EXPECT_EQ(standin.live(nullptr), 0u);
  EXPECT_EQ(standin.live("bytes"), 0u);
  standin.reset();
}

INSTANTIATE_TEST_SUITE_P(
    EachFunction, CudaFaultTest,
    ::testing::Values(
        Fault{"cuInit"}, Fault{"cuGetProcAddress", true}, Fault{"cuDeviceGetCount"},
        Fault{"cuDeviceGet"}, Fault{"cuDeviceGetAttribute"}, Fault{"cuDevicePrimaryCtxRetain"},
        Fault{"cuCtxPushCurrent"}, Fault{"cuCtxPopCurrent", true},
        Fault{"cuThreadExchangeStreamCaptureMode", true}, Fault{"cuMemGetAllocationGranularity"},
        Fault{"cuMemAddressReserve"}, Fault{"cuMemAddressFree"}, Fault{"cuMemCreate"},
        Fault{"cuMemRelease"}, Fault{"cuMemExportToShareableHandle"},
        Fault{"cuMemImportFromShareableHandle"}, Fault{"cuMemMap"}, Fault{"cuMemUnmap", true},
        Fault{"cuMemSetAccess"}, Fault{"cuMemcpyDtoDAsync"}, Fault{"cuMemcpyHtoDAsync"},
        Fault{"cuMemcpyDtoHAsync"}, Fault{"cuMemsetD8Async"}, Fault{"cuStreamCreate"},
        Fault{"cuStreamSynchronize"}, Fault{"cuEventCreate"}, Fault{"cuEventRecord"},
        Fault{"cuEventQuery"}, Fault{"cuEventSynchronize"}),
    [](const auto& test) { return std::string(test.param.function); });

}  // namespace
}  // namespace vtensor
