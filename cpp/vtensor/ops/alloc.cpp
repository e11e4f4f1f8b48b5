#include "vtensor/ops/alloc.h"

namespace vtensor {

std::optional<SlotId> v_alloc(Pool& pool) {
  if (pool.vset.num_free() == 0) return std::nullopt;
  return pool.vset.take_free();
}

void v_free(Pool& pool, SlotId slot) { pool.vset.make_free(slot); }

bool needs_scrub(const Chunk& chunk, ScrubPolicy policy, uint64_t tenant) {
  if (chunk.dirty_bytes == 0 || policy == ScrubPolicy::kOff) return false;
  return policy == ScrubPolicy::kOwner || chunk.tenant != tenant;
}

std::optional<std::vector<Claim>> p_claim(Pool& pool, size_t num_chunks, ScrubPolicy policy,
                                          uint64_t tenant, Apart apart) {
  if (pool.pset.num_claimable() < num_chunks) return std::nullopt;
  std::vector<Claim> claims;
  claims.reserve(num_chunks);
  for (size_t i = 0; i < num_chunks; ++i) {
    const bool fresh = apart.number != 0 && pool.pset.num_created() < pool.pset.budget_chunks();
    const ChunkId id = fresh ? pool.pset.claim_absent() : pool.pset.claim();
    const Chunk& chunk = pool.pset[id];
    const bool renew = chunk.created && (chunk.apart || apart.number != 0);
    claims.push_back({id, chunk.handle, chunk.created, !renew && needs_scrub(chunk, policy, tenant),
                      chunk.dirty_bytes, renew, chunk.apart, apart});
  }
  return claims;
}

bool p_create(Driver& driver, size_t chunk_bytes, std::span<Claim> claims,
              const GiveWay& give_way) {
  for (Claim& claim : claims) {
    if (give_way && give_way()) return false;
    if (claim.renew) {
      driver.release(claim.handle, chunk_bytes);
      claim.renew = claim.created = claim.is_apart = false;
      claim.dirty_bytes = 0;
    }
    if (!claim.created) {
      claim.is_apart = claim.apart.number != 0;
      claim.handle = claim.is_apart ? driver.create_apart(chunk_bytes, claim.apart)
                                    : driver.create(chunk_bytes);
      claim.created = true;
    }
    if (claim.scrub) {
      driver.fill(claim.handle, 0, claim.dirty_bytes, std::byte{0});
      claim.scrub = false;
      claim.dirty_bytes = 0;
    }
  }
  return true;
}

void p_commit(Pool& pool, std::span<const Claim> claims, uint64_t tenant) {
  for (const Claim& claim : claims) {
    Chunk& chunk = pool.pset[claim.id];
    chunk.handle = claim.handle;
    chunk.created = claim.created;
    chunk.apart = claim.created && claim.is_apart;
    chunk.dirty_bytes = claim.dirty_bytes;
    chunk.tenant = tenant;
    chunk.written_bytes = 0;
  }
}

void p_unclaim(Pool& pool, std::span<const Claim> claims) {
  for (const Claim& claim : claims) {
    Chunk& chunk = pool.pset[claim.id];
    chunk.handle = claim.handle;
    chunk.created = claim.created;
    chunk.apart = claim.created && claim.is_apart;
    chunk.dirty_bytes = claim.dirty_bytes;
    pool.pset.unclaim(claim.id);
  }
}

void p_free(Pool& pool, std::span<const ChunkId> chunks) {
  for (const ChunkId id : chunks) pool.pset.drop_table_ref(id);
}

}  // namespace vtensor
