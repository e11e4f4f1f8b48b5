// CudaDriver on the stand-in libcuda.so.1: what is CUDA's own. What every driver must do is in
// driver_conformance_test.cpp. Nothing here says anything about a real GPU.
#include "vtensor/driver/cuda/cuda_driver.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/support/cuda_fixture.h"

namespace vtensor {
namespace {

// ------------------------------------------------------------------------------- physical memory

TEST_F(CudaDriverTest, FreshChunkIsZeroAlthoughCudaPromisesNothing) {
  const Handle chunk = driver().create(kCudaChunk);
  std::vector<std::byte> contents(kCudaChunk, std::byte{1});
  driver().read(chunk, 0, contents);
  EXPECT_EQ(contents, std::vector<std::byte>(kCudaChunk));
}

TEST_F(CudaDriverTest, ARunOfNewChunksIsWaitedForOnce) {
  const uintptr_t range = driver().reserve(8 * kCudaChunk, kCudaChunk);
  const auto before = standin_.calls("cuStreamSynchronize");
  const auto handles = create(8);
  EXPECT_EQ(standin_.calls("cuStreamSynchronize"), before);
  driver().map(range, handles, kCudaChunk);
  EXPECT_EQ(standin_.calls("cuStreamSynchronize"), before + 1) << "kernels may write them now";
  driver().unmap(range, 8 * kCudaChunk, kCudaChunk);
  driver().map(range, handles, kCudaChunk);
  EXPECT_EQ(standin_.calls("cuStreamSynchronize"), before + 1);
}

TEST_F(CudaDriverTest, AChunkIsReleasedOnlyAfterItsZeroFill) {
  const Handle chunk = driver().create(kCudaChunk);
  const auto before = standin_.calls("cuStreamSynchronize");
  driver().release(chunk, kCudaChunk);
  EXPECT_EQ(standin_.calls("cuStreamSynchronize"), before + 1);
}

TEST_F(CudaDriverTest, OutOfMemoryCarriesBytesAndChangesNothing) {
  standin_.set_capacity(3 * kCudaChunk + kMiB);
  const auto handles = create(3);
  try {
    (void)driver().create(kCudaChunk);
    FAIL() << "created more than the capacity";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.asked_bytes(), kCudaChunk);
    EXPECT_EQ(error.free_bytes(), kMiB);
    EXPECT_EQ(error.budget_bytes(), 3 * kCudaChunk + kMiB);
  }
  EXPECT_EQ(standin_.live("allocation"), 3u);
  EXPECT_EQ(standin_.live("mapping"), 3u);
  driver().release(handles[0], kCudaChunk);
  EXPECT_NO_THROW((void)driver().create(kCudaChunk));
}

TEST_F(CudaDriverTest, OutOfMemoryForTheMappingItselfIsOutOfMemoryToo) {
  (void)driver();
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_THROW((void)driver().create(kCudaChunk), OutOfMemoryError);
  EXPECT_EQ(standin_.live("allocation"), 0u);
}

TEST_F(CudaDriverTest, WindowReusesTheAddressesOfReleasedChunks) {
  const auto first = create(20);  // 3 slabs of 8 slots
  const auto num_reservations = standin_.live("reservation");
  EXPECT_EQ(num_reservations, 3u);
  for (const Handle handle : first) driver().release(handle, kCudaChunk);
  EXPECT_EQ(standin_.live("bytes"), 0u);
  (void)create(20);
  EXPECT_EQ(standin_.live("reservation"), num_reservations);
}

TEST_F(CudaDriverTest, ChunksMayBeLargerThanASlabAndHaveOneSize) {
  const size_t large_bytes = 32 * kMiB;
  const Handle first = driver().create(large_bytes);
  const Handle second = driver().create(large_bytes);
  EXPECT_THROW((void)driver().create(kCudaChunk), std::invalid_argument);
  driver().fill(first, 0, large_bytes, std::byte{3});
  driver().copy(second, large_bytes - kCudaChunk, first, 0, kCudaChunk);
  std::byte last{};
  driver().read(second, large_bytes - 1, {&last, 1});
  EXPECT_EQ(last, std::byte{3});
}

TEST_F(CudaDriverTest, ReleaseThatFailsKeepsTheChunkAndItsContents) {
  const Handle chunk = driver().create(kCudaChunk);
  driver().fill(chunk, 0, kCudaChunk, std::byte{9});
  for (const char* call : {"cuMemUnmap", "cuMemRelease"}) {
    standin_.fail(call, 1, cuda::CUDA_ERROR_UNKNOWN);
    EXPECT_THROW(driver().release(chunk, kCudaChunk), DriverError) << call;
    std::byte value{};
    driver().read(chunk, 77, {&value, 1});
    EXPECT_EQ(value, std::byte{9}) << call;
  }
  driver().release(chunk, kCudaChunk);
  EXPECT_EQ(standin_.live("allocation"), 0u);
}

TEST_F(CudaDriverTest, ReleaseWhoseRollbackFailsTooSaysSoAndCanBeRepeated) {
  const Handle chunk = driver().create(kCudaChunk);
  standin_.fail("cuMemRelease", 1, cuda::CUDA_ERROR_UNKNOWN);
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_UNKNOWN);
  const auto text = error_text([&] { driver().release(chunk, kCudaChunk); });
  EXPECT_TRUE(contains(text, "rollback failed")) << text;
  EXPECT_THROW(driver().fill(chunk, 0, 1, std::byte{}), std::invalid_argument);
  driver().release(chunk, kCudaChunk);
}

// --------------------------------------------------------------------------------------- mapping

TEST_F(CudaDriverTest, AliasesShowTheSameBytes) {
  const auto chunks = create(2);
  const uintptr_t first = map_range(chunks);
  const Handle swapped[] = {chunks[1], chunks[0]};
  const uintptr_t second = map_range(swapped);
  put_byte(first, 5);
  put_byte(second, 6);
  EXPECT_EQ(cuda_byte_at(second + kCudaChunk), std::byte{5});
  EXPECT_EQ(cuda_byte_at(first + kCudaChunk), std::byte{6});
}

TEST_F(CudaDriverTest, OneSetAccessAndOneUnmapForAWholeRun) {
  const auto chunks = create(16);
  const uintptr_t addr = driver().reserve(16 * kCudaChunk, kCudaChunk);
  driver().map(addr, chunks, kCudaChunk);
  const auto accesses = standin_.calls("cuMemSetAccess");
  const auto unmaps = standin_.calls("cuMemUnmap");
  driver().set_access(addr, 16 * kCudaChunk, Access::kReadWrite);
  driver().unmap(addr, 16 * kCudaChunk, kCudaChunk);
  EXPECT_EQ(standin_.calls("cuMemSetAccess"), accesses + 1);
  EXPECT_EQ(standin_.calls("cuMemUnmap"), unmaps + 1);
}

TEST_F(CudaDriverTest, DriverThatUnmapsOneMappingACallIsServedSo) {
  standin_.set_single_unmap(1);
  const auto chunks = create(4);
  const uintptr_t addr = map_range(chunks);
  driver().unmap(addr, 4 * kCudaChunk, kCudaChunk);
  const auto unmaps = standin_.calls("cuMemUnmap");
  driver().map(addr, chunks, kCudaChunk);
  driver().unmap(addr, 4 * kCudaChunk, kCudaChunk);
  EXPECT_EQ(standin_.calls("cuMemUnmap"), unmaps + 4) << "the refusal is remembered";
}

TEST_F(CudaDriverTest, UnmapThatFailsHalfWayMapsTheRunAgain) {
  standin_.set_single_unmap(1);
  const auto chunks = create(4);
  const uintptr_t addr = map_range(chunks);
  put_byte(addr, 8);
  standin_.fail("cuMemUnmap", 4, cuda::CUDA_ERROR_UNKNOWN);  // 1 for the run, then the third chunk
  EXPECT_THROW(driver().unmap(addr, 4 * kCudaChunk, kCudaChunk), DriverError);
  EXPECT_EQ(cuda_byte_at(addr), std::byte{8});
  put_byte(addr + kCudaChunk, 9);
  driver().unmap(addr, 4 * kCudaChunk, kCudaChunk);
}

TEST_F(CudaDriverTest, UnmapWhoseRollbackFailsLeavesTrueBooks) {
  standin_.set_single_unmap(1);
  const auto chunks = create(3);
  const uintptr_t addr = map_range(chunks);
  standin_.fail("cuMemUnmap", 3, cuda::CUDA_ERROR_UNKNOWN);
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_UNKNOWN);
  const auto text = error_text([&] { driver().unmap(addr, 3 * kCudaChunk, kCudaChunk); });
  EXPECT_TRUE(contains(text, "1 chunk(s) of this call stay unmapped")) << text;
  driver().release(chunks[0], kCudaChunk);
  driver().unmap(addr + kCudaChunk, 2 * kCudaChunk, kCudaChunk);
  driver().free(addr, 3 * kCudaChunk);
}

TEST_F(CudaDriverTest, MapThatFailsAtAnyChunkMapsNone) {
  const auto chunks = create(4);
  const uintptr_t addr = driver().reserve(4 * kCudaChunk, kCudaChunk);
  for (int nth = 1; nth <= 4; ++nth) {
    standin_.fail("cuMemMap", nth, cuda::CUDA_ERROR_UNKNOWN);
    EXPECT_THROW(driver().map(addr, chunks, kCudaChunk), DriverError);
    EXPECT_EQ(standin_.live("mapping"), 4u) << "the windows only";
  }
  driver().map(addr, chunks, kCudaChunk);
}

TEST_F(CudaDriverTest, MapWhoseRollbackFailsLeavesTrueBooks) {
  const auto chunks = create(3);
  const uintptr_t addr = driver().reserve(3 * kCudaChunk, kCudaChunk);
  standin_.fail("cuMemMap", 3, cuda::CUDA_ERROR_UNKNOWN);
  standin_.fail("cuMemUnmap", 1, cuda::CUDA_ERROR_UNKNOWN);
  const auto text = error_text([&] { driver().map(addr, chunks, kCudaChunk); });
  EXPECT_TRUE(contains(text, "1 chunk(s) of this call stay mapped")) << text;
  EXPECT_THROW(driver().release(chunks[0], kCudaChunk), std::invalid_argument);
  driver().release(chunks[1], kCudaChunk);
  driver().unmap(addr, kCudaChunk, kCudaChunk);
}

TEST_F(CudaDriverTest, DriverErrorNamesCallCodeAndArguments) {
  const auto chunks = create(1);
  const uintptr_t addr = driver().reserve(kCudaChunk, kCudaChunk);
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_NOT_PERMITTED);
  try {
    driver().map(addr, chunks, kCudaChunk);
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_EQ(error.call(), "cuMemMap");
    EXPECT_EQ(error.code(), 800);
    EXPECT_EQ(error.code_name(), "CUDA_ERROR_NOT_PERMITTED");
    EXPECT_TRUE(contains(error.arguments(), "size=2097152")) << error.arguments();
    EXPECT_TRUE(contains(error.arguments(), "addr=0x")) << error.arguments();
  }
}

TEST_F(CudaDriverTest, CodeThatTheDriverDoesNotKnowIsPrintedAsNumber) {
  (void)driver();
  standin_.fail("cuMemCreate", 1, 12345);
  const auto text = error_text([&] { (void)driver().create(kCudaChunk); });
  EXPECT_TRUE(contains(text, "CUDA_ERROR_12345")) << text;
}

TEST_F(CudaDriverTest, CallersMistakesNeverReachTheDriver) {
  const auto chunks = create(2);
  const uintptr_t addr = driver().reserve(4 * kCudaChunk, kCudaChunk);
  const uintptr_t other = driver().reserve(kCudaChunk, kCudaChunk);
  const std::span<const Handle> one(chunks.data(), 1);
  driver().map(addr + kCudaChunk, one, kCudaChunk);
  const Handle unknown[] = {Handle{42}};
  std::byte byte{};

  const std::vector<std::pair<const char*, std::function<void()>>> mistakes = {
      {"reserve nothing", [&] { (void)driver().reserve(0, kCudaChunk); }},
      {"reserve below granularity", [&] { (void)driver().reserve(4096, kCudaChunk); }},
      {"alignment no power of two", [&] { (void)driver().reserve(kCudaChunk, 3 * kCudaChunk); }},
      {"alignment below granularity", [&] { (void)driver().reserve(kCudaChunk, 4096); }},
      {"chunk below granularity", [&] { (void)driver().create(kMiB); }},
      {"chunk no multiple", [&] { (void)driver().create(3 * kMiB); }},
      {"chunk of nothing", [&] { (void)driver().create(0); }},
      {"map over a mapping", [&] { driver().map(addr + kCudaChunk, one, kCudaChunk); }},
      {"map into a mapping", [&] { driver().map(addr, chunks, kCudaChunk); }},
      {"map outside", [&] { driver().map(addr + 3 * kCudaChunk, chunks, kCudaChunk); }},
      {"map across ranges", [&] { driver().map(other, chunks, kCudaChunk); }},
      {"map at an odd address", [&] { driver().map(addr + 4096, one, kCudaChunk); }},
      {"map an unknown chunk", [&] { driver().map(addr, unknown, kCudaChunk); }},
      {"map with another size", [&] { driver().map(addr + 2 * kCudaChunk, one, 2 * kCudaChunk); }},
      {"set_access on a hole",
       [&] { driver().set_access(addr + kCudaChunk, 2 * kCudaChunk, Access::kReadWrite); }},
      {"set_access on part of a chunk",
       [&] { driver().set_access(addr + kCudaChunk, kMiB, Access::kReadWrite); }},
      {"set_access on nothing", [&] { driver().set_access(addr, kCudaChunk, Access::kReadWrite); }},
      {"unmap what is not mapped", [&] { driver().unmap(addr, kCudaChunk, kCudaChunk); }},
      {"unmap across a hole",
       [&] { driver().unmap(addr + kCudaChunk, 2 * kCudaChunk, kCudaChunk); }},
      {"unmap with another size",
       [&] { driver().unmap(addr + kCudaChunk, kCudaChunk, 2 * kCudaChunk); }},
      {"free while mapped", [&] { driver().free(addr, 4 * kCudaChunk); }},
      {"free a part", [&] { driver().free(addr, kCudaChunk); }},
      {"free what is not reserved", [&] { driver().free(addr + kCudaChunk, kCudaChunk); }},
      {"release while mapped", [&] { driver().release(chunks[0], kCudaChunk); }},
      {"release with another size", [&] { driver().release(chunks[1], 2 * kCudaChunk); }},
      {"release an unknown chunk", [&] { driver().release(Handle{42}, kCudaChunk); }},
      {"fill past the end", [&] { driver().fill(chunks[0], 1, kCudaChunk, byte); }},
      {"read past the end", [&] { driver().read(chunks[0], kCudaChunk, {&byte, 1}); }},
      {"offset that overflows", [&] { driver().fill(chunks[0], SIZE_MAX, 2, byte); }},
      {"copy that overlaps", [&] { driver().copy(chunks[0], 0, chunks[0], 1, 4096); }},
      {"copy from an unknown chunk", [&] { driver().copy(chunks[0], 0, Handle{42}, 0, 1); }},
  };
  // Everything but entering and leaving the context counts as reaching the driver.
  const auto num_calls = [&] {
    return standin_.calls(nullptr) - standin_.calls("cuCtxPushCurrent") -
           standin_.calls("cuCtxPopCurrent") - standin_.calls("cuThreadExchangeStreamCaptureMode");
  };
  for (const auto& [what, mistake] : mistakes) {
    const auto calls_before = num_calls();
    EXPECT_THROW(mistake(), std::invalid_argument) << what;
    EXPECT_EQ(num_calls(), calls_before) << what;
  }
  driver().unmap(addr + kCudaChunk, kCudaChunk, kCudaChunk);
  driver().release(chunks[0], kCudaChunk);
  EXPECT_THROW(driver().release(chunks[0], kCudaChunk), std::invalid_argument) << "double release";
}

TEST_F(CudaDriverTest, DestructorGivesBackWhatTheCallerForgot) {
  const auto chunks = create(3);
  (void)map_range(chunks);
  EXPECT_GT(standin_.live(nullptr), 0u);  // TearDown checks that it is 0 again
}

// -------------------------------------------------------------------- contexts, devices, threads

TEST_F(CudaDriverTest, CallerKeepsItsOwnCurrentContext) {
  const CudaContext other(CudaApi::load(STANDIN_CUDA_PATH), 1);
  const CudaContext::Scope scope(other);
  (void)map_range(create(2));
  const auto& api = other.api();
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  EXPECT_EQ(api.cuMemGetInfo(&free_bytes, &total_bytes), cuda::CUDA_SUCCESS);
  EXPECT_EQ(free_bytes, total_bytes) << "device 1 is current again, and holds nothing";
}

TEST_F(CudaDriverTest, AnyThreadMayCallAndNeedsNoContext) {
  const Handle chunk = driver().create(kCudaChunk);
  std::thread([&] { driver().fill(chunk, 0, kCudaChunk, std::byte{4}); }).join();
  std::byte value{};
  driver().read(chunk, 0, {&value, 1});
  EXPECT_EQ(value, std::byte{4});
}

TEST_F(CudaDriverTest, CaptureModeOfTheThreadIsRestored) {
  const auto api = CudaApi::load(STANDIN_CUDA_PATH);
  auto mode = cuda::CU_STREAM_CAPTURE_MODE_GLOBAL;  // a test of faults may have left another one
  ASSERT_EQ(api->cuThreadExchangeStreamCaptureMode(&mode), cuda::CUDA_SUCCESS);
  (void)create(1);
  mode = cuda::CU_STREAM_CAPTURE_MODE_GLOBAL;
  ASSERT_EQ(api->cuThreadExchangeStreamCaptureMode(&mode), cuda::CUDA_SUCCESS);
  EXPECT_EQ(mode, cuda::CU_STREAM_CAPTURE_MODE_GLOBAL);
}

TEST_F(CudaDriverTest, TwoDevicesHaveTheirOwnMemory) {
  standin_.set_capacity(2 * kCudaChunk);
  CudaDriver second(options(1));
  (void)create(2);
  EXPECT_THROW((void)driver().create(kCudaChunk), OutOfMemoryError);
  EXPECT_NO_THROW((void)second.create(kCudaChunk));
}

TEST_F(CudaDriverTest, TwoDriversOfOneDeviceDoNotMeet) {
  CudaDriver second(options());
  const Handle chunk = driver().create(kCudaChunk);
  EXPECT_THROW(second.release(chunk, kCudaChunk), std::invalid_argument);
}

TEST_F(CudaDriverTest, ThreadsMapAndCreateAtTheSameTime) {
  (void)driver();
  std::vector<std::thread> threads;
  for (int seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      for (int round = 0; round < 8; ++round) {
        const auto chunks = create(3);
        const uintptr_t addr = map_range(chunks);
        driver().fill(chunks[0], 0, 64, static_cast<std::byte>(seed));
        driver().copy(chunks[2], 0, chunks[0], 0, 64);
        EXPECT_EQ(cuda_byte_at(addr + 2 * kCudaChunk), static_cast<std::byte>(seed));
        driver().unmap(addr, 3 * kCudaChunk, kCudaChunk);
        for (const Handle chunk : chunks) driver().release(chunk, kCudaChunk);
        driver().free(addr, 3 * kCudaChunk);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(standin_.live("bytes"), 0u);
}

}  // namespace
}  // namespace vtensor
