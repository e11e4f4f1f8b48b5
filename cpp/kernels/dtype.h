// DType: the number formats that the kernels read and write. Arithmetic is always float32.
// KVFormat: how KV of such numbers stands in the arena.
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

// As they are, or as bytes: the numbers of a head, then their scale, a float32 at any address.
// A number is byte x scale.
enum class KVFormat { kPlain, kInt8, kFloat8 };
inline constexpr size_t kNumKVFormats = 3;
// vLLM's, by KVFormat.
inline constexpr const char* kKVFormatNames[kNumKVFormats] = {"auto", "int8", "fp8_e4m3"};
inline constexpr int kScaleBytes = 4;

struct Int8 {
  int8_t value;  // at most 127 in magnitude
};
// 4 bits of exponent, 3 of mantissa, up to 448 (OCP's e4m3fn); no NaN is ever stored.
struct Float8 {
  uint8_t bits;
};

// 2^(exponent - 127), and 0 is zero: where that is not so, OCP's e8m0.
struct PowerOf2 {
  uint8_t exponent;
};

constexpr size_t element_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace vtensor::kernels
