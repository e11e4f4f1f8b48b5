// write_words: the integers of a quantised weight in the words that the kernels read.
#pragma once

#include <cstdint>

#include "kernels/calls/quantised.h"

namespace vtensor::kernels {

// Four bytes, each the lower one of two.
constexpr uint64_t spread_bytes(uint64_t four) {
  four = (four | four << 16) & 0x0000ffff0000ffff;
  return (four | four << 8) & 0x00ff00ff00ff00ff;
}

// Of eight bytes, from the lowest one on, 0, 4, 1, 5, 2, 6, 3, 7: the order of a step's inputs.
constexpr uint64_t order_bytes(uint64_t eight) {
  return spread_bytes(eight & 0xffffffff) | spread_bytes(eight >> 32) << 8;
}

// words: [panels, steps, words of a step, 64] of integers [columns, depth], all of which become
// from_zero ? integer + 2^(bits - 1) : integer; outputs behind the last one have zeros.
// Returns whether all integers have so many bits.
// REQUIRES: bits 8, 6 or 4, and from_zero but with 8; depth a multiple of a step's inputs.
bool write_words(const int8_t* integers, int64_t columns, int64_t depth, int bits, bool from_zero,
                 uint32_t* words);

}  // namespace vtensor::kernels
