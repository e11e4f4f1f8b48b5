// RTree: recorded prefixes of which windows have left rows behind.
#include <algorithm>
#include <utility>

#include "vtensor/pool/rtree.h"

namespace vtensor {

// Before the match gets a node whose rows begin with `first_row`.
void RTree::keep_seam(Match& match, size_t first_row) const {
  const size_t first = first_row * geometry_.row_chunks;
  if (geometry_.windows.empty() || first >= match.table.size()) return;
  const auto row = match.table.begin() + static_cast<ptrdiff_t>(first);
  match.seams.push_back({match.num_tokens, {row, match.table.end()}});
}

// Makes a match do without what stands in `row` now: it ends before the row, or inside of it where
// an older node ends there, whose chunks hold what the later one's have lost.
void RTree::shorten(Match& match, size_t row) const {
  std::vector<Seam>& seams = match.seams;
  const auto is_beyond = [&](const Seam& seam) { return seam.num_tokens >= match.num_tokens; };
  while (!seams.empty() && is_beyond(seams.back())) seams.pop_back();
  while (!seams.empty() && geometry_.full_rows(seams.back().num_tokens) > row) seams.pop_back();
  if (seams.empty() || geometry_.full_rows(seams.back().num_tokens) < row) {
    match.num_tokens = geometry_.tokens_in(row);
    return;
  }
  match.num_tokens = seams.back().num_tokens;
  std::copy(seams.back().row.begin(), seams.back().row.end(),
            match.table.begin() + static_cast<ptrdiff_t>(row * geometry_.row_chunks));
  seams.pop_back();
}

RTree::Match RTree::usable(Match match) const {
  const size_t row_chunks = geometry_.row_chunks;
  for (auto window = geometry_.windows.begin(); window != geometry_.windows.end();) {
    const size_t first_row = geometry_.first_row_kept(*window, match.num_tokens);
    size_t row = geometry_.rows_for(match.num_tokens);
    while (row > first_row &&
           match.table[(row - 1) * row_chunks + window->first_column] != kNoChunk)
      --row;
    if (row <= first_row) {
      ++window;
      continue;
    }
    shorten(match, row - 1);
    match.cut_by_window = window->num_tokens;
    window = geometry_.windows.begin();
  }
  match.table.resize(geometry_.rows_for(match.num_tokens) * row_chunks);
  for (const Window& window : geometry_.windows) {
    for (size_t row = 0; row < geometry_.first_row_kept(window, match.num_tokens); ++row) {
      std::fill(
          match.table.begin() + static_cast<ptrdiff_t>(row * row_chunks + window.first_column),
          match.table.begin() + static_cast<ptrdiff_t>(row * row_chunks + window.end_column),
          kNoChunk);
    }
  }
  return match;
}

// Puts chunks of `table`, which hold `num_tokens` tokens of the node's path, in the place of those
// given back: all rows that they fill, and the last one of the node if they reach its end.
void RTree::heal(RNode& node, size_t num_tokens, std::span<const ChunkId> table) {
  if (geometry_.windows.empty()) return;
  const size_t row_chunks = geometry_.row_chunks;
  const size_t first = geometry_.full_rows(node.start) * row_chunks;
  const size_t end_row =
      num_tokens >= node.end() ? geometry_.rows_for(node.end()) : geometry_.full_rows(num_tokens);
  for (size_t i = first; i < end_row * row_chunks; ++i) {
    ChunkId& entry = node.rows[i - first];
    if (entry != kNoChunk || table[i] == kNoChunk) continue;
    entry = table[i];
    pset_.add_tree_ref(entry);
    if (node.num_pins > 0) pset_.add_pin(entry);
  }
}

// Gives up what a window would not read at the leaf's end. Returns how many chunks became free.
size_t RTree::thin(RNode& leaf) {
  const size_t row_chunks = geometry_.row_chunks;
  const size_t first_row = geometry_.full_rows(leaf.start);
  size_t freed = 0;
  for (const Window& window : geometry_.windows) {
    const size_t end_row = geometry_.first_row_kept(window, leaf.end());
    for (size_t row = first_row; row < end_row; ++row) {
      for (size_t column = window.first_column; column < window.end_column; ++column) {
        ChunkId& entry = leaf.rows[(row - first_row) * row_chunks + column];
        if (entry == kNoChunk || pset_[entry].table_refs > 0) continue;
        pset_.drop_tree_ref(entry);
        freed += static_cast<size_t>(pset_[entry].refs() == 0);
        entry = kNoChunk;
      }
    }
  }
  return freed;
}

}  // namespace vtensor
