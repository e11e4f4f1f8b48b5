// Byte units and overflow-checked arithmetic used by every layer. Header only, no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace vtensor {

inline constexpr size_t kKiB = size_t{1} << 10;
inline constexpr size_t kMiB = size_t{1} << 20;
inline constexpr size_t kGiB = size_t{1} << 30;

// Smallest multiple of `unit` that is >= `value`. Requires unit > 0.
constexpr size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

// Number of `unit`-sized pieces that cover `value`. Requires unit > 0.
constexpr size_t ceil_div(size_t value, size_t unit) {
  return value / unit + static_cast<size_t>(value % unit != 0);
}

// a * b, or std::invalid_argument naming `what` when the product does not fit in size_t.
inline size_t checked_mul(size_t a, size_t b, const char* what) {
  size_t product = 0;
  if (__builtin_mul_overflow(a, b, &product)) {
    throw std::invalid_argument(std::string(what) + " overflows: " + std::to_string(a) + " x " +
                                std::to_string(b));
  }
  return product;
}

// a + b, in the same way.
inline size_t checked_add(size_t a, size_t b, const char* what) {
  size_t sum = 0;
  if (__builtin_add_overflow(a, b, &sum)) {
    throw std::invalid_argument(std::string(what) + " overflows: " + std::to_string(a) + " + " +
                                std::to_string(b));
  }
  return sum;
}

}  // namespace vtensor
