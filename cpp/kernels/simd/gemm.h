// C (+)= A B in float32, on one thread, for matrices that fit in the second-level cache.
//
// A and B hold float32 numbers, or pairs of bfloat16 numbers along the depth (simd/pairs.h), which
// then counts pairs.
//
// The inner kernel keeps a tile of M x N vectors of C in registers: enough of them to hide the
// latency of a multiply-add, few enough for the register file.
#pragma once

#include "kernels/simd/pairs.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// 32 registers with AVX-512, 16 before.
constexpr int kGemmRows = 6;
constexpr int kGemmVecs = kLanes == 16 ? 4 : 2;
// Columns of B that are read together: the packed keys of a tile are stored in panels of this
// width.
constexpr int kPanel = kGemmVecs * kLanes;

VTENSOR_INLINE Vec add_products(Vec sum, float x, Vec w) { return sum + x * w; }

VTENSOR_INLINE Vec load_columns(const float* p) { return load(p); }
#if defined(VTENSOR_HAS_PAIRS)
VTENSOR_INLINE UVec load_columns(const uint32_t* p) { return load_pairs(p); }
#endif

template <int M, int N, bool kAdd, class E>
VTENSOR_INLINE void gemm_tile(const E* a, int lda, const E* b, int ldb, float* c, int ldc,
                              int depth) {
  Vec acc[M][N];
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[m][n] = kAdd ? load(c + m * ldc + n * kLanes) : Vec{};
  }
  for (int k = 0; k < depth; ++k) {
    decltype(load_columns(b)) column[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) column[n] = load_columns(b + k * ldb + n * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < M; ++m) {
      const E x = a[m * lda + k];
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[m][n] = add_products(acc[m][n], x, column[n]);
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(c + m * ldc + n * kLanes, acc[m][n]);
  }
}

// All rows of a panel of N vectors.
template <int N, bool kAdd, class E>
void gemm_panel(const E* a, int lda, const E* b, int ldb, float* c, int ldc, int rows, int depth) {
  int m = 0;
  for (; m + kGemmRows <= rows; m += kGemmRows) {
    gemm_tile<kGemmRows, N, kAdd>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, depth);
  }
  for (; m + 2 <= rows; m += 2) {
    gemm_tile<2, N, kAdd>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, depth);
  }
  if (m < rows) gemm_tile<1, N, kAdd>(a + m * lda, lda, b, ldb, c + m * ldc, ldc, depth);
}

// c [rows, columns] += a [rows, depth] b [depth, columns]; columns: a multiple of kLanes.
template <class E>
inline void gemm_add(const E* a, int lda, const E* b, int ldb, float* c, int ldc, int rows,
                     int columns, int depth) {
  int n = 0;
  for (; n + kPanel <= columns; n += kPanel) {
    gemm_panel<kGemmVecs, true>(a, lda, b + n, ldb, c + n, ldc, rows, depth);
  }
  for (; n < columns; n += kLanes) {
    gemm_panel<1, true>(a, lda, b + n, ldb, c + n, ldc, rows, depth);
  }
}

}  // namespace
}  // namespace vtensor::kernels
