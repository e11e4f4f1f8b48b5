#include "vtensor/core/swapper.h"

#include <algorithm>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "vtensor/core/saved_chunk.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/ops/prefix.h"
#include "vtensor/util/error.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {
namespace {

// In the place of a chunk that was given back before.
constexpr SwapStore::Ticket kNoTicket = UINT32_MAX;

void drop_all(std::span<const SwapStore::Ticket> tickets, SwapStore& store) {
  for (const SwapStore::Ticket ticket : tickets) {
    if (ticket != kNoTicket) store.drop(ticket);
  }
}

size_t num_tickets(std::span<const SwapStore::Ticket> tickets) {
  return tickets.size() - static_cast<size_t>(std::ranges::count(tickets, kNoTicket));
}

}  // namespace

// Rows from the first one on that the tree or somebody's slot holds too. Parked ones do not count:
// they are nobody's.
size_t Swapper::num_shared_rows(const VTensor& vtensor) const {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  const auto is_shared = [&](ChunkId id) {
    if (id == kNoChunk) return true;
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
    if (pool_.vset[vtensor.slot].table[i] == kNoChunk) continue;
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
    drop_all(tickets, store);
    p_free(pool_, kept);
  });
  const size_t num_chunks = geometry.rows_for(vtensor.num_tokens) * geometry.row_chunks;
  for (size_t i = kept.size(); i < num_chunks; ++i) {
    const size_t used = geometry.bytes_used(i, vtensor.num_tokens);
    const bool gone = table[i] == kNoChunk;
    tickets.push_back(gone ? kNoTicket
                           : save(*pool_.driver, store, pool_.pset[table[i]].handle, used));
  }
  vtensors_.shrink(vtensor.slot, 0);
  undo.dismiss();
  state_.counters.chunks_swapped_out += num_tickets(tickets);
  vtensor.kept = std::move(kept);
  vtensor.swapped = std::move(tickets);
  vtensor.is_swapped = true;
  vtensor.first_owned_row = 0;
  vtensor.last_row_shared = false;
  vtensor.frozen_tokens = 0;
  vtensors_.update_write_limit(vtensor);
  return true;
}

// A row that swapped-out vTensors keep is saved, each chunk once, for those of `holders` that share
// it with nobody else. False, with nothing changed: all do, or the store is full.
bool Swapper::spill_row(size_t row, std::span<VTensor* const> holders, SwapStore& store) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  std::vector<VTensor*> alone(holders.begin(), holders.end());
  std::unordered_map<ChunkId, uint32_t> num_sharers;
  for (bool settled = false; !settled;) {  // who shares with one who does not is not alone either
    num_sharers.clear();
    for (const VTensor* const holder : alone) {
      for (const ChunkId id : row_of(*holder, row)) num_sharers[id] += 1;
    }
    settled = std::erase_if(alone, [&](const VTensor* holder) {
                return std::ranges::any_of(row_of(*holder, row), [&](ChunkId id) {
                  return id != kNoChunk && pool_.pset[id].uses() != num_sharers[id];
                });
              }) == 0;
  }
  std::unordered_map<ChunkId, SwapStore::Ticket> saved;
  ScopeFail drop([&] {
    for (const auto& [id, ticket] : saved) store.drop(ticket);
  });
  for (const VTensor* const holder : alone) {
    for (size_t i = 0; i < row_chunks; ++i) {
      const ChunkId id = row_of(*holder, row)[i];
      if (id == kNoChunk || saved.contains(id)) continue;
      size_t num_tokens = 0;
      for (const VTensor* const sharer : alone) {
        if (row_of(*sharer, row)[i] == id) num_tokens = std::max(num_tokens, sharer->num_tokens);
      }
      const size_t used = pool_.geometry.bytes_used(row * row_chunks + i, num_tokens);
      if (!store.has_room(used)) return false;
      saved[id] = save(*pool_.driver, store, pool_.pset[id].handle, used);
    }
  }
  drop.dismiss();
  state_.counters.chunks_swapped_out += saved.size();
  std::unordered_set<ChunkId> named;
  for (VTensor* const holder : alone) {
    std::vector<SwapStore::Ticket> tickets;
    for (const ChunkId id : row_of(*holder, row)) {
      tickets.push_back(id == kNoChunk ? kNoTicket : saved.at(id));
      if (id != kNoChunk && !named.insert(id).second) store.share(saved.at(id));
    }
    p_free(pool_, row_of(*holder, row));
    holder->swapped.insert(holder->swapped.begin(), tickets.begin(), tickets.end());
    holder->kept.resize(row * row_chunks);
  }
  return !alone.empty();
}

std::span<const ChunkId> Swapper::row_of(const VTensor& holder, size_t row) const {
  const size_t row_chunks = pool_.geometry.row_chunks;
  return std::span(holder.kept).subspan(row * row_chunks, row_chunks);
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
    for (const ChunkId chunk : vtensors_.live(id).kept) {
      if (chunk != kNoChunk) ++num_keepers[chunk];
    }
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
  shared.resize(geometry.rows_for(vtensor.num_tokens) * row_chunks, kNoChunk);
  const size_t num_shared = vtensor.kept.size() + matched.size();
  std::vector<size_t> missing;  // entries to be brought back from the store
  for (size_t i = vtensor.kept.size(); i < shared.size(); ++i) {
    const bool saved = vtensor.swapped[i - vtensor.kept.size()] != kNoTicket;
    if (saved && shared[i] == kNoChunk) missing.push_back(i);
  }
  const size_t num_claims = missing.size();
  std::optional<std::vector<Claim>> claims;
  try {
    if (reclaimer_.make_claimable(num_claims, created)) {
      claims = p_claim(pool_, num_claims, state_.options.scrub, vtensor.tenant);
    }
    if (claims) fill(vtensor, shared, missing, *claims, store);
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
  const size_t shared_rows = num_shared / row_chunks;
  for (size_t i = 0; i < missing.size(); ++i) {
    shared[missing[i]] = (*claims)[i].id;
    // Beside shared chunks of its row it is nobody's to write.
    pool_.pset[(*claims)[i].id].written_bytes = geometry.bytes_used(missing[i], vtensor.num_tokens);
  }
  pool_.vset[vtensor.slot].table = std::move(shared);
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
  vtensors_.update_forget_at(vtensor);
  return true;
}

// Driver work of swap_in(): contents into the claims, which go to the `missing` entries of
// `shared`, then everything behind the slot.
void Swapper::fill(VTensor& vtensor, std::span<const ChunkId> shared,
                   std::span<const size_t> missing, std::vector<Claim>& claims,
                   const SwapStore& store) {
  const Geometry& geometry = pool_.geometry;
  p_create(*pool_.driver, geometry.chunk_bytes, claims);
  std::vector<Handle> rows;
  for (const ChunkId id : shared) rows.push_back(pool_.pset.handle(id));
  for (size_t i = 0; i < claims.size(); ++i) {
    const uint32_t used = geometry.bytes_used(missing[i], vtensor.num_tokens);
    claims[i].dirty_bytes = std::max(claims[i].dirty_bytes, used);
    restore(*pool_.driver, store, claims[i].handle,
            vtensor.swapped[missing[i] - vtensor.kept.size()], used);
    rows[missing[i]] = claims[i].handle;
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
  drop_all(vtensor.swapped, store);
  vtensor.kept.clear();
  vtensor.swapped.clear();
  vtensor.is_swapped = false;
}

}  // namespace vtensor
