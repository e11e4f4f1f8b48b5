#include "vtensor/core/swapper.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "vtensor/core/saved_chunk.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/ops/prefix.h"
#include "vtensor/util/error.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {

// Rows from the first one on that the tree or somebody's slot holds too. Parked ones do not count:
// they are nobody's.
size_t Swapper::num_shared_rows(const VTensor& vtensor) const {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  const auto is_shared = [&](ChunkId id) {
    const Chunk& chunk = pool_.pset[id];
    return chunk.tree_refs > 0 || chunk.uses() > 1;
  };
  const size_t rows = pool_.geometry.rows_for(vtensor.num_tokens);
  size_t row = 0;
  while (row < rows &&
         std::ranges::all_of(std::span(table).subspan(row * row_chunks, row_chunks), is_shared)) {
    ++row;
  }
  return row;
}

size_t Swapper::bytes_from(const VTensor& vtensor, size_t first_row) const {
  size_t num_bytes = 0;
  const size_t row_chunks = pool_.geometry.row_chunks;
  const size_t end = pool_.geometry.rows_for(vtensor.num_tokens) * row_chunks;
  for (size_t i = first_row * row_chunks; i < end; ++i) {
    num_bytes += pool_.geometry.bytes_used(i, vtensor.num_tokens);
  }
  return num_bytes;
}

bool Swapper::swap_out(VTensorId id, SwapStore& store) {
  VTensor& vtensor = vtensors_.resident(id);
  if (pool_.vset[vtensor.slot].num_views > 0) {
    throw std::invalid_argument("cannot swap vTensor " + std::to_string(id) +
                                " out while tensor views of it are alive; drop them first");
  }
  const Geometry& geometry = pool_.geometry;
  const size_t kept_rows = num_shared_rows(vtensor);
  if (!store.has_room(bytes_from(vtensor, kept_rows))) return false;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  std::vector<ChunkId> kept(
      table.begin(), table.begin() + static_cast<ptrdiff_t>(kept_rows * geometry.row_chunks));
  std::vector<SwapStore::Ticket> tickets;
  state_.epochs.wait();  // what is saved must have been written
  for (const ChunkId chunk : kept) pool_.pset.add_table_ref(chunk);
  ScopeFail undo([&] {
    for (const SwapStore::Ticket ticket : tickets) store.drop(ticket);
    p_free(pool_, kept);
  });
  const size_t num_chunks = geometry.rows_for(vtensor.num_tokens) * geometry.row_chunks;
  for (size_t i = kept.size(); i < num_chunks; ++i) {
    const size_t used = geometry.bytes_used(i, vtensor.num_tokens);
    tickets.push_back(save(*pool_.driver, store, pool_.pset[table[i]].handle, used));
  }
  vtensors_.shrink(vtensor.slot, 0);
  undo.dismiss();
  state_.counters.chunks_swapped_out += tickets.size();
  vtensor.kept = std::move(kept);
  vtensor.swapped = std::move(tickets);
  vtensor.is_swapped = true;
  vtensor.first_owned_row = 0;
  vtensor.last_row_shared = false;
  vtensor.frozen_tokens = 0;
  vtensors_.update_write_limit(vtensor);
  return true;
}

// A row that swapped-out vTensors keep, `holders` and nobody else, is saved once for all of them.
// False, with nothing changed: somebody uses it, or the store is full.
bool Swapper::spill_row(size_t row, std::span<VTensor* const> holders, SwapStore& store) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  std::unordered_map<ChunkId, std::vector<VTensor*>> by_chunk;
  for (VTensor* const holder : holders) by_chunk[holder->kept[row * row_chunks]].push_back(holder);
  bool spilled = false;
  for (const auto& [first, sharers] : by_chunk) {
    const std::vector<ChunkId> chunks(
        sharers.front()->kept.end() - static_cast<ptrdiff_t>(row_chunks),
        sharers.front()->kept.end());
    size_t num_tokens = 0;
    for (const VTensor* const sharer : sharers)
      num_tokens = std::max(num_tokens, sharer->num_tokens);
    const auto used = [&](size_t i) {
      return pool_.geometry.bytes_used(row * row_chunks + i, num_tokens);
    };
    size_t used_bytes = 0;
    for (size_t i = 0; i < row_chunks; ++i) used_bytes += used(i);
    const bool theirs = std::ranges::all_of(
        chunks, [&](ChunkId id) { return pool_.pset[id].uses() == sharers.size(); });
    if (!theirs || !store.has_room(used_bytes)) continue;
    std::vector<SwapStore::Ticket> tickets;
    ScopeFail drop([&] {
      for (const SwapStore::Ticket ticket : tickets) store.drop(ticket);
    });
    for (size_t i = 0; i < row_chunks; ++i) {
      tickets.push_back(save(*pool_.driver, store, pool_.pset[chunks[i]].handle, used(i)));
    }
    drop.dismiss();
    state_.counters.chunks_swapped_out += row_chunks;
    for (VTensor* const sharer : sharers) {
      for (const SwapStore::Ticket ticket : tickets) {
        if (sharer != sharers.front()) store.share(ticket);
      }
      sharer->swapped.insert(sharer->swapped.begin(), tickets.begin(), tickets.end());
      sharer->kept.resize(row * row_chunks);
      p_free(pool_, chunks);
    }
    spilled = true;
  }
  return spilled;
}

size_t Swapper::spill(size_t num_chunks, SwapStore& store, VTensorId spared) {
  std::vector<VTensor*> keepers;
  size_t end_row = 0;
  for (const VTensorId id : vtensors_.live_ids()) {
    VTensor& vtensor = vtensors_.live(id);
    if (vtensor.kept.empty() || id == spared) continue;
    keepers.push_back(&vtensor);
    end_row = std::max(end_row, vtensor.kept.size() / pool_.geometry.row_chunks);
  }
  if (!keepers.empty()) state_.epochs.wait();  // what is saved must have been written
  size_t num_spilled = 0;
  for (size_t row = end_row; row > 0 && num_spilled < num_chunks; --row) {
    std::vector<VTensor*> holders;
    for (VTensor* const keeper : keepers) {
      if (keeper->kept.size() == row * pool_.geometry.row_chunks) holders.push_back(keeper);
    }
    if (!holders.empty() && spill_row(row - 1, holders, store)) {
      num_spilled += pool_.geometry.row_chunks;
    }
  }
  return num_spilled;
}

size_t Swapper::num_spillable(const SwapStore& store) const {
  std::unordered_map<ChunkId, uint32_t> num_keepers;
  for (const VTensorId id : vtensors_.live_ids()) {
    for (const ChunkId chunk : vtensors_.live(id).kept) ++num_keepers[chunk];
  }
  size_t num_chunks = 0;
  for (const auto& [id, count] : num_keepers) {
    num_chunks += pool_.pset[id].uses() == count ? 1U : 0U;
  }
  const size_t room_bytes = store.capacity_bytes() - store.used_bytes();
  return std::min(num_chunks, room_bytes / pool_.geometry.chunk_bytes);
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

// What the tree has of a swapped-out vTensor beyond the rows that it kept, by whole rows; one table
// reference each. The row behind them must be its own, to go on writing.
std::vector<ChunkId> Swapper::match_beyond_kept(const VTensor& vtensor,
                                                std::span<const Token> tokens) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const size_t known = state_.options.alias ? std::min(tokens.size(), vtensor.num_tokens) : 0;
  RTree::Match match = r_prefix_match(pool_, vtensor.salt, tokens.first(known));
  const size_t end = pool_.geometry.full_rows(match.num_tokens) * row_chunks;
  const size_t begin = std::min(vtensor.kept.size(), end);
  const auto found = std::span<const ChunkId>(match.table);
  p_free(pool_, found.first(begin));
  p_free(pool_, found.subspan(end));
  return {match.table.begin() + static_cast<ptrdiff_t>(begin),
          match.table.begin() + static_cast<ptrdiff_t>(end)};
}

// One attempt of swap_in(); `created`: even without creating any chunk.
bool Swapper::bring_back(VTensor& vtensor, std::span<const Token> tokens, SwapStore& store,
                         bool created) {
  const Geometry& geometry = pool_.geometry;
  const size_t row_chunks = geometry.row_chunks;
  const std::vector<ChunkId> matched = match_beyond_kept(vtensor, tokens);
  std::vector<ChunkId> shared = vtensor.kept;
  shared.insert(shared.end(), matched.begin(), matched.end());
  const size_t num_claims = geometry.rows_for(vtensor.num_tokens) * row_chunks - shared.size();
  std::optional<std::vector<Claim>> claims;
  try {
    if (reclaimer_.make_claimable(num_claims, created)) {
      claims = p_claim(pool_, num_claims, state_.options.scrub, vtensor.tenant);
    }
    if (claims) fill(vtensor, shared, *claims, store);
  } catch (...) {
    if (claims) extender_.unclaim(*claims, vtensor.tenant);
    p_free(pool_, matched);
    if (!vtensors_.is_live(vtensor.id)) forget(vtensor, store);  // its slot is broken
    throw;
  }
  if (!claims) {
    p_free(pool_, matched);
    return false;
  }
  p_commit(pool_, *claims, vtensor.tenant);
  const size_t shared_rows = shared.size() / row_chunks;
  std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  table = std::move(shared);
  for (const Claim& claim : *claims) table.push_back(claim.id);
  vtensor.kept.clear();  // the slot holds these references now
  vtensor.first_owned_row = std::min(shared_rows, geometry.full_rows(vtensor.num_tokens));
  vtensor.last_row_shared = vtensor.first_owned_row < shared_rows;
  vtensor.frozen_tokens =
      vtensor.last_row_shared ? vtensor.num_tokens : geometry.tokens_in(vtensor.first_owned_row);
  vtensors_.own_rows(vtensor, shared_rows, pool_.vset.mapped_rows(vtensor.slot));
  forget(vtensor, store);
  state_.counters.chunks_swapped_in += num_claims;
  state_.counters.chunks_aliased += matched.size();
  vtensors_.update_write_limit(vtensor);
  return true;
}

// Driver work of swap_in(): contents into the claims, then everything behind the slot.
void Swapper::fill(VTensor& vtensor, std::span<const ChunkId> shared, std::vector<Claim>& claims,
                   const SwapStore& store) {
  const Geometry& geometry = pool_.geometry;
  p_create(*pool_.driver, geometry.chunk_bytes, claims);
  std::vector<Handle> rows;
  for (const ChunkId id : shared) rows.push_back(pool_.pset[id].handle);
  for (size_t i = 0; i < claims.size(); ++i) {
    const uint32_t used = geometry.bytes_used(shared.size() + i, vtensor.num_tokens);
    claims[i].dirty_bytes = std::max(claims[i].dirty_bytes, used);
    restore(*pool_.driver, store, claims[i].handle,
            vtensor.swapped[shared.size() - vtensor.kept.size() + i], used);
    rows.push_back(claims[i].handle);
  }
  try {
    map(*pool_.driver, {pool_.vset, geometry, vtensor.slot, 0}, rows);
  } catch (const BrokenMapping&) {
    std::vector<ChunkId> maybe_mapped(shared.begin(), shared.end());
    for (const Claim& claim : claims) maybe_mapped.push_back(claim.id);
    vtensors_.break_slot(vtensor.slot, maybe_mapped);
    throw;
  }
}

void Swapper::forget(VTensor& vtensor, SwapStore& store) {
  p_free(pool_, vtensor.kept);
  for (const SwapStore::Ticket ticket : vtensor.swapped) store.drop(ticket);
  vtensor.kept.clear();
  vtensor.swapped.clear();
  vtensor.is_swapped = false;
}

}  // namespace vtensor
