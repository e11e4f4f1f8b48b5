#include "vtensor/ops/prefix.h"

#include <utility>

namespace vtensor {

size_t r_push(Pool& pool, const std::string& salt, std::span<const Token> tokens, SlotId slot) {
  return pool.rtree.push(salt, tokens, pool.vset[slot].table);
}

RTree::Match r_prefix_match(Pool& pool, const std::string& salt, std::span<const Token> tokens) {
  RTree::Match match = pool.rtree.usable(pool.rtree.match(salt, tokens));
  for (const ChunkId id : match.table) pool.pset.add_table_ref(id);
  return match;
}

}  // namespace vtensor
