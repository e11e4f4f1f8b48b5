// Linear layers in bfloat16 with many rows, by products of pairs (simd/pairs.h).
//
// Tiles of 6 rows times the 64 outputs of a panel, which stays in the second-level cache while row
// after row is multiplied with it: the pairs are multiplied at the full rate of the instruction,
// and nothing needs to be asked for in advance.
//
// Sums are float32 over the whole depth, in its order, rounded once: a row's outputs are the same
// bits among whatever rows it stands, here and in linear.h.
#pragma once

#include "kernels/simd/many_linear.h"

namespace vtensor::kernels {
namespace {

#if defined(VTENSOR_HAS_PAIRS)

// Rows [row, row + M) times the outputs.
template <bool kGates, int M>
void pair_tile(const LinearCall& call, int64_t row, const TileOutputs<BFloat16>& outputs,
               Prefetch ahead) {
  Vec sums[M][4] = {};
  const RowPointers<BFloat16, M> rows(static_cast<const BFloat16*>(call.x) + row * call.x_stride,
                                      call.x_stride);
  const BFloat16* left = outputs.left;
  const BFloat16* right = outputs.right;
  for (int64_t k = 0; k < call.depth; k += 2) {
    const UVec pairs[4] = {load_pairs(left), load_pairs(left + kPairLanes), load_pairs(right),
                           load_pairs(right + kPairLanes)};
    ahead.step();
    left += 2 * kManyColumns;
    right += 2 * kManyColumns;
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      const uint32_t x_pair = rows.template at<uint32_t>(m, k * 2);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) sums[m][n] = add_products(sums[m][n], x_pair, pairs[n]);
    }
  }
#pragma GCC unroll 12
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int n = 0; n < (kGates ? 2 : 4); ++n) {
      const int64_t column = outputs.column + n * kLanes;
      if constexpr (kGates) {
        finish_gate<BFloat16>(call, row + m, column, sums[m][n], sums[m][n + 2]);
      } else if (column < call.columns) {
        finish<BFloat16>(call, row + m, column, sums[m][n]);
      }
    }
  }
}

template <bool kGates, int M = kLinearRows>
VTENSOR_INLINE void pair_rows(const LinearCall& call, int64_t row, int64_t num_rows,
                              const TileOutputs<BFloat16>& outputs, Prefetch ahead) {
  if (num_rows == M) {
    pair_tile<kGates, M>(call, row, outputs, ahead);
  } else if constexpr (M > 1) {
    pair_rows<kGates, M - 1>(call, row, num_rows, outputs, ahead);
  }
}

template <bool kGates>
void pair_block(const LinearCall& call, const LinearBlock& block) {
  const int64_t num_rows = block.row_end - block.row_begin;
  const int64_t tiles = (num_rows + kLinearRows - 1) / kLinearRows;
  for (int64_t unit = block.begin; unit < block.end; ++unit) {
    const TileOutputs<BFloat16> outputs = tile_outputs<BFloat16>(call, unit);
    const PanelSteps panel = {outputs.left, call.depth / 2, kStepBytes<BFloat16>};
    Ahead ahead(panel, tiles, unit == block.begin, kStreamBytes);
    for (int64_t tile = 0; tile < tiles; ++tile) {
      const int64_t first = num_rows * tile / tiles, last = num_rows * (tile + 1) / tiles;
      // Of gates and factors, which are two panels' halves, there are too many rows to wait for.
      pair_rows<kGates>(call, block.row_begin + first, last - first, outputs,
                        kGates ? Prefetch{} : ahead.next_tile());
    }
  }
}

inline void pair_many_linear(const LinearCall& call, const LinearBlock& block, float* /*scratch*/) {
  return call.gates ? pair_block<true>(call, block) : pair_block<false>(call, block);
}

#endif

}  // namespace
}  // namespace vtensor::kernels
