// rPush and rPrefixMatch: recording a prefix and finding the longest recorded one.
//
// Bookkeeping only, no driver calls. Both are all-or-nothing.
#pragma once

#include <span>
#include <string>

#include "vtensor/pool/pool.h"

namespace vtensor {

// rPush: records `tokens`, whose KV lies in the first rows of the slot. Returns new tokens.
size_t r_push(Pool& pool, const std::string& salt, std::span<const Token> tokens, SlotId slot);

// rPrefixMatch: the longest recorded prefix whose windows are there, and its chunks, which get one
// table reference each, so that nothing can take them away before they are mapped. Undo by
// p_free(match.table).
RTree::Match r_prefix_match(Pool& pool, const std::string& salt, std::span<const Token> tokens);

}  // namespace vtensor
