#include "vtensor/core/swapper.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "vtensor/core/saved_chunk.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/ops/prefix.h"
#include "vtensor/util/error.h"

namespace vtensor {

bool Swapper::swap_out(VTensorId id, SwapStore& store) {
  VTensor& vtensor = vtensors_.resident(id);
  if (pool_.vset[vtensor.slot].num_views > 0) {
    throw std::invalid_argument("cannot swap vTensor " + std::to_string(id) +
                                " out while tensor views of it are alive; drop them first");
  }
  const Geometry& geometry = pool_.geometry;
  const size_t rows = geometry.rows_for(vtensor.num_tokens);
  if (!store.has_room(vtensor.num_tokens * geometry.token_bytes * geometry.num_planes))
    return false;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  std::vector<SwapStore::Ticket> tickets;
  const auto drop_all = [&] {
    for (const SwapStore::Ticket ticket : tickets) store.drop(ticket);
  };
  state_.epochs.wait();  // what is saved must have been written
  try {
    for (size_t i = 0; i < rows * geometry.num_planes; ++i) {
      const size_t used = geometry.bytes_used(i / geometry.num_planes, vtensor.num_tokens);
      tickets.push_back(save(*pool_.driver, store, pool_.pset[table[i]].handle, used));
    }
    vtensors_.shrink(vtensor.slot, 0);
  } catch (...) {
    drop_all();
    throw;
  }
  state_.counters.chunks_swapped_out += tickets.size();
  vtensor.swapped = std::move(tickets);
  vtensor.is_swapped = true;
  vtensor.first_owned_row = 0;
  vtensor.last_row_shared = false;
  vtensor.frozen_tokens = 0;
  vtensors_.update_write_limit(vtensor);
  return true;
}

bool Swapper::swap_in(VTensorId id, std::span<const Token> tokens, SwapStore& store) {
  VTensor& vtensor = vtensors_.live(id);
  if (!vtensor.is_swapped) throw std::invalid_argument("this vTensor is not swapped out");
  try {
    return bring_back(vtensor, tokens, store, /*created=*/false);
  } catch (const OutOfMemoryError&) {
    // The budget promised more than the system has: go on with what exists already.
  }
  try {
    return bring_back(vtensor, tokens, store, /*created=*/true);
  } catch (const OutOfMemoryError&) {
    return false;
  }
}

// One attempt of swap_in(); `created`: even without creating any chunk.
bool Swapper::bring_back(VTensor& vtensor, std::span<const Token> tokens, SwapStore& store,
                         bool created) {
  const size_t planes = pool_.geometry.num_planes;
  const size_t known = state_.options.alias ? std::min(tokens.size(), vtensor.num_tokens) : 0;
  RTree::Match match = r_prefix_match(pool_, vtensor.salt, tokens.first(known));
  // Whole rows only: the last row must be this vTensor's own, to go on writing.
  const size_t aliased = pool_.geometry.full_rows(match.num_tokens);
  p_free(pool_, std::span(match.table).subspan(aliased * planes));
  match.table.resize(aliased * planes);

  const size_t num_claims = (pool_.geometry.rows_for(vtensor.num_tokens) - aliased) * planes;
  std::optional<std::vector<Claim>> claims;
  try {
    if (reclaimer_.make_claimable(num_claims, created)) {
      claims = p_claim(pool_, num_claims, state_.options.scrub, vtensor.tenant);
    }
    if (claims) fill(vtensor, match.table, *claims, store);
  } catch (...) {
    if (claims) extender_.unclaim(*claims, vtensor.tenant);
    p_free(pool_, match.table);
    if (!vtensors_.is_live(vtensor.id)) forget(vtensor, store);  // its slot is broken
    throw;
  }
  if (!claims) {
    p_free(pool_, match.table);
    return false;
  }
  p_commit(pool_, *claims, vtensor.tenant);
  std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  table.assign(match.table.begin(), match.table.end());
  for (const Claim& claim : *claims) table.push_back(claim.id);
  vtensor.first_owned_row = aliased;
  vtensor.frozen_tokens = pool_.geometry.tokens_in(aliased);
  vtensors_.own_rows(vtensor, aliased, pool_.vset.mapped_rows(vtensor.slot));
  forget(vtensor, store);
  state_.counters.chunks_swapped_in += num_claims;
  state_.counters.chunks_aliased += match.table.size();
  vtensors_.update_write_limit(vtensor);
  return true;
}

// Driver work of swap_in(): contents into the claims, then everything behind the slot.
void Swapper::fill(VTensor& vtensor, std::span<const ChunkId> aliased, std::vector<Claim>& claims,
                   const SwapStore& store) {
  p_create(*pool_.driver, pool_.geometry.chunk_bytes, claims);
  std::vector<Handle> rows;
  for (const ChunkId id : aliased) rows.push_back(pool_.pset[id].handle);
  for (size_t i = 0; i < claims.size(); ++i) {
    claims[i].dirty_bytes = static_cast<uint32_t>(pool_.geometry.chunk_bytes);
    restore(*pool_.driver, store, claims[i].handle, vtensor.swapped[aliased.size() + i]);
    rows.push_back(claims[i].handle);
  }
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, vtensor.slot, 0}, rows);
  } catch (const BrokenMapping&) {
    std::vector<ChunkId> maybe_mapped(aliased.begin(), aliased.end());
    for (const Claim& claim : claims) maybe_mapped.push_back(claim.id);
    vtensors_.break_slot(vtensor.slot, maybe_mapped);
    throw;
  }
}

void Swapper::forget(VTensor& vtensor, SwapStore& store) {
  for (const SwapStore::Ticket ticket : vtensor.swapped) store.drop(ticket);
  vtensor.swapped.clear();
  vtensor.is_swapped = false;
}

}  // namespace vtensor
