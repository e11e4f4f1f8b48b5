#include "vtensor/core/placement.h"

#include <algorithm>
#include <stdexcept>

#include "vtensor/ops/mapping.h"
#include "vtensor/ops/prefix.h"
#include "vtensor/util/error.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {

// A parked slot is useful for the rows that show the wanted chunks already and, beyond them, for
// rows of chunks that nobody else has: those can be written at once.
Placement::Fit Placement::fit(SlotId slot, std::span<const ChunkId> table, size_t wanted_rows,
                              bool count_all) const {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& mapped = pool_.vset[slot].table;
  const size_t mapped_rows = mapped.size() / row_chunks;
  if (pool_.vset[slot].guarded_rows > 0) return {slot, 0, 0, 0, mapped_rows};
  const size_t table_rows = table.size() / row_chunks;
  const auto [end, unused] = std::ranges::mismatch(mapped, table);
  const size_t common_rows = static_cast<size_t>(end - mapped.begin()) / row_chunks;
  const size_t most_useful = std::max(wanted_rows, common_rows);
  const size_t end_rows = count_all ? mapped_rows : std::min(mapped_rows, most_useful);
  size_t keep_rows = common_rows;
  if (common_rows == table_rows) {
    while (keep_rows < end_rows &&
           std::ranges::all_of(
               std::span(mapped).subspan(keep_rows * row_chunks, row_chunks),
               [&](ChunkId id) { return id != kNoChunk && pool_.pset[id].is_recyclable(); })) {
      ++keep_rows;
    }
  }
  const size_t useful_rows = std::min(keep_rows, most_useful);
  return {slot, common_rows, keep_rows, useful_rows, mapped_rows - useful_rows};
}

std::optional<Placement::Fit> Placement::best_parked(std::span<const ChunkId> table,
                                                     size_t wanted_rows) const {
  std::optional<Fit> best;
  for (const SlotId slot : pool_.vset.parked()) {
    const Fit candidate = fit(slot, table, wanted_rows, /*count_all=*/false);
    // Where no row is of use, the longest parked one goes.
    const bool better = !best || candidate.useful_rows > best->useful_rows ||
                        (candidate.useful_rows == best->useful_rows && best->useful_rows > 0 &&
                         candidate.dropped_rows < best->dropped_rows);
    if (better) best = candidate;
  }
  return best;
}

void Placement::scrub_rows(SlotId slot, size_t first_row, size_t end_row, uint64_t tenant) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  for (size_t i = first_row * row_chunks; i < end_row * row_chunks; ++i) {
    Chunk& chunk = pool_.pset[table[i]];
    if (!needs_scrub(chunk, state_.options.scrub, tenant)) continue;
    pool_.driver->fill(chunk.handle, 0, chunk.dirty_bytes, std::byte{0});
    chunk.dirty_bytes = chunk.written_bytes = 0;
  }
}

// Turns a parked slot into one whose first rows are `table`. On failure the slot is still parked,
// with fewer rows, and the references of `table` are still the caller's.
void Placement::adopt(const Fit& fit, std::span<const ChunkId> table, uint64_t tenant) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  vtensors_.shrink(fit.slot, fit.keep_rows);
  scrub_rows(fit.slot, fit.common_rows, fit.keep_rows, tenant);
  const std::span<const ChunkId> missing = table.subspan(fit.common_rows * row_chunks);
  std::vector<Handle> missing_handles;
  for (const ChunkId id : missing) missing_handles.push_back(pool_.pset.handle(id));
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, fit.slot, fit.common_rows}, missing_handles);
  } catch (const BrokenMapping&) {
    vtensors_.break_slot(fit.slot, missing);
    throw;
  }
  vtensors_.unpark(fit.slot);
  p_free(pool_,
         table.first(fit.common_rows * row_chunks));  // the slot holds these references already
  std::vector<ChunkId>& mapped = pool_.vset[fit.slot].table;
  mapped.insert(mapped.end(), missing.begin(), missing.end());
  state_.counters.chunks_adopted += fit.keep_rows * row_chunks;
  pool_.vset.make_live(fit.slot);
}

// A live slot whose first rows are `table`; takes over the table's references. Nothing when no
// slot is left.
std::optional<SlotId> Placement::place(std::span<const ChunkId> table, size_t wanted_rows,
                                       uint64_t tenant) {
  retirement_.reap();
  const std::optional<Fit> parked = best_parked(table, wanted_rows);
  if (parked && (parked->useful_rows > 0 || pool_.vset.num_free() == 0)) {
    adopt(fit(parked->slot, table, wanted_rows, /*count_all=*/true), table, tenant);
    return parked->slot;
  }
  std::optional<SlotId> slot = v_alloc(pool_);
  if (!slot && vtensors_.repair_broken() > 0) slot = v_alloc(pool_);
  if (!slot) return std::nullopt;
  std::vector<Handle> table_handles;
  for (const ChunkId id : table) table_handles.push_back(pool_.pset.handle(id));
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, *slot, 0}, table_handles);
  } catch (const BrokenMapping&) {
    vtensors_.break_slot(*slot, table);
    throw;
  } catch (...) {
    v_free(pool_, *slot);
    throw;
  }
  pool_.vset[*slot].table.assign(table.begin(), table.end());
  return slot;
}

VTensor& Placement::open(SlotId slot, const std::string& salt, size_t num_tokens,
                         size_t aliased_rows) {
  VTensor& vtensor = vtensors_.begin(slot, salt);
  vtensor.num_tokens = num_tokens;
  vtensor.num_cached_tokens = num_tokens;
  vtensor.peak_tokens = num_tokens;
  vtensor.frozen_tokens = num_tokens;
  vtensor.first_owned_row = pool_.geometry.full_rows(num_tokens);
  vtensor.last_row_shared = vtensor.first_owned_row < aliased_rows;
  vtensor.chunks_aliased = aliased_rows * pool_.geometry.row_chunks;
  state_.counters.chunks_aliased += vtensor.chunks_aliased;
  vtensors_.own_rows(vtensor, aliased_rows, pool_.vset.mapped_rows(slot));
  vtensors_.update_write_limit(vtensor);
  vtensors_.update_forget_at(vtensor);
  return vtensor;
}

std::optional<VTensorId> Placement::create(std::span<const Token> tokens, const std::string& salt,
                                           size_t expected_tokens, bool apart) {
  const Geometry& geometry = pool_.geometry;
  if (tokens.size() > geometry.max_tokens) {
    throw std::invalid_argument("a prompt of " + std::to_string(tokens.size()) +
                                " tokens is longer than max_seq_len " +
                                std::to_string(geometry.max_tokens));
  }
  const RTree::Match match = r_prefix_match(pool_, salt, tokens);
  const size_t wanted_rows =
      geometry.rows_for(std::min(std::max(tokens.size(), expected_tokens), geometry.max_tokens));
  const std::optional<VTensorId> id =
      state_.options.alias ? create_alias(match, salt, wanted_rows) : create_copy(match, salt);
  if (id && apart) keep_apart(vtensors_.live(*id));
  if (id) {
    VTensor& vtensor = vtensors_.live(*id);
    vtensor.num_cut_tokens = match.num_recorded - match.num_tokens;
    vtensor.cut_by_window = match.cut_by_window;
  }
  // Numbers below 0 are no tokens but names of what is recorded under them, and are not counted.
  if (id && !tokens.empty() && tokens.front() >= 0) {
    ++state_.counters.prefix_queries;
    state_.counters.prefix_query_tokens += tokens.size();
    state_.counters.prefix_hit_tokens += match.num_tokens;
    state_.counters.prefix_window_tokens += match.num_recorded - match.num_tokens;
  }
  return id;
}

// Rows kept from a parked slot are the pool's. Where they stay they are copied when they are sent.
void Placement::keep_apart(VTensor& vtensor) {
  vtensor.apart = ++state_.num_aparts;
  try {
    vtensors_.shrink(vtensor.slot, pool_.geometry.rows_for(vtensor.num_tokens));
  } catch (const BrokenMapping&) {
    throw;
  } catch (const Error&) {
    return;
  }
  vtensors_.update_write_limit(vtensor);
}

std::optional<VTensorId> Placement::fork(VTensorId parent_id) {
  VTensor& original = vtensors_.resident(parent_id);
  if (state_.options.alias) shield_.before_sharing(original, original.num_tokens);
  const VTensor parent = original;
  const size_t rows = pool_.geometry.rows_for(parent.num_tokens);
  RTree::Match shared;
  shared.num_tokens = shared.num_recorded = parent.num_tokens;
  const std::vector<ChunkId>& mapped = pool_.vset[parent.slot].table;
  shared.table.assign(mapped.begin(),
                      mapped.begin() + static_cast<ptrdiff_t>(rows * pool_.geometry.row_chunks));
  for (const ChunkId id : shared.table) pool_.pset.add_table_ref(id);
  if (!state_.options.alias) return create_copy(shared, parent.salt);
  const std::optional<VTensorId> child = create_alias(shared, parent.salt, rows);
  if (child) original.frozen_tokens = std::max(original.frozen_tokens, original.num_tokens);
  return child;
}

// The same chunks behind another slot. Takes over the match's references.
std::optional<VTensorId> Placement::create_alias(const RTree::Match& match, const std::string& salt,
                                                 size_t wanted_rows) {
  ScopeFail drop_references([&] { p_free(pool_, match.table); });
  const std::optional<SlotId> slot = place(match.table, wanted_rows, tenant_of(salt));
  if (!slot) return std::nullopt;
  drop_references.dismiss();
  return open(*slot, salt, match.num_tokens, pool_.geometry.rows_for(match.num_tokens)).id;
}

// Without aliasing: the same contents in chunks of its own. Drops the match's references. Nothing
// when memory or slots are short.
std::optional<VTensorId> Placement::create_copy(const RTree::Match& match,
                                                const std::string& salt) {
  const ScopeFail drop_references([&] { p_free(pool_, match.table); });
  state_.epochs.wait();  // a running step may still write what is copied
  const auto slot = place({}, 0, tenant_of(salt));
  if (!slot) return std::nullopt;
  const VTensorId id = open(*slot, salt, 0, 0).id;
  std::optional<Extension> extension;
  try {
    vtensors_.shrink(*slot, 0);  // rows kept from a parked slot have no place in a copy
    vtensors_.update_write_limit(vtensors_.live(id));
    extension = extender_.plan_extend({&id, 1}, {&match.num_tokens, 1});
    if (!extension) {
      retirement_.release(id);
      return std::nullopt;
    }
    for (ExtensionPart& part : extension->parts) {
      for (const ChunkId source : match.table) part.sources.push_back(pool_.pset.handle(source));
    }
    extension->run(*pool_.driver, pool_.vset, pool_.geometry);
  } catch (...) {
    if (extension) extender_.abandon(*extension);
    if (vtensors_.is_live(id)) retirement_.release(id);  // else its slot is broken
    throw;
  }
  extender_.commit(*extension);
  VTensor& vtensor = vtensors_.live(id);
  vtensor.num_cached_tokens = match.num_tokens;
  vtensor.chunks_copied = match.table.size();
  state_.counters.chunks_copied += match.table.size();
  // What the original has given back was not copied.
  vtensors_.update_forget_at(vtensor);
  if (match.num_tokens >= vtensor.forget_at) {
    forgetter_.note(vtensor, match.num_tokens);
    forgetter_.give_back(id);
  }
  return id;
}

}  // namespace vtensor
