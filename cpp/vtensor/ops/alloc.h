// vAlloc, vFree, pAlloc, pFree: taking virtual ranges and physical chunks, and giving them back.
//
// All-or-nothing: an operation that fails has changed nothing. The driver part of pAlloc (create,
// scrub) stands apart from its bookkeeping part (claim), so that a worker can run it without the
// manager's mutex: claim under the mutex, create without it, commit or unclaim under it again.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "vtensor/pool/pool.h"

namespace vtensor {

// A chunk taken from the pSet for somebody, before its memory is ready.
struct Claim {
  ChunkId id = 0;
  Handle handle{};
  bool created = false;      // memory is behind it
  bool scrub = false;        // zero the dirty bytes before use
  uint32_t dirty_bytes = 0;  // leading bytes that may be non-zero
  bool renew = false;        // the memory is not for this owner: give it back, and create other
  bool is_apart = false;     // the memory stands apart from the pool's
  Apart apart{};             // where memory is to be created
};

// When a chunk that changes hands is zero-filled first.
enum class ScrubPolicy {
  kOwner,   // always
  kTenant,  // when the cache salt differs
  kOff,     // never
};

// vAlloc: an unmapped slot, or nothing when none is free.
std::optional<SlotId> v_alloc(Pool& pool);
// vFree. Requires: nothing is mapped in the slot.
void v_free(Pool& pool, SlotId slot);

// pAlloc, bookkeeping: `num_chunks` chunks with one table reference each, or nothing (and nothing
// changed) when neither free chunks nor the budget suffice. `apart`: of other memory than the
// pool's.
std::optional<std::vector<Claim>> p_claim(Pool& pool, size_t num_chunks, ScrubPolicy policy,
                                          uint64_t tenant, Apart apart = {});
// Asked between chunks: whether to leave off, because somebody waits.
using GiveWay = std::function<bool()>;
// pAlloc, driver: creates what has no memory of its own and scrubs what is dirty. Returns whether
// it came to its end. If not, or on failure, the claims say which chunks exist by now; the caller
// unclaims all of them.
bool p_create(Driver& driver, size_t chunk_bytes, std::span<Claim> claims,
              const GiveWay& give_way = nullptr);
// Writes what p_create() did back to the pSet.
void p_commit(Pool& pool, std::span<const Claim> claims, uint64_t tenant);
// pFree of claims: undoes p_claim() after p_create() failed or was not wanted.
void p_unclaim(Pool& pool, std::span<const Claim> claims);
// pFree: drops one table reference of each chunk.
void p_free(Pool& pool, std::span<const ChunkId> chunks);
// Whether the dirty bytes of `chunk` must be zeroed before it serves `tenant`.
bool needs_scrub(const Chunk& chunk, ScrubPolicy policy, uint64_t tenant);

}  // namespace vtensor
