// Geometry: how tokens, rows, chunks and planes relate. Immutable after construction.
//
// A plane is one virtual range of a vTensor. All planes have the same shape, so a vTensor grows by
// whole rows: row r is the r-th chunk of every plane.
//
//            row 0         row 1         row 2
//   plane 0  [chunk 7 ]    [chunk 9 ]    [chunk 11]      token t lives at byte t * token_bytes
//   plane 1  [chunk 8 ]    [chunk 10]    [chunk 12]      of each plane; it may straddle two rows
//
// Thread-safety: a value; reading is safe from everywhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "vtensor/util/units.h"

namespace vtensor {

struct Geometry {
  size_t num_planes = 0;
  size_t token_bytes = 0;  // bytes of one token in one plane
  size_t chunk_bytes = 0;
  size_t max_tokens = 0;  // of one vTensor
  size_t max_slots = 0;

  // Rows that the first `num_tokens` tokens touch.
  size_t rows_for(size_t num_tokens) const {
    return ceil_div(num_tokens * token_bytes, chunk_bytes);
  }
  // The row in which byte 0 of token `num_tokens` lies: rows below it are full at that length.
  size_t full_rows(size_t num_tokens) const { return num_tokens * token_bytes / chunk_bytes; }
  // Tokens that lie wholly inside the first `num_rows` rows.
  size_t tokens_in(size_t num_rows) const { return num_rows * chunk_bytes / token_bytes; }
  // Bytes of row `row` that the first `num_tokens` tokens use.
  uint32_t bytes_used(size_t row, size_t num_tokens) const {
    const size_t end = num_tokens * token_bytes;
    const size_t begin = row * chunk_bytes;
    if (end <= begin) return 0;
    return static_cast<uint32_t>(end - begin < chunk_bytes ? end - begin : chunk_bytes);
  }
  size_t max_rows() const { return rows_for(max_tokens); }
  // Distance between two slots of one plane.
  size_t slot_stride_bytes() const { return max_rows() * chunk_bytes; }
  size_t row_bytes() const { return num_planes * chunk_bytes; }
};

}  // namespace vtensor
