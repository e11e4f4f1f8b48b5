// Geometry: how tokens, rows, chunks and planes relate. Immutable after construction.
//
// A plane is one virtual range of a vTensor. Planes may differ in their bytes per token; a vTensor
// grows by whole rows, which hold the same tokens in all planes. A row of a plane is one chunk, or
// several where its tokens are so many times larger: each of these is a column.
//
//                      row 0              row 1              row 2
//   plane 0, column 0  [chunk 7 ]         [chunk 10]         [chunk 13]
//   plane 1, column 1  [chunk 8 ]         [chunk 11]         [chunk 14]
//            column 2       [chunk 9 ]         [chunk 12]         [chunk 15]
//
// Token t lies at byte t * token_bytes * (columns of the plane) of a plane; it may straddle rows.
//
// Thread-safety: a value; reading is safe from everywhere.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "vtensor/util/units.h"

namespace vtensor {

// One virtual range of a vTensor: columns [first_column, first_column + num_columns).
struct Plane {
  size_t first_column = 0;
  size_t num_columns = 1;
};

// The chunks at one place of all rows: the idx-th of num_columns in its plane.
struct Column {
  size_t idx = 0;
  size_t num_columns = 1;
};

struct Geometry {
  size_t row_chunks = 0;   // chunks of a row: columns of all planes
  size_t token_bytes = 0;  // bytes of one token in one column, on average over a row
  size_t chunk_bytes = 0;
  size_t max_tokens = 0;  // of one vTensor
  size_t max_slots = 0;
  std::vector<Plane> planes;
  std::vector<Column> columns;

  void add_plane(size_t num_columns) {
    planes.push_back({row_chunks, num_columns});
    for (size_t idx = 0; idx < num_columns; ++idx) columns.push_back({idx, num_columns});
    row_chunks += num_columns;
  }

  // Rows that the first `num_tokens` tokens touch.
  size_t rows_for(size_t num_tokens) const {
    return ceil_div(num_tokens * token_bytes, chunk_bytes);
  }
  // The row in which byte 0 of token `num_tokens` lies: rows below it are full at that length.
  size_t full_rows(size_t num_tokens) const { return num_tokens * token_bytes / chunk_bytes; }
  // Tokens that lie wholly inside the first `num_rows` rows.
  size_t tokens_in(size_t num_rows) const { return num_rows * chunk_bytes / token_bytes; }
  // Bytes that the first `num_tokens` tokens use of the chunk at `entry` of a page table, which is
  // row-major over columns.
  uint32_t bytes_used(size_t entry, size_t num_tokens) const {
    const Column& column = columns[entry % row_chunks];
    const size_t end = num_tokens * token_bytes * column.num_columns;
    const size_t begin = (entry / row_chunks * column.num_columns + column.idx) * chunk_bytes;
    return end <= begin ? 0 : static_cast<uint32_t>(std::min(end - begin, chunk_bytes));
  }
  size_t max_rows() const { return rows_for(max_tokens); }
  // Distance between two slots of a plane, for each of its columns.
  size_t slot_stride_bytes() const { return max_rows() * chunk_bytes; }
  size_t row_bytes() const { return row_chunks * chunk_bytes; }
};

}  // namespace vtensor
