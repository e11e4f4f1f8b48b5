// CudaDriver on the stand-in libcuda.so.1: what is CUDA's own. What every driver must do is in
// driver_conformance_test.cpp. Nothing here says anything about a real GPU.
#include "vtensor/vmm/cuda_driver.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cpp/cuda_fixture.h"

namespace vtensor {
namespace {

// ------------------------------------------------------------------------------- physical memory

TEST_F(CudaDriverTest, FreshChunkIsZeroAlthoughCudaPromisesNothing) {
  const Handle chunk = driver().create(kChunk);
  std::vector<std::byte> contents(kChunk, std::byte{1});
  driver().read(chunk, 0, contents);
  EXPECT_EQ(contents, std::vector<std::byte>(kChunk));
}

TEST_F(CudaDriverTest, OutOfMemoryCarriesBytesAndChangesNothing) {
  standin_.set_capacity(4 * kChunk);
  const auto handles = create(3);
  try {
    (void)driver().create(2 * kChunk);
    FAIL() << "created more than the capacity";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.asked_bytes(), 2 * kChunk);
    EXPECT_EQ(error.free_bytes(), kChunk);
    EXPECT_EQ(error.budget_bytes(), 4 * kChunk);
  }
  EXPECT_EQ(standin_.live("allocation"), 3u);
  EXPECT_EQ(standin_.live("mapping"), 3u);
  driver().release(handles[0], kChunk);
  EXPECT_NO_THROW((void)driver().create(2 * kChunk));
}

TEST_F(CudaDriverTest, OutOfMemoryForTheMappingItselfIsOutOfMemoryToo) {
  (void)driver();
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_THROW((void)driver().create(kChunk), OutOfMemoryError);
  EXPECT_EQ(standin_.live("allocation"), 0u);
}

TEST_F(CudaDriverTest, WindowReusesTheAddressesOfReleasedChunks) {
  const auto first = create(20);  // 3 slabs of 8 slots
  const auto num_reservations = standin_.live("reservation");
  EXPECT_EQ(num_reservations, 3u);
  for (const Handle handle : first) driver().release(handle, kChunk);
  EXPECT_EQ(standin_.live("bytes"), 0u);
  (void)create(20);
  EXPECT_EQ(standin_.live("reservation"), num_reservations);
}

TEST_F(CudaDriverTest, ChunksOfSeveralSizesLiveTogether) {
  const Handle small = driver().create(kChunk);
  const Handle large = driver().create(32 * kMiB);  // larger than a slab
  driver().fill(small, 0, kChunk, std::byte{3});
  driver().copy(large, 32 * kMiB - kChunk, small, 0, kChunk);
  std::byte last{};
  driver().read(large, 32 * kMiB - 1, {&last, 1});
  EXPECT_EQ(last, std::byte{3});
  driver().release(small, kChunk);
  driver().release(large, 32 * kMiB);
}

TEST_F(CudaDriverTest, ReleaseThatFailsKeepsTheChunkAndItsContents) {
  const Handle chunk = driver().create(kChunk);
  driver().fill(chunk, 0, kChunk, std::byte{9});
  for (const char* call : {"cuMemUnmap", "cuMemRelease"}) {
    standin_.fail(call, 1, cuda::CUDA_ERROR_UNKNOWN);
    EXPECT_THROW(driver().release(chunk, kChunk), DriverError) << call;
    std::byte value{};
    driver().read(chunk, 77, {&value, 1});
    EXPECT_EQ(value, std::byte{9}) << call;
  }
  driver().release(chunk, kChunk);
  EXPECT_EQ(standin_.live("allocation"), 0u);
}

TEST_F(CudaDriverTest, ReleaseWhoseRollbackFailsTooSaysSoAndCanBeRepeated) {
  const Handle chunk = driver().create(kChunk);
  standin_.fail("cuMemRelease", 1, cuda::CUDA_ERROR_UNKNOWN);
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_UNKNOWN);
  const auto text = error_text([&] { driver().release(chunk, kChunk); });
  EXPECT_TRUE(contains(text, "rollback failed")) << text;
  EXPECT_THROW(driver().fill(chunk, 0, 1, std::byte{}), std::invalid_argument);
  driver().release(chunk, kChunk);
}

// --------------------------------------------------------------------------------------- mapping

TEST_F(CudaDriverTest, AliasesShowTheSameBytes) {
  const auto chunks = create(2);
  const uintptr_t first = map_range(chunks);
  const Handle swapped[] = {chunks[1], chunks[0]};
  const uintptr_t second = map_range(swapped);
  put_byte(first, 5);
  put_byte(second, 6);
  EXPECT_EQ(cuda_byte_at(second + kChunk), std::byte{5});
  EXPECT_EQ(cuda_byte_at(first + kChunk), std::byte{6});
}

TEST_F(CudaDriverTest, OneSetAccessAndOneUnmapForAWholeRun) {
  const auto chunks = create(16);
  const uintptr_t addr = driver().reserve(16 * kChunk, kChunk);
  driver().map(addr, chunks, kChunk);
  const auto accesses = standin_.calls("cuMemSetAccess");
  const auto unmaps = standin_.calls("cuMemUnmap");
  driver().set_access(addr, 16 * kChunk, Access::kReadWrite);
  driver().unmap(addr, 16 * kChunk, kChunk);
  EXPECT_EQ(standin_.calls("cuMemSetAccess"), accesses + 1);
  EXPECT_EQ(standin_.calls("cuMemUnmap"), unmaps + 1);
}

TEST_F(CudaDriverTest, DriverThatUnmapsOneMappingACallIsServedSo) {
  standin_.set_single_unmap(1);
  const auto chunks = create(4);
  const uintptr_t addr = map_range(chunks);
  driver().unmap(addr, 4 * kChunk, kChunk);
  const auto unmaps = standin_.calls("cuMemUnmap");
  driver().map(addr, chunks, kChunk);
  driver().unmap(addr, 4 * kChunk, kChunk);
  EXPECT_EQ(standin_.calls("cuMemUnmap"), unmaps + 4) << "the refusal is remembered";
}

TEST_F(CudaDriverTest, UnmapThatFailsHalfWayMapsTheRunAgain) {
  standin_.set_single_unmap(1);
  const auto chunks = create(4);
  const uintptr_t addr = map_range(chunks);
  put_byte(addr, 8);
  standin_.fail("cuMemUnmap", 4, cuda::CUDA_ERROR_UNKNOWN);  // 1 for the run, then the third chunk
  EXPECT_THROW(driver().unmap(addr, 4 * kChunk, kChunk), DriverError);
  EXPECT_EQ(cuda_byte_at(addr), std::byte{8});
  put_byte(addr + kChunk, 9);
  driver().unmap(addr, 4 * kChunk, kChunk);
}

TEST_F(CudaDriverTest, UnmapWhoseRollbackFailsLeavesTrueBooks) {
  standin_.set_single_unmap(1);
  const auto chunks = create(3);
  const uintptr_t addr = map_range(chunks);
  standin_.fail("cuMemUnmap", 3, cuda::CUDA_ERROR_UNKNOWN);
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_UNKNOWN);
  const auto text = error_text([&] { driver().unmap(addr, 3 * kChunk, kChunk); });
  EXPECT_TRUE(contains(text, "1 chunk(s) of this call stay unmapped")) << text;
  driver().release(chunks[0], kChunk);
  driver().unmap(addr + kChunk, 2 * kChunk, kChunk);
  driver().free(addr, 3 * kChunk);
}

TEST_F(CudaDriverTest, MapThatFailsAtAnyChunkMapsNone) {
  const auto chunks = create(4);
  const uintptr_t addr = driver().reserve(4 * kChunk, kChunk);
  for (int nth = 1; nth <= 4; ++nth) {
    standin_.fail("cuMemMap", nth, cuda::CUDA_ERROR_UNKNOWN);
    EXPECT_THROW(driver().map(addr, chunks, kChunk), DriverError);
    EXPECT_EQ(standin_.live("mapping"), 4u) << "the windows only";
  }
  driver().map(addr, chunks, kChunk);
}

TEST_F(CudaDriverTest, MapWhoseRollbackFailsLeavesTrueBooks) {
  const auto chunks = create(3);
  const uintptr_t addr = driver().reserve(3 * kChunk, kChunk);
  standin_.fail("cuMemMap", 3, cuda::CUDA_ERROR_UNKNOWN);
  standin_.fail("cuMemUnmap", 1, cuda::CUDA_ERROR_UNKNOWN);
  const auto text = error_text([&] { driver().map(addr, chunks, kChunk); });
  EXPECT_TRUE(contains(text, "1 chunk(s) of this call stay mapped")) << text;
  EXPECT_THROW(driver().release(chunks[0], kChunk), std::invalid_argument);
  driver().release(chunks[1], kChunk);
  driver().unmap(addr, kChunk, kChunk);
}

TEST_F(CudaDriverTest, DriverErrorNamesCallCodeAndArguments) {
  const auto chunks = create(1);
  const uintptr_t addr = driver().reserve(kChunk, kChunk);
  standin_.fail("cuMemMap", 1, cuda::CUDA_ERROR_NOT_PERMITTED);
  try {
    driver().map(addr, chunks, kChunk);
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
  const auto text = error_text([&] { (void)driver().create(kChunk); });
  EXPECT_TRUE(contains(text, "CUDA_ERROR_12345")) << text;
}

TEST_F(CudaDriverTest, CallersMistakesNeverReachTheDriver) {
  const auto chunks = create(2);
  const Handle big = driver().create(2 * kChunk);
  const uintptr_t addr = driver().reserve(4 * kChunk, kChunk);
  const uintptr_t other = driver().reserve(kChunk, kChunk);
  const std::span<const Handle> one(chunks.data(), 1);
  driver().map(addr + kChunk, one, kChunk);
  const Handle unknown[] = {Handle{42}};
  std::byte byte{};

  const std::vector<std::pair<const char*, std::function<void()>>> mistakes = {
      {"reserve nothing", [&] { (void)driver().reserve(0, kChunk); }},
      {"reserve below granularity", [&] { (void)driver().reserve(4096, kChunk); }},
      {"alignment no power of two", [&] { (void)driver().reserve(kChunk, 3 * kChunk); }},
      {"alignment below granularity", [&] { (void)driver().reserve(kChunk, 4096); }},
      {"chunk below granularity", [&] { (void)driver().create(kMiB); }},
      {"chunk no multiple", [&] { (void)driver().create(3 * kMiB); }},
      {"chunk of nothing", [&] { (void)driver().create(0); }},
      {"map over a mapping", [&] { driver().map(addr + kChunk, one, kChunk); }},
      {"map into a mapping", [&] { driver().map(addr, chunks, kChunk); }},
      {"map outside", [&] { driver().map(addr + 3 * kChunk, chunks, kChunk); }},
      {"map across ranges", [&] { driver().map(other, chunks, kChunk); }},
      {"map at an odd address", [&] { driver().map(addr + 4096, one, kChunk); }},
      {"map an unknown chunk", [&] { driver().map(addr, unknown, kChunk); }},
      {"map with another size", [&] { driver().map(addr + 2 * kChunk, {&big, 1}, kChunk); }},
      {"set_access on a hole",
       [&] { driver().set_access(addr + kChunk, 2 * kChunk, Access::kReadWrite); }},
      {"set_access on part of a chunk",
       [&] { driver().set_access(addr + kChunk, kMiB, Access::kReadWrite); }},
      {"set_access on nothing", [&] { driver().set_access(addr, kChunk, Access::kReadWrite); }},
      {"unmap what is not mapped", [&] { driver().unmap(addr, kChunk, kChunk); }},
      {"unmap across a hole", [&] { driver().unmap(addr + kChunk, 2 * kChunk, kChunk); }},
      {"unmap with another size", [&] { driver().unmap(addr + kChunk, kChunk, 2 * kChunk); }},
      {"free while mapped", [&] { driver().free(addr, 4 * kChunk); }},
      {"free a part", [&] { driver().free(addr, kChunk); }},
      {"free what is not reserved", [&] { driver().free(addr + kChunk, kChunk); }},
      {"release while mapped", [&] { driver().release(chunks[0], kChunk); }},
      {"release with another size", [&] { driver().release(chunks[1], 2 * kChunk); }},
      {"release an unknown chunk", [&] { driver().release(Handle{42}, kChunk); }},
      {"fill past the end", [&] { driver().fill(chunks[0], 1, kChunk, byte); }},
      {"read past the end", [&] { driver().read(chunks[0], kChunk, {&byte, 1}); }},
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
  driver().unmap(addr + kChunk, kChunk, kChunk);
  driver().release(chunks[0], kChunk);
  EXPECT_THROW(driver().release(chunks[0], kChunk), std::invalid_argument) << "double release";
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
  EXPECT_EQ(driver().memory_info().free_bytes, driver().memory_info().total_bytes - 2 * kChunk);
}

TEST_F(CudaDriverTest, AnyThreadMayCallAndNeedsNoContext) {
  const Handle chunk = driver().create(kChunk);
  std::thread([&] { driver().fill(chunk, 0, kChunk, std::byte{4}); }).join();
  std::byte value{};
  driver().read(chunk, 0, {&value, 1});
  EXPECT_EQ(value, std::byte{4});
}

TEST_F(CudaDriverTest, CaptureModeOfTheThreadIsRestored) {
  (void)create(1);
  const auto api = CudaApi::load(STANDIN_CUDA_PATH);
  auto mode = cuda::CU_STREAM_CAPTURE_MODE_GLOBAL;
  ASSERT_EQ(api->cuThreadExchangeStreamCaptureMode(&mode), cuda::CUDA_SUCCESS);
  EXPECT_EQ(mode, cuda::CU_STREAM_CAPTURE_MODE_GLOBAL);
}

TEST_F(CudaDriverTest, TwoDevicesHaveTheirOwnMemory) {
  standin_.set_capacity(2 * kChunk);
  CudaDriver second(options(1));
  (void)create(2);
  EXPECT_THROW((void)driver().create(kChunk), OutOfMemoryError);
  EXPECT_NO_THROW((void)second.create(kChunk));
  EXPECT_EQ(second.memory_info().free_bytes, kChunk);
}

TEST_F(CudaDriverTest, TwoDriversOfOneDeviceDoNotMeet) {
  CudaDriver second(options());
  const Handle chunk = driver().create(kChunk);
  EXPECT_THROW(second.release(chunk, kChunk), std::invalid_argument);
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
        EXPECT_EQ(cuda_byte_at(addr + 2 * kChunk), static_cast<std::byte>(seed));
        driver().unmap(addr, 3 * kChunk, kChunk);
        for (const Handle chunk : chunks) driver().release(chunk, kChunk);
        driver().free(addr, 3 * kChunk);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(standin_.live("bytes"), 0u);
}

}  // namespace
}  // namespace vtensor
