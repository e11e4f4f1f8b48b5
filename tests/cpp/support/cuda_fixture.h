// What the tests of the CUDA files share: a driver on the stand-in libcuda.so.1, and a check after
// each test that nothing is left alive in it and that no rule of CUDA's was broken.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tests/cpp/standin_cuda/standin_control.h"
#include "vtensor/driver/cuda/cuda_driver.h"
#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

namespace vtensor {

inline constexpr size_t kCudaChunk = 2 * kMiB;

inline std::byte cuda_byte_at(uintptr_t addr) { return *reinterpret_cast<const std::byte*>(addr); }

inline void put_byte(uintptr_t addr, int value) {
  *reinterpret_cast<std::byte*>(addr) = static_cast<std::byte>(value);
}

class CudaDriverTest : public ::testing::Test {
 protected:
  void SetUp() override { standin_.reset(); }

  // After each test nothing is alive in the driver, and no rule of CUDA's was broken.
  void TearDown() override {
    driver_.reset();
    EXPECT_EQ(standin_.live(nullptr), 0u);
    EXPECT_EQ(standin_.live("bytes"), 0u);
    EXPECT_EQ(standin_.violations(), num_expected_violations_) << standin_.last_violation();
    standin_.reset();
  }

  static CudaOptions options(int device_index = 0) {
    CudaOptions options;
    options.device_index = device_index;
    options.libcuda_path = STANDIN_CUDA_PATH;
    options.window_slab_bytes = 16 * kMiB;  // small, so that the tests need several slabs
    return options;
  }

  CudaDriver& driver() {
    if (driver_ == nullptr) driver_ = std::make_unique<CudaDriver>(options());
    return *driver_;
  }

  std::vector<Handle> create(size_t num_chunks) {
    std::vector<Handle> handles(num_chunks);
    for (Handle& handle : handles) handle = driver().create(kCudaChunk);
    return handles;
  }

  // A reserved range with all `handles` mapped read-write.
  uintptr_t map_range(std::span<const Handle> handles) {
    const uintptr_t addr = driver().reserve(handles.size() * kCudaChunk, kCudaChunk);
    driver().map(addr, handles, kCudaChunk);
    driver().set_access(addr, handles.size() * kCudaChunk, Access::kReadWrite);
    return addr;
  }

  // The text of the DriverError that `action` throws.
  static std::string error_text(const std::function<void()>& action) {
    try {
      action();
    } catch (const std::exception& error) {
      return error.what();
    }
    return "no error";
  }

  StandinControl standin_;
  std::unique_ptr<CudaDriver> driver_;
  uint64_t num_expected_violations_ = 0;
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace vtensor
