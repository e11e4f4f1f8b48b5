#include "vtensor/core/extender.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "vtensor/util/error.h"

namespace vtensor {
namespace {

void check_same_size(size_t num_ids, size_t num_lengths) {
  if (num_ids != num_lengths) {
    throw std::invalid_argument(std::to_string(num_ids) + " vTensors but " +
                                std::to_string(num_lengths) + " lengths");
  }
}

void declare(VTensor& vtensor, size_t num_tokens) {
  vtensor.num_tokens = std::max(vtensor.num_tokens, num_tokens);
  vtensor.peak_tokens = std::max(vtensor.peak_tokens, vtensor.num_tokens);
}

}  // namespace

bool Extender::extend_in_place(std::span<const VTensorId> ids, std::span<const size_t> num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  found_.resize(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    VTensor& vtensor = vtensors_.resident(ids[i]);
    if (num_tokens[i] > std::max(vtensor.write_limit, vtensor.num_tokens)) return false;
    found_[i] = &vtensor;
  }
  for (size_t i = 0; i < ids.size(); ++i) declare(*found_[i], num_tokens[i]);
  return true;
}

bool Extender::extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens,
                      const Runner& run) {
  last_shortage_.clear();
  const size_t num_created = pool_.pset.num_created();
  std::optional<Extension> extension = plan_extend(ids, num_tokens);
  for (bool retried = false; extension; retried = true) {
    try {
      run(*extension);
      commit(*extension);
      return true;
    } catch (const OutOfMemoryError& shortage) {
      // The budget promised more than the system has: go on with what exists already.
      abandon(*extension);
      last_shortage_ = shortage.what();
      if (retried || !reclaimer_.make_claimable(extension->num_claims(), /*created=*/true)) break;
      extension = plan_extend(ids, num_tokens);
    } catch (...) {
      abandon(*extension);
      throw;
    }
  }
  // Short: what the attempt created goes back, as nothing has changed then.
  reclaimer_.release_created_beyond(num_created);
  return false;
}

size_t Extender::num_missing(std::span<const VTensorId> ids,
                             std::span<const size_t> num_tokens) const {
  size_t num_rows = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t rows = pool_.geometry.rows_for(num_tokens[i]);
    const size_t mapped = pool_.vset.mapped_rows(vtensors_.live(ids[i]).slot);
    if (rows > mapped) num_rows += rows - mapped;
  }
  return num_rows * pool_.geometry.row_chunks;
}

// The last row may be written only by its appender. Continuing exactly where the last one stopped
// makes this vTensor the appender, without a copy: the path of a multi-turn chat. Returns false
// when somebody else may write there, or wrote on: then that row must be copied.
bool Extender::take_back_row(VTensor& vtensor) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  const size_t first = vtensor.first_owned_row * row_chunks;
  const auto last_row = std::span(table).subspan(first, row_chunks);
  for (size_t i = 0; i < row_chunks; ++i) {
    if (last_row[i] == kNoChunk) continue;
    const Chunk& chunk = pool_.pset[last_row[i]];
    const size_t written = pool_.geometry.bytes_used(first + i, vtensor.num_tokens);
    if (chunk.appender != kNoVTensor || chunk.written_bytes != written) return false;
    if (chunk.sealed) return false;
  }
  // A view may write to what others see in this row, and what is guarded cannot be written:
  // shield.h.
  if (pool_.driver->remaps_in_place() && pool_.vset[vtensor.slot].num_views > 0) return false;
  if (vtensor.first_owned_row < pool_.vset[vtensor.slot].guarded_rows) {
    vtensors_.unguard(vtensor.slot);
  }
  for (const ChunkId id : last_row) {
    if (id != kNoChunk) pool_.pset[id].appender = vtensor.id;
  }
  vtensor.last_row_shared = false;
  return true;
}

// What extending to `num_tokens` takes, sizes only: `rows` and `copies` hold blank claims.
ExtensionPart Extender::outline(const VTensor& vtensor, size_t num_tokens) const {
  const Geometry& geometry = pool_.geometry;
  if (num_tokens > geometry.max_tokens) {
    throw std::invalid_argument("extend to " + std::to_string(num_tokens) +
                                " tokens is beyond max_seq_len " +
                                std::to_string(geometry.max_tokens));
  }
  ExtensionPart part;
  part.vtensor = vtensor.id;
  part.slot = vtensor.slot;
  part.tenant = vtensor.tenant;
  part.apart = state_.apart(vtensor.apart);
  part.num_tokens = num_tokens;
  part.first_row = pool_.vset.mapped_rows(vtensor.slot);
  const size_t rows = geometry.rows_for(num_tokens);
  if (rows > part.first_row) part.rows.resize((rows - part.first_row) * geometry.row_chunks);
  if (vtensor.last_row_shared && num_tokens > vtensor.num_tokens) add_copies(part, vtensor);
  return part;
}

void Extender::add_copies(ExtensionPart& part, const VTensor& vtensor) const {
  part.copied_row = vtensor.first_owned_row;
  part.copied_tokens = vtensor.num_tokens;
  part.originals = vtensors_.handles(vtensor.slot, part.copied_row, part.copied_row + 1);
  for (size_t column = 0; column < part.originals.size(); ++column) {
    if (part.originals[column] != kNoHandle) part.copied_columns.push_back(column);
  }
  part.copies.resize(part.copied_columns.size());
  const bool guarded = part.copied_row < pool_.vset[vtensor.slot].guarded_rows;
  part.originals_access = guarded ? Access::kCopyOnWrite : Access::kReadWrite;
}

// Fills the blank claims. Requires: as many chunks are claimable.
void Extender::claim_for(ExtensionPart& part) {
  for (std::vector<Claim>* claims : {&part.copies, &part.rows}) {
    *claims = p_claim(pool_, claims->size(), state_.options.scrub, part.tenant, part.apart).value();
    for (const Claim& claim : *claims) state_.claimed.insert(claim.id);
  }
  vtensors_.live(part.vtensor).busy = true;
}

// Outlines of the vTensors that need rows, or a last row of their own; the others are only to be
// declared.
std::vector<ExtensionPart> Extender::outline_all(std::span<const VTensorId> ids,
                                                 std::span<const size_t> num_tokens) {
  std::vector<ExtensionPart> parts;
  retirement_.reap();
  ++state_.plan;
  for (size_t i = 0; i < ids.size(); ++i) {
    VTensor& vtensor = vtensors_.resident(ids[i]);
    if (vtensor.plan == state_.plan) {
      throw std::invalid_argument("vTensor " + std::to_string(ids[i]) +
                                  " stands twice in one extend");
    }
    vtensor.plan = state_.plan;
    vtensor.planned_tokens = std::min(num_tokens[i], pool_.geometry.max_tokens);
    if (num_tokens[i] <= std::max(vtensor.num_tokens, vtensor.write_limit)) continue;
    if (vtensor.last_row_shared) {
      if (take_back_row(vtensor)) {
        vtensors_.update_write_limit(vtensor);
      } else {
        vtensor.planned_tokens = pool_.geometry.max_tokens;  // what is mapped now is outlined
      }
    }
    parts.push_back(outline(vtensor, num_tokens[i]));
  }
  return parts;
}

std::optional<Extension> Extender::plan_extend(std::span<const VTensorId> ids,
                                               std::span<const size_t> num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  Extension extension{outline_all(ids, num_tokens), {}};
  if (!reclaimer_.make_claimable(extension.num_claims())) return std::nullopt;
  const bool copies = std::ranges::any_of(
      extension.parts, [](const ExtensionPart& part) { return !part.copies.empty(); });
  if (copies) state_.epochs.wait();  // a running step may still write what is copied
  for (ExtensionPart& part : extension.parts) claim_for(part);
  for (size_t i = 0; i < ids.size(); ++i) {
    VTensor& vtensor = vtensors_.live(ids[i]);
    if (!vtensor.busy) extension.declared.emplace_back(ids[i], num_tokens[i]);
    vtensor.busy = true;
  }
  ++state_.plan;  // from here on `busy` protects them
  return extension;
}

Extension Extender::plan_pre_extend(VTensorId id, size_t num_tokens) {
  Extension extension;
  if (!vtensors_.is_live(id)) return extension;
  const VTensor& vtensor = vtensors_.live(id);
  if (vtensor.busy || vtensor.is_swapped) return extension;
  ExtensionPart part = outline(vtensor, std::min(num_tokens, pool_.geometry.max_tokens));
  part.num_tokens = 0;
  part.copies.clear();  // whether to copy is decided when it is written
  part.copied_columns.clear();
  part.originals.clear();
  const size_t wanted = part.rows.size();
  const size_t claimable = pool_.pset.num_claimable();
  if (wanted == 0 || claimable + pool_.pset.num_idle() < wanted) return extension;
  if (claimable < wanted) {
    reclaimer_.evict(wanted - claimable);
    if (pool_.pset.num_claimable() < wanted) return extension;
  } else {
    reclaimer_.recycle(wanted, reclaimer_.max_idle());
  }
  claim_for(part);
  extension.parts.push_back(std::move(part));
  return extension;
}

bool Extender::copy_shared_row(VTensor& vtensor) {
  ++state_.plan;
  vtensor.plan = state_.plan;  // its own rows are not to be taken for this
  vtensor.planned_tokens = pool_.geometry.max_tokens;
  vtensor.forgotten_tokens = 0;  // nor given back while it is planned
  Extension extension;
  extension.parts.push_back(outline(vtensor, vtensor.num_tokens));
  add_copies(extension.parts.back(), vtensor);
  if (!reclaimer_.make_claimable(extension.num_claims())) return false;
  state_.epochs.wait();  // a running step may still write what is copied
  claim_for(extension.parts.back());
  ++state_.plan;
  try {
    extension.run(*pool_.driver, pool_.vset, pool_.geometry);
  } catch (const OutOfMemoryError&) {
    abandon(extension);
    return false;
  } catch (...) {
    abandon(extension);
    throw;
  }
  commit(extension);
  return true;
}

void Extender::commit_copy(VTensor& vtensor, const ExtensionPart& part) {
  const size_t row_chunks = pool_.geometry.row_chunks;
  std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  for (size_t i = 0; i < part.copies.size(); ++i) {
    ChunkId& entry = table[part.copied_row * row_chunks + part.copied_columns[i]];
    pool_.pset.drop_table_ref(entry);
    entry = part.copies[i].id;
  }
  vtensors_.forget_guard(vtensor.slot, part.copied_row);
  vtensors_.own_rows(vtensor, part.copied_row, part.copied_row + 1);
  vtensor.last_row_shared = false;
  vtensor.chunks_copied += part.copies.size();
  state_.counters.chunks_copied += part.copies.size();
}

void Extender::commit(Extension& extension) {
  for (ExtensionPart& part : extension.parts) {
    VTensor& vtensor = vtensors_.live(part.vtensor);
    std::vector<ChunkId>& table = pool_.vset[part.slot].table;
    for (const std::vector<Claim>* claims : {&part.copies, &part.rows}) {
      p_commit(pool_, *claims, part.tenant);
      for (const Claim& claim : *claims) state_.claimed.erase(claim.id);
    }
    if (!part.copies.empty()) commit_copy(vtensor, part);
    for (const Claim& claim : part.rows) table.push_back(claim.id);
    vtensors_.own_rows(vtensor, part.first_row, pool_.vset.mapped_rows(part.slot));
    declare(vtensor, part.num_tokens);
    vtensor.busy = false;
    vtensors_.update_write_limit(vtensor);
  }
  for (const auto& [id, num_tokens] : extension.declared) {
    declare(vtensors_.live(id), num_tokens);
    vtensors_.live(id).busy = false;
  }
}

// What is not, or no longer, to be scrubbed holds nothing but data of `tenant`, who may have
// written some: the next tenant must find its name there.
void Extender::unclaim(std::vector<Claim>& claims, uint64_t tenant) {
  for (const Claim& claim : claims) {
    state_.claimed.erase(claim.id);
    if (!claim.scrub) pool_.pset[claim.id].tenant = tenant;
  }
  p_unclaim(pool_, claims);
}

void Extender::abandon(Extension& extension) {
  for (ExtensionPart& part : extension.parts) {
    VTensor& vtensor = vtensors_.live(part.vtensor);
    vtensor.busy = false;
    if (part.broken) {
      vtensors_.record_watermark(vtensor);
      std::vector<ChunkId> maybe_mapped;
      for (const std::vector<Claim>* claims : {&part.copies, &part.rows}) {
        p_commit(pool_, *claims, part.tenant);
        for (const Claim& claim : *claims) maybe_mapped.push_back(claim.id);
      }
      vtensors_.break_slot(part.slot, maybe_mapped);
    }
    unclaim(part.copies, part.tenant);
    unclaim(part.rows, part.tenant);
  }
  for (const auto& [id, num_tokens] : extension.declared) vtensors_.live(id).busy = false;
}

// The tokens that a query at `num_tokens` reads must not have been given back.
void Extender::check_windows(const VTensor& vtensor, size_t num_tokens) const {
  for (const Window& window : pool_.geometry.windows) {
    const size_t gone = vtensors_.rows_forgotten(vtensor.slot, window);
    if (gone <= pool_.geometry.first_row_kept(window, num_tokens)) continue;
    throw std::invalid_argument(
        "truncate to " + std::to_string(num_tokens) + " tokens, but of those that its window of " +
        std::to_string(window.num_tokens) + " needs then " +
        std::to_string(pool_.geometry.tokens_in(gone)) + " at the head have been given back");
  }
}

void Extender::truncate(VTensorId id, size_t num_tokens) {
  VTensor& vtensor = vtensors_.resident(id);
  if (num_tokens > vtensor.num_tokens) {
    throw std::invalid_argument("truncate to " + std::to_string(num_tokens) +
                                " tokens, but the vTensor has only " +
                                std::to_string(vtensor.num_tokens));
  }
  check_windows(vtensor, num_tokens);
  vtensor.past_tokens = vtensor.forgotten_tokens = 0;  // queries may follow that were past already
  const bool rewrites_shared = num_tokens < vtensor.frozen_tokens ||
                               pool_.geometry.full_rows(num_tokens) < vtensor.first_owned_row;
  if (rewrites_shared) {
    const size_t keep_rows = pool_.geometry.rows_for(num_tokens);
    if (pool_.vset[vtensor.slot].num_views > 0 &&
        keep_rows < pool_.vset.mapped_rows(vtensor.slot)) {
      throw std::invalid_argument("truncate to " + std::to_string(num_tokens) +
                                  " tokens gives up memory that others share, but tensor views of "
                                  "the vTensor are alive; drop them first");
    }
    vtensors_.shrink(vtensor.slot, keep_rows);
    vtensors_.record_watermark(vtensor);
    vtensor.first_owned_row = pool_.geometry.full_rows(num_tokens);
    vtensor.last_row_shared = vtensor.first_owned_row < pool_.geometry.rows_for(num_tokens);
    vtensor.frozen_tokens = num_tokens;
  }
  vtensor.num_tokens = num_tokens;
  vtensors_.update_write_limit(vtensor);
  vtensors_.update_forget_at(vtensor);
}

}  // namespace vtensor
