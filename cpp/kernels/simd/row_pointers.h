// Rows of a matrix that are read side by side: addresses that fit in registers.
#pragma once

#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// Four rows share a pointer, so that all fit in registers: row m is at base[m / 4] + m % 4 rows.
template <class T, int M>
struct RowPointers {
  const char* base[(M + 3) / 4];
  int64_t stride;

  VTENSOR_INLINE RowPointers(const T* x, int64_t x_stride)
      : stride(x_stride * static_cast<int64_t>(sizeof(T))) {
    for (int i = 0; i < (M + 3) / 4; ++i)
      base[i] = reinterpret_cast<const char*>(x) + 4 * i * stride;
  }
  template <class V = T>
  VTENSOR_INLINE V at(int m, int64_t bytes) const {
    V value;
    __builtin_memcpy(&value, base[m / 4] + (m % 4) * stride + bytes, sizeof value);
    return value;
  }
};

}  // namespace
}  // namespace vtensor::kernels
