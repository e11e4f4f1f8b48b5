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
// Planes with a window keep memory behind the last tokens alone: rows that the window has left are
// given back at the head. The planes that keep all stand first.
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

// Columns [first_column, end_column) keep `num_tokens` tokens: a query reads its own and those
// before it.
struct Window {
  size_t num_tokens = 0;
  size_t first_column = 0;
  size_t end_column = 0;
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
  std::vector<Window> windows;

  // `window`: 0 keeps all. Planes that do come before those with windows.
  void add_plane(size_t num_columns, size_t window = 0) {
    if (window > 0 && (windows.empty() || windows.back().num_tokens != window)) {
      windows.push_back({window, row_chunks, row_chunks});
    }
    if (window > 0) windows.back().end_column += num_columns;
    planes.push_back({row_chunks, num_columns});
    for (size_t idx = 0; idx < num_columns; ++idx) columns.push_back({idx, num_columns});
    row_chunks += num_columns;
  }

  // Columns that keep all.
  size_t lasting_chunks() const {
    return windows.empty() ? row_chunks : windows.front().first_column;
  }
  // The first row that queries from token `num_tokens` on still read.
  size_t first_row_kept(const Window& window, size_t num_tokens) const {
    return num_tokens < window.num_tokens ? 0 : full_rows(num_tokens + 1 - window.num_tokens);
  }
  // Rows that a window keeps at most of `num_tokens` tokens computed `step_tokens` at a time.
  size_t rows_kept(const Window& window, size_t num_tokens, size_t step_tokens) const {
    const size_t rows = rows_for(num_tokens);
    if (step_tokens >= num_tokens || window.num_tokens >= num_tokens) return rows;
    return std::min(rows, rows_for(window.num_tokens - 1 + step_tokens) + 1);
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
