// write_words: the integers of a quantised weight in the words that the kernels read.
#pragma once

#include <cstdint>

#include "kernels/calls/quantised.h"

namespace vtensor::kernels {

// words: [panels, steps, words of a step, 64] of integers [columns, depth], all of which become
// from_zero ? integer + 2^(bits - 1) : integer; outputs behind the last one have zeros.
// Returns whether all integers have so many bits.
// REQUIRES: bits 8, 6 or 4, and from_zero but with 8; depth a multiple of a step's inputs.
bool write_words(const int8_t* integers, int64_t columns, int64_t depth, int bits, bool from_zero,
                 uint32_t* words);

}  // namespace vtensor::kernels
