#include "vtensor/core/upkeep_task.h"

#include <algorithm>

#include "vtensor/core/scheduler.h"

namespace vtensor {

void Chore::run(Driver& driver, size_t chunk_bytes) {
  switch (kind) {
    case Kind::kCreate:
      claim.handle = driver.create(chunk_bytes);
      claim.created = true;
      break;
    case Kind::kScrub:
      driver.fill(claim.handle, 0, claim.dirty_bytes, std::byte{0});
      claim.dirty_bytes = 0;
      break;
    case Kind::kRelease:
      driver.release(claim.handle, chunk_bytes);
      claim.created = false;
      break;
  }
}

std::string_view chore_name(Chore::Kind kind) {
  switch (kind) {
    case Chore::Kind::kCreate:
      return "create";
    case Chore::Kind::kScrub:
      return "scrub";
    case Chore::Kind::kRelease:
      break;
  }
  return "release";
}

// Giving back comes first, so that nothing is scrubbed for nobody.
std::optional<Chore::Kind> Scheduler::next_chore() const {
  const PSet& pset = pool_.pset;
  if (pset.num_free() > options_.max_free_chunks) return Chore::Kind::kRelease;
  if (pset.num_dirty_free() > 0 && options_.scrub != ScrubPolicy::kOff) return Chore::Kind::kScrub;
  if (pset.num_free() < options_.eager_chunks && pset.num_created() < pset.budget_chunks()) {
    return Chore::Kind::kCreate;
  }
  return std::nullopt;
}

std::optional<Chore> Scheduler::plan_chore() {
  if (next_chore() == Chore::Kind::kCreate) {
    // What will be free then counts as idle too: nobody uses it.
    const size_t eager = options_.eager_chunks, bound = max_idle();
    recycle(eager, bound - std::min(bound, eager));
  }
  const std::optional<Chore::Kind> kind = next_chore();
  if (!kind) return std::nullopt;
  PSet& pset = pool_.pset;
  const ChunkId id = *kind == Chore::Kind::kRelease ? pset.claim()
                     : *kind == Chore::Kind::kScrub ? pset.claim_dirty()
                                                    : pset.claim_absent();
  const Chunk& chunk = pset[id];
  claimed_.insert(id);
  return Chore{*kind, {id, chunk.handle, chunk.created, false, chunk.dirty_bytes}};
}

void Scheduler::finish_chore(const Chore& chore) {
  Chunk& chunk = pool_.pset[chore.claim.id];
  claimed_.erase(chore.claim.id);
  chunk.handle = chore.claim.handle;
  chunk.created = chore.claim.created;
  chunk.dirty_bytes = chore.claim.dirty_bytes;
  pool_.pset.unclaim(chore.claim.id);
}

}  // namespace vtensor
