#include "kernels/linear/words.h"

#include <algorithm>
#include <cstring>
#include <vector>

namespace vtensor::kernels {
namespace {

// Inputs whose words are written of all outputs of a panel before the next ones: they stay in the
// first-level cache.
constexpr int64_t kInputsAtOnce = 1024;
constexpr uint64_t kEachByte = 0x0101010101010101;

template <int kBits, bool kFromZero>
class Writer {
 public:
  // A step of one output; `words` are kQuantisedColumns apart.
  void write(const int8_t* integers, uint32_t* words) {
    if constexpr (kBits == 8) {
      uint32_t word;
      std::memcpy(&word, integers, sizeof word);
      *words = kFromZero ? word ^ 0x80808080 : word;
    } else if constexpr (kBits == 4) {
      const uint64_t eight = ordered(integers);
      *words = static_cast<uint32_t>(eight | eight >> 32 << 4);
    } else {
      const uint64_t first = ordered(integers), second = ordered(integers + 8);
      const uint64_t fours[] = {first & 0xffffffff, first >> 32, second & 0xffffffff};
      const uint64_t last = second >> 32;
      for (int i = 0; i < 3; ++i) {
        const uint64_t above = (last >> (2 * i) & 0x03030303) << 6;
        words[i * kQuantisedColumns] = static_cast<uint32_t>(fours[i] | above);
      }
    }
  }

  bool all_fit() const { return (bits_ & ~(kEachByte * kMask)) == 0; }

 private:
  static constexpr uint64_t kMask = (1 << kBits) - 1;

  // The next eight integers, from 0 on, in a step's order.
  uint64_t ordered(const int8_t* integers) {
    uint64_t eight;
    std::memcpy(&eight, integers, sizeof eight);
    // Byte by byte, as the upper bit of each is added apart.
    constexpr uint64_t kUpper = kEachByte << 7, kZero = kEachByte << (kBits - 1);
    eight = ((eight & ~kUpper) + kZero) ^ (eight & kUpper);
    bits_ |= eight;
    return order_bytes(eight);
  }

  uint64_t bits_ = 0;  // of all integers that have been written
};

template <int kBits, bool kFromZero>
bool write_all(const int8_t* integers, int64_t columns, int64_t depth, uint32_t* words) {
  constexpr int64_t kInputs = step_inputs(kBits);
  constexpr int64_t kStep = step_words(kBits) * kQuantisedColumns;
  Writer<kBits, kFromZero> writer;
  const std::vector<int8_t> zeros(static_cast<size_t>(depth));
  for (int64_t column = 0; column < columns; column += kQuantisedColumns) {
    for (int64_t begin = 0; begin < depth; begin += kInputsAtOnce) {
      const int64_t end = std::min(begin + kInputsAtOnce, depth);
      for (int64_t i = 0; i < kQuantisedColumns; ++i) {
        const bool is_there = column + i < columns;
        const int8_t* row = is_there ? integers + (column + i) * depth : zeros.data();
        for (int64_t k = begin; k < end; k += kInputs) {
          writer.write(row + k, words + k / kInputs * kStep + i);
        }
      }
    }
    words += depth / kInputs * kStep;
  }
  return writer.all_fit();
}

}  // namespace

bool write_words(const int8_t* integers, int64_t columns, int64_t depth, int bits, bool from_zero,
                 uint32_t* words) {
  if (bits == 4) return write_all<4, true>(integers, columns, depth, words);
  if (bits == 6) return write_all<6, true>(integers, columns, depth, words);
  if (from_zero) return write_all<8, true>(integers, columns, depth, words);
  return write_all<8, false>(integers, columns, depth, words);
}

}  // namespace vtensor::kernels
