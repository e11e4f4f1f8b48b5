// Codebook: the 16 numbers that weights of 4 bits stand for.
//
// All are integers of a byte, so that any kernel can multiply them: scales make them what they are.
// Which codebooks there are is not known here: one comes with each weight.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace vtensor::kernels {

using CodebookNumbers = std::array<int8_t, 16>;
inline constexpr CodebookNumbers kEvenNumbers = {-8, -7, -6, -5, -4, -3, -2, -1,
                                                 0,  1,  2,  3,  4,  5,  6,  7};

// The most that an unsigned byte may be, so that two products with bytes from -127 to 127 fit 16
// bits.
inline constexpr int32_t kMaxSmallByte = 32767 / (2 * 127);

// What products of bytes ask of the numbers.
enum class CodebookKind {
  kEven,   // kEvenNumbers: nothing is looked up
  kSmall,  // from the least one on they are up to kMaxSmallByte
  kLarge
};
inline constexpr size_t kNumCodebookKinds = 3;

class Codebook {
 public:
  constexpr Codebook() = default;
  constexpr explicit Codebook(const CodebookNumbers& numbers) : numbers_(numbers) {
    const auto [least, most] = std::minmax_element(numbers.begin(), numbers.end());
    const bool is_small = *most - *least <= kMaxSmallByte;
    kind_ = numbers == kEvenNumbers ? CodebookKind::kEven
            : is_small              ? CodebookKind::kSmall
                                    : CodebookKind::kLarge;
    zero_ = is_small ? -*least : 128;
  }
  bool operator==(const Codebook&) const = default;

  constexpr const CodebookNumbers& numbers() const { return numbers_; }
  constexpr CodebookKind kind() const { return kind_; }
  // What is added to them where bytes are multiplied that must not be negative.
  constexpr int32_t zero() const { return zero_; }

 private:
  CodebookNumbers numbers_ = kEvenNumbers;
  CodebookKind kind_ = CodebookKind::kEven;
  int32_t zero_ = 8;
};

}  // namespace vtensor::kernels
