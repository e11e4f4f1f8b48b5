// QuantisedWeight, QuantisedCall: what linear layers with quantised weights are asked to compute.
//
// Plain values, as in kernels/calls/linear.h, which has what a layer with any weight is given.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/calls/codebook.h"
#include "kernels/calls/linear.h"

namespace vtensor::kernels {

// Outputs that stand side by side in a quantised weight, whatever the instruction set.
inline constexpr int64_t kQuantisedColumns = 64;

// How scales, and minimums where there are any, stand in memory:
//
//   kFloat32, kFloat16   [panels, max(groups, 1), 64], the numbers themselves
//   kPowers              the same in bytes: 2^(byte - 127), and 0 is zero (OCP's e8m0)
//   kBlocks              a panel: factors [depth / kScaleBlock, 64], float16,
//                                 then bytes [groups, 64], signed
//
// In blocks a scale is the byte of its group times the factor of its block times `factor_unit`,
// which float32 holds exactly (8 and 11 bits). A minimum is zero() * scale less such a product,
// rounded once: so weights that are counted from 0 are, as in llama.cpp's K-quants, scale * n -
// product.
enum class ScaleFormat { kFloat32, kFloat16, kPowers, kBlocks };
inline constexpr size_t kNumScaleFormats = 4;
inline constexpr const char* kScaleFormatNames[kNumScaleFormats] = {"float32", "float16", "powers",
                                                                    "blocks"};
// Inputs of a block.
inline constexpr int64_t kScaleBlock = 256;

// The fewest inputs whose integers fill whole words of 32 bits, and those words: a step.
constexpr int step_inputs(int bits) { return bits == 6 ? 16 : 32 / bits; }
constexpr int step_words(int bits) { return step_inputs(bits) * bits / 32; }

// Four bytes, each the lower one of two.
constexpr uint64_t spread_bytes(uint64_t four) {
  four = (four | four << 16) & 0x0000ffff0000ffff;
  return (four | four << 8) & 0x00ff00ff00ff00ff;
}

// Of eight bytes, from the lowest one on, 0, 4, 1, 5, 2, 6, 3, 7: the order of a step's inputs.
constexpr uint64_t order_bytes(uint64_t eight) {
  return spread_bytes(eight & 0xffffffff) | spread_bytes(eight >> 32) << 8;
}

// A weight [columns, depth] of integers and scales, in panels of kQuantisedColumns outputs, the
// last one filled up with zeros. What the words of a step hold of one output, bytes and bits
// from the lowest one on:
//
//   8 bits: a word, its bytes inputs k, k + 1, k + 2, k + 3, signed
//   4 bits: a word, inputs k to k + 7, each plus 8, or its place in the codebook: the lower halves
//           of its bytes are inputs 0, 4, 1, 5, the upper ones 2, 6, 3, 7
//   6 bits: three words, inputs k to k + 15, each plus 32, in the same order: the lower six bits of
//           the bytes are inputs 0, 4, 1, 5 | 2, 6, 3, 7 | 8, 12, 9, 13; the upper two of byte i of
//           all three are the bits of input 10, 14, 11 or 15
//
// In groups, weights of 8 bits that multiply bytes are plus 128, and unsigned: `zero()`. Pairs of
// inputs stand in both halves of a word, where products of bfloat16 pairs want them.
//
// `group` 0: one scale an output, and inputs are multiplied as integers (8 bits alone):
//   output = x_scale * scale * sum(x_int * w_int)
// `group` > 0, `byte_inputs` false: a scale and, where there are any, a minimum for so many inputs
// of an output:
//   output = sum over groups of scale * sum(x * w_int) + minimum * sum(x)
// `group` > 0, `byte_inputs` true: the same of x_scale * x_int instead of x, an x_scale for each
// row and group, or for each row if inputs are rotated.
//
// `rotates_inputs`: x times a Hadamard matrix takes the place of x, and the weight was made for it.
// A few inputs that are much larger than the others then share their size with all, which a scale
// for all of a row wants (QuaRot, Ashkboos et al. 2024).
struct QuantisedWeight {
  const uint32_t* words = nullptr;  // [panels, steps, words of a step, 64], aligned to 64 bytes
  const void* scales = nullptr;     // as `scale_format` says
  const void* minimums = nullptr;   // as scales, or none
  const int32_t* sums = nullptr;    // group 0: [panels, 64] of 128 * sum(w_int)
  ScaleFormat scale_format = ScaleFormat::kFloat32;
  bool byte_inputs = true;  // REQUIRES: true with group 0
  int bits = 8;             // 8, 6 or 4
  int64_t group = 0;        // a multiple of a step's inputs that divides the depth
  int64_t depth = 0;        // a multiple of a step's inputs
  int64_t columns = 0;
  Codebook codebook;
  float factor_unit = 1;        // a power of two
  bool rotates_inputs = false;  // REQUIRES: byte_inputs

  // Of an output and all inputs.
  int64_t num_words() const { return depth / step_inputs(bits) * step_words(bits); }
  // What a weight of 0 is where bytes are multiplied in groups.
  int32_t zero() const { return bits == 4 ? codebook.zero() : 1 << (bits - 1); }
  int64_t num_groups() const { return group == 0 ? 1 : depth / group; }
  // Whether `codebook` goes with the rest.
  bool may_have_codebook() const {
    return codebook.kind() == CodebookKind::kEven ||
           (bits == 4 && group > 0 && minimums == nullptr);
  }
  // Whether `scale_format` goes with the sizes.
  bool has_whole_blocks() const {
    return scale_format != ScaleFormat::kBlocks ||
           (group > 0 && kScaleBlock % group == 0 && depth % kScaleBlock == 0);
  }
};

// Inputs that are rotated together, one such block behind the other: the largest power of two that
// divides the depth.
constexpr int64_t rotated_inputs(int64_t depth) { return depth & -depth; }

// What `inputs` of one row are, made once for all panels.
enum class Inputs {
  kBytes,   // integers with a scale a row: plus 128, uint8; in groups int8, in a step's order
  kFloats,  // float32
  // Pairs of which are multiplied at once:
  kBFloat16s,  // as they are
  kInt16s      // integers of 16 bits, with a unit a piece of a group
};
inline constexpr size_t kNumInputs = 4;

// Inputs whose products by kInt16s fit 32 bits.
inline constexpr int64_t kMaxPiece = 512;
// The inputs of a group that share a unit: all, if they are not too many.
constexpr int64_t piece_of(int64_t group, int bits) {
  int64_t num_pieces = (group + kMaxPiece - 1) / kMaxPiece;
  while (group % num_pieces != 0 || group / num_pieces % step_inputs(bits) != 0) ++num_pieces;
  return group / num_pieces;
}

// output = x weight^T + bias + residual, as `layer` says (its x and panels are not read here).
struct QuantisedCall {
  LinearCall layer;
  QuantisedWeight weight;
  const void* inputs = nullptr;     // [rows, depth]
  int64_t input_stride = 0;         // bytes between two rows
  const float* x_scales = nullptr;  // kBytes, kInt16s: [rows, num_scales()]
  // Where there are minimums: [rows, groups]; less the scale where a row has one.
  const float* x_sums = nullptr;
  // kBytes in groups, and kInt16s but for weights of 8 bits: [rows, groups or pieces] of
  // -zero() * sum(x_int), for weights are multiplied plus that.
  const int32_t* x_offsets = nullptr;
  // Of a row; groups but with kInt16s, one where weights are not in groups.
  int64_t num_pieces = 0;
  int64_t piece = 0;  // inputs of one

  int64_t num_scales() const { return weight.rotates_inputs ? 1 : num_pieces; }
};

}  // namespace vtensor::kernels
