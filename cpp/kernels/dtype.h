// DType: the number formats that the kernels read and write. Arithmetic is always float32.
#pragma once

#include <cstddef>
#include <cstdint>

namespace vtensor::kernels {

enum class DType { kFloat32, kBFloat16, kFloat16 };
inline constexpr size_t kNumDTypes = 3;
// torch's and NumPy's, by DType.
inline constexpr const char* kDTypeNames[kNumDTypes] = {"float32", "bfloat16", "float16"};

// Storage only; the instruction sets' code knows how to widen and round them.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

constexpr size_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace vtensor::kernels
