// Sharing: which vTensors hold the same chunks at the same place, read off their page tables. The
// prefix tree of ChunkAttention (section 3.1) without a second data structure:
//
//   slot 0  [7][8][ 9][12]      {0, 1, 2} share rows 0-1, then {0, 1} row 2:
//   slot 1  [7][8][ 9][13]        SharedRange{slot 0, tokens of rows 0-1, members 0 1 2}
//   slot 2  [7][8][10]            SharedRange{slot 0, tokens of row 2,    members 0 1}
//
// Sharing is counted from the first token on: after a row in which two page tables differ, equal
// rows are passed over. (With dedup there are none; without it there may be.)
//
// Planes with a window are compared only where all planes have one: a chunk that two vTensors have
// at one place says that all tokens up to it are the same, whatever else is mapped. What two have
// both given back counts as the same. So a range is to be read, in planes with a window, only where
// no member's window has left a token of it; there all members have it.
//
// Cost: every row that somebody shares is compared once for each of its readers, with a sort of the
// readers where they part. Reads page tables only: no driver calls, no reference counts change.
// Thread-safety: none; the manager's mutex guards the page tables.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "common/shared_range.h"
#include "vtensor/pool/pool.h"

namespace vtensor {

// A slot of which the first `num_tokens` tokens are read.
struct ReadExtent {
  SlotId slot = 0;
  size_t num_tokens = 0;
};

// All maximal ranges of whole rows that several readers share. A forest, parents before children:
// the ranges of one reader start at token 0, touch each other and stand in order. A token that
// straddles two rows is shared when both are.
std::vector<SharedRange> shared_ranges(const Pool& pool, std::span<const ReadExtent> readers);

}  // namespace vtensor
