// Addresses and numbers that come from Python, as what the kernels take.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>

#include "kernels/dtype.h"

namespace vtensor::kernels {

template <class T = void>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline DType dtype_of(size_t index) {
  if (index >= kNumDTypes) throw std::invalid_argument("the kernels know no dtype of this number");
  return static_cast<DType>(index);
}

}  // namespace vtensor::kernels
