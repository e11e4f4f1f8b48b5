// Scheduler: how a vTensor comes to life, in a fresh slot or in a parked one.
#include <algorithm>

#include "vtensor/core/scheduler.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

uint64_t tenant_of(const std::string& salt) { return std::hash<std::string>{}(salt); }

}  // namespace

bool Scheduler::is_private(ChunkId id) const {
  return pool_.pset[id].table_refs == 1 && pool_.pset[id].tree_refs == 0;
}

// A parked slot is useful for the rows that show the wanted chunks already and, beyond them, for
// rows of chunks that nobody else has: those can be written at once.
Scheduler::Fit Scheduler::fit(SlotId slot, std::span<const ChunkId> table,
                              size_t wanted_rows) const {
  const size_t planes = pool_.geometry.num_planes;
  const std::vector<ChunkId>& mapped = pool_.vset[slot].table;
  const size_t mapped_rows = mapped.size() / planes;
  const size_t table_rows = table.size() / planes;
  const auto [end, unused] = std::ranges::mismatch(mapped, table);
  const size_t common_rows = static_cast<size_t>(end - mapped.begin()) / planes;
  size_t keep_rows = common_rows;
  if (common_rows == table_rows) {
    while (keep_rows < mapped_rows && std::ranges::all_of(
                                          std::span(mapped).subspan(keep_rows * planes, planes),
                                          [&](ChunkId id) { return is_private(id); })) {
      ++keep_rows;
    }
  }
  const size_t useful_rows = std::min(keep_rows, std::max(wanted_rows, common_rows));
  return {slot, common_rows, keep_rows, useful_rows, mapped_rows - useful_rows};
}

std::optional<Scheduler::Fit> Scheduler::best_parked(std::span<const ChunkId> table,
                                                     size_t wanted_rows) const {
  std::optional<Fit> best;
  for (const SlotId slot : pool_.vset.parked()) {
    const Fit candidate = fit(slot, table, wanted_rows);
    const bool better =
        !best || candidate.useful_rows > best->useful_rows ||
        (candidate.useful_rows == best->useful_rows && candidate.dropped_rows < best->dropped_rows);
    if (better) best = candidate;
  }
  return best;
}

void Scheduler::scrub_rows(SlotId slot, size_t first_row, size_t end_row, uint64_t tenant) {
  const size_t planes = pool_.geometry.num_planes;
  const std::vector<ChunkId>& table = pool_.vset[slot].table;
  for (size_t i = first_row * planes; i < end_row * planes; ++i) {
    Chunk& chunk = pool_.pset[table[i]];
    if (!needs_scrub(chunk, options_.scrub, tenant)) continue;
    pool_.driver->fill(chunk.handle, 0, chunk.dirty_bytes, std::byte{0});
    chunk.dirty_bytes = 0;
  }
}

// Turns a parked slot into one whose first rows are `table`. On failure the slot is still parked,
// with fewer rows, and the references of `table` are still the caller's.
void Scheduler::adopt(const Fit& fit, std::span<const ChunkId> table, uint64_t tenant) {
  const size_t planes = pool_.geometry.num_planes;
  shrink_slot(fit.slot, fit.keep_rows);
  scrub_rows(fit.slot, fit.common_rows, fit.keep_rows, tenant);
  const std::span<const ChunkId> missing = table.subspan(fit.common_rows * planes);
  std::vector<Handle> missing_handles;
  for (const ChunkId id : missing) missing_handles.push_back(pool_.pset[id].handle);
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, fit.slot, fit.common_rows}, missing_handles);
  } catch (const BrokenMapping&) {
    break_slot(fit.slot, missing);
    throw;
  }
  p_free(pool_, table.first(fit.common_rows * planes));  // the slot holds these references already
  std::vector<ChunkId>& mapped = pool_.vset[fit.slot].table;
  mapped.insert(mapped.end(), missing.begin(), missing.end());
  counters_.chunks_adopted += fit.keep_rows * planes;
  pool_.vset.make_live(fit.slot);
}

// A live slot whose first rows are `table`; takes over the table's references. Nothing when no
// slot is left.
std::optional<SlotId> Scheduler::place(std::span<const ChunkId> table, size_t wanted_rows,
                                       uint64_t tenant) {
  reap();
  const std::optional<Fit> parked = best_parked(table, wanted_rows);
  if (parked && (parked->useful_rows > 0 || pool_.vset.num_free() == 0)) {
    adopt(*parked, table, tenant);
    return parked->slot;
  }
  const std::optional<SlotId> slot = v_alloc(pool_);
  if (!slot) return std::nullopt;
  std::vector<Handle> table_handles;
  for (const ChunkId id : table) table_handles.push_back(pool_.pset[id].handle);
  try {
    map(*pool_.driver, {pool_.vset, pool_.geometry, *slot, 0}, table_handles);
  } catch (const BrokenMapping&) {
    break_slot(*slot, table);
    throw;
  } catch (...) {
    v_free(pool_, *slot);
    throw;
  }
  pool_.vset[*slot].table.assign(table.begin(), table.end());
  return slot;
}

VTensor& Scheduler::open(SlotId slot, const std::string& salt, size_t num_tokens,
                         size_t aliased_rows) {
  VTensor& vtensor = vtensors_[slot];
  vtensor = VTensor{};
  vtensor.id = id_of(slot);
  vtensor.slot = slot;
  vtensor.salt = salt;
  vtensor.tenant = tenant_of(salt);
  vtensor.num_tokens = num_tokens;
  vtensor.num_cached_tokens = num_tokens;
  vtensor.peak_tokens = num_tokens;
  vtensor.frozen_tokens = num_tokens;
  vtensor.own_row = pool_.geometry.full_rows(num_tokens);
  vtensor.tail_shared = vtensor.own_row < aliased_rows;
  vtensor.chunks_aliased = aliased_rows * pool_.geometry.num_planes;
  counters_.chunks_aliased += vtensor.chunks_aliased;
  own_rows(vtensor, aliased_rows, pool_.vset.mapped_rows(slot));
  update_write_limit(vtensor);
  return vtensor;
}

std::optional<VTensorId> Scheduler::create(std::span<const Token> tokens, const std::string& salt,
                                           size_t expected_tokens) {
  if (tokens.size() > pool_.geometry.max_tokens) {
    throw std::invalid_argument("a prompt of " + std::to_string(tokens.size()) +
                                " tokens is longer than max_seq_len " +
                                std::to_string(pool_.geometry.max_tokens));
  }
  const RTree::Match match = r_prefix_match(pool_, salt, tokens);
  std::optional<VTensorId> id;
  try {
    if (options_.alias) {
      const size_t wanted = pool_.geometry.rows_for(
          std::min(std::max(tokens.size(), expected_tokens), pool_.geometry.max_tokens));
      const auto slot = place(match.table, wanted, tenant_of(salt));
      if (slot) {
        id = open(*slot, salt, match.num_tokens, pool_.geometry.rows_for(match.num_tokens)).id;
      }
    } else {
      id = create_copy(match, salt);
      p_free(pool_, match.table);
    }
  } catch (...) {
    p_free(pool_, match.table);
    throw;
  }
  if (!id) {
    if (options_.alias) p_free(pool_, match.table);
    return std::nullopt;
  }
  if (!tokens.empty()) {
    ++counters_.prefix_queries;
    counters_.prefix_query_tokens += tokens.size();
    counters_.prefix_hit_tokens += match.num_tokens;
  }
  return id;
}

std::optional<VTensorId> Scheduler::fork(VTensorId parent_id) {
  const VTensor parent = resident(parent_id);
  const size_t planes = pool_.geometry.num_planes;
  const size_t rows = pool_.geometry.rows_for(parent.num_tokens);
  RTree::Match shared;
  shared.num_tokens = parent.num_tokens;
  const std::vector<ChunkId>& mapped = pool_.vset[parent.slot].table;
  shared.table.assign(mapped.begin(), mapped.begin() + static_cast<ptrdiff_t>(rows * planes));
  if (!options_.alias) return create_copy(shared, parent.salt);
  for (const ChunkId id : shared.table) pool_.pset.add_table_ref(id);
  std::optional<SlotId> slot;
  try {
    slot = place(shared.table, rows, parent.tenant);
  } catch (...) {
    p_free(pool_, shared.table);
    throw;
  }
  if (!slot) {
    p_free(pool_, shared.table);
    return std::nullopt;
  }
  VTensor& original = live(parent_id);
  original.frozen_tokens = std::max(original.frozen_tokens, original.num_tokens);
  return open(*slot, parent.salt, parent.num_tokens, rows).id;
}

// Without aliasing: the same contents in chunks of its own. Nothing when memory or slots are short.
std::optional<VTensorId> Scheduler::create_copy(const RTree::Match& match,
                                                const std::string& salt) {
  epochs_.wait();  // a running step may still write what is copied
  const auto slot = place({}, 0, tenant_of(salt));
  if (!slot) return std::nullopt;
  const VTensorId id = open(*slot, salt, 0, 0).id;
  std::optional<Growth> growth;
  try {
    shrink_slot(*slot, 0);  // rows kept from a parked slot have no place in a copy
    update_write_limit(live(id));
    growth = plan_extend({&id, 1}, {&match.num_tokens, 1});
    if (!growth) {
      release(id);
      return std::nullopt;
    }
    for (GrowthPart& part : growth->parts) {
      for (const ChunkId source : match.table) part.sources.push_back(pool_.pset[source].handle);
    }
    growth->run(*pool_.driver, pool_.vset, pool_.geometry);
  } catch (...) {
    if (growth) abandon(*growth);
    if (is_live(id)) release(id);  // else its slot is broken
    throw;
  }
  commit(*growth);
  VTensor& vtensor = live(id);
  vtensor.num_cached_tokens = match.num_tokens;
  vtensor.chunks_copied = match.table.size();
  counters_.chunks_copied += match.table.size();
  return id;
}

}  // namespace vtensor
