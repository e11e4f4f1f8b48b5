#include "vtensor/core/handover.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "vtensor/util/error.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {

// One chunk of a page table on its way.
struct Handover::Entry {
  size_t idx = 0;  // in the page table
  ChunkId chunk = kNoChunk;
  Handle handle{};
  uint32_t used_bytes = 0;  // leading bytes that are
  bool is_copied = false;
  bool continues = false;  // nobody wrote beyond these bytes, or will
};

void Copies::run(Driver& driver, size_t chunk_bytes) {
  p_create(driver, chunk_bytes, claims);
  for (size_t i = 0; i < claims.size(); ++i) {
    driver.copy(claims[i].handle, 0, sources[i], 0, used_bytes[i]);
    claims[i].dirty_bytes = used_bytes[i];
  }
}

// Whether somebody else writes on in this chunk, or has written beyond what is sent.
bool Handover::is_written_elsewhere(const VTensor& vtensor, const Entry& entry) const {
  const Chunk& chunk = pool_.pset[entry.chunk];
  const bool is_still = chunk.appender == kNoVTensor && chunk.written_bytes <= entry.used_bytes;
  return chunk.appender != vtensor.id && !is_still;
}

// What can be sent as it is, and what must be copied.
std::vector<Handover::Entry> Handover::entries_of(const VTensor& vtensor) const {
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  std::vector<Entry> entries;
  std::vector<Handle> apart;
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i] == kNoChunk) continue;
    const Chunk& chunk = pool_.pset[table[i]];
    Entry entry{i, table[i], chunk.handle, pool_.geometry.bytes_used(i, vtensor.num_tokens)};
    entry.is_copied = !chunk.apart || is_written_elsewhere(vtensor, entry);
    entry.continues = !chunk.sealed;
    if (!entry.is_copied) apart.push_back(chunk.handle);
    entries.push_back(entry);
  }
  const std::vector<bool> sendable = pool_.driver->sendable(apart);
  size_t next = 0;
  for (Entry& entry : entries) {
    if (!entry.is_copied) entry.is_copied = !sendable[next++];
    entry.continues = entry.continues || entry.is_copied;
  }
  return entries;
}

// Whether what is to be sent as it is still can be.
bool Handover::is_current(const VTensor& vtensor, std::span<const Entry> entries) const {
  std::vector<Handle> apart;
  for (const Entry& entry : entries) {
    if (entry.is_copied) continue;
    if (is_written_elsewhere(vtensor, entry)) return false;
    apart.push_back(entry.handle);
  }
  const std::vector<bool> sendable = pool_.driver->sendable(apart);
  return std::ranges::find(sendable, false) == sendable.end();
}

// Into chunks that are only there until the parcel holds them. Nothing: memory is short.
std::optional<Copies> Handover::plan(VTensor& vtensor, std::span<const Entry> entries) {
  Copies copies;
  for (const Entry& entry : entries) {
    if (!entry.is_copied) continue;
    copies.sources.push_back(entry.handle);
    copies.used_bytes.push_back(entry.used_bytes);
  }
  vtensor.plan = ++state_.plan;  // its own rows are not to be taken for the copies
  vtensor.planned_tokens = pool_.geometry.max_tokens;
  if (!reclaimer_.make_claimable(copies.sources.size())) return std::nullopt;
  copies.claims = p_claim(pool_, copies.sources.size(), ScrubPolicy::kOff, vtensor.tenant,
                          state_.apart(++state_.num_aparts))
                      .value();
  return copies;
}

// Who extends it meanwhile waits, also within the rows that it has.
void Handover::run_beside(VTensor& vtensor, Copies& copies, const Runner& run) {
  if (copies.claims.empty()) return;
  for (const Claim& claim : copies.claims) state_.claimed.insert(claim.id);
  vtensor.busy = true;
  vtensor.write_limit = vtensor.num_tokens;
  const ScopeFail end([&] {
    vtensor.busy = false;
    vtensors_.update_write_limit(vtensor);
  });
  run(copies);
}

Parcel Handover::pack(const VTensor& vtensor, std::span<const Entry> entries,
                      std::span<const Claim> copies) {
  const Geometry& geometry = pool_.geometry;
  Parcel parcel;
  parcel.num_tokens = vtensor.num_tokens;
  parcel.is_there.resize(geometry.rows_for(vtensor.num_tokens) * geometry.row_chunks);
  parcel.continues = true;
  const size_t last_row = geometry.full_rows(vtensor.num_tokens) * geometry.row_chunks;
  std::vector<Handle> handles;
  for (const Entry& entry : entries) {
    handles.push_back(entry.is_copied ? copies[parcel.num_copied++].handle : entry.handle);
    parcel.is_there[entry.idx] = true;
    if (entry.idx >= last_row) parcel.continues = parcel.continues && entry.continues;
  }
  parcel.chunks = pool_.driver->send(handles);
  return parcel;
}

// As it is to be when it is sent.
VTensor& Handover::prepared(VTensorId id) {
  VTensor& vtensor = vtensors_.resident(id);
  if (vtensor.num_tokens == 0) throw std::invalid_argument("an empty vTensor cannot be sent");
  if (pool_.vset[vtensor.slot].num_views > 0) {
    throw std::invalid_argument("vTensor " + std::to_string(id) +
                                " cannot be sent while tensor views of it are alive");
  }
  state_.epochs.wait();  // what is sent must have been written
  vtensors_.shrink(vtensor.slot, pool_.geometry.rows_for(vtensor.num_tokens));
  vtensors_.update_write_limit(vtensor);
  reclaimer_.release_apart();  // else it would be sent with the rest of its file
  return vtensor;
}

std::optional<Parcel> Handover::send(VTensorId id, const Runner& run) {
  VTensor& vtensor = prepared(id);
  std::vector<Entry> entries = entries_of(vtensor);
  std::optional<Copies> copies = plan(vtensor, entries);
  if (!copies) return std::nullopt;
  std::optional<Parcel> parcel;
  bool is_short = false;
  {
    const ScopeFail end([&] { extender_.unclaim(copies->claims, vtensor.tenant); });
    try {
      run_beside(vtensor, *copies, run);
      if (is_current(vtensor, entries)) parcel = pack(vtensor, entries, copies->claims);
    } catch (const OutOfMemoryError&) {
      is_short = true;
    }
  }
  reclaimer_.release_apart();  // the copies: the parcel holds them
  if (is_short) return std::nullopt;
  if (!parcel) {  // others have gone on where it ends: now they wait
    return send(id, [this](Copies& all) { all.run(*pool_.driver, pool_.geometry.chunk_bytes); });
  }
  shield_.before_sending(vtensor);
  for (const Entry& entry : entries) {
    if (!entry.is_copied) pool_.pset[entry.chunk].sealed = true;
  }
  state_.counters.chunks_sent += entries.size() - parcel->num_copied;
  state_.counters.chunks_sent_copied += parcel->num_copied;
  return parcel;
}

// Whoever made it: what does not fit is found before a file is opened.
void Handover::check(const Parcel& parcel) const {
  const Geometry& geometry = pool_.geometry;
  if (parcel.num_tokens == 0 || parcel.num_tokens > geometry.max_tokens) {
    throw std::invalid_argument("a parcel of " + std::to_string(parcel.num_tokens) +
                                " tokens, where vTensors have 1 to " +
                                std::to_string(geometry.max_tokens));
  }
  const size_t num_entries = geometry.rows_for(parcel.num_tokens) * geometry.row_chunks;
  const auto num_there = static_cast<size_t>(std::ranges::count(parcel.is_there, true));
  if (parcel.is_there.size() != num_entries || num_there != parcel.chunks.places.size()) {
    throw std::invalid_argument("a parcel of " + std::to_string(parcel.num_tokens) +
                                " tokens has " + std::to_string(parcel.is_there.size()) +
                                " entries and " + std::to_string(parcel.chunks.places.size()) +
                                " chunks, where " + std::to_string(num_entries) + " are wanted");
  }
  std::vector<size_t> first_kept(geometry.row_chunks, 0);  // by column
  for (const Window& window : geometry.windows) {
    std::fill(first_kept.begin() + static_cast<ptrdiff_t>(window.first_column),
              first_kept.begin() + static_cast<ptrdiff_t>(window.end_column),
              geometry.first_row_kept(window, parcel.num_tokens));
  }
  for (size_t i = 0; i < num_entries; ++i) {
    const size_t row = i / geometry.row_chunks;
    const bool may_lack = row < first_kept[i % geometry.row_chunks] &&
                          (row == 0 || !parcel.is_there[i - geometry.row_chunks]);
    if (!parcel.is_there[i] && !may_lack) {
      throw std::invalid_argument("a parcel lacks the chunk at row " + std::to_string(row));
    }
  }
}

// The memory of the claims goes back; that of the parcel takes its place.
void Handover::take_in(const Parcel& parcel, std::vector<Claim>& claims) {
  for (Claim& claim : claims) {
    if (!claim.created) continue;
    pool_.driver->release(claim.handle, pool_.geometry.chunk_bytes);
    claim.created = claim.is_apart = false;
    claim.dirty_bytes = 0;
  }
  const std::vector<Handle> handles =
      pool_.driver->receive(parcel.chunks, pool_.geometry.chunk_bytes);
  for (size_t i = 0; i < claims.size(); ++i) {
    claims[i].handle = handles[i];
    claims[i].created = claims[i].is_apart = true;
    claims[i].dirty_bytes = static_cast<uint32_t>(pool_.geometry.chunk_bytes);
  }
}

// From here on they are chunks like others, recorded or not, which nobody writes but who goes on.
RTree::Match Handover::commit(const Parcel& parcel, std::span<const Claim> claims,
                              uint64_t tenant) {
  p_commit(pool_, claims, tenant);
  RTree::Match match;
  match.num_tokens = match.num_recorded = parcel.num_tokens;
  match.table.resize(parcel.is_there.size(), kNoChunk);
  const size_t last_row = pool_.geometry.full_rows(parcel.num_tokens) * pool_.geometry.row_chunks;
  size_t next = 0;
  for (size_t i = 0; i < match.table.size(); ++i) {
    if (!parcel.is_there[i]) continue;
    match.table[i] = claims[next++].id;
    Chunk& chunk = pool_.pset[match.table[i]];
    chunk.written_bytes = pool_.geometry.bytes_used(i, parcel.num_tokens);
    chunk.sealed = !parcel.continues || i < last_row;
  }
  return match;
}

std::optional<VTensorId> Handover::receive(const Parcel& parcel, const std::string& salt) {
  check(parcel);
  const size_t num_chunks = parcel.chunks.places.size();
  const uint64_t tenant = tenant_of(salt);
  ++state_.plan;
  if (!reclaimer_.make_claimable(num_chunks)) return std::nullopt;
  std::vector<Claim> claims = p_claim(pool_, num_chunks, ScrubPolicy::kOff, tenant).value();
  try {
    take_in(parcel, claims);
  } catch (const OutOfMemoryError&) {
    extender_.unclaim(claims, tenant);
    return std::nullopt;
  } catch (...) {
    extender_.unclaim(claims, tenant);
    throw;
  }
  const RTree::Match match = commit(parcel, claims, tenant);
  try {
    const std::optional<VTensorId> id =
        placement_.create_alias(match, salt, match.table.size() / pool_.geometry.row_chunks);
    if (id) state_.counters.chunks_received += num_chunks;
    reclaimer_.release_apart();  // nothing, unless no slot was left
    return id;
  } catch (...) {
    reclaimer_.release_apart();
    throw;
  }
}

}  // namespace vtensor
