#include "vtensor/core/upkeep.h"

#include <algorithm>

namespace vtensor {

void UpkeepTask::run(Driver& driver, size_t chunk_bytes) {
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

std::string_view to_string(UpkeepTask::Kind kind) {
  switch (kind) {
    case UpkeepTask::Kind::kCreate:
      return "create";
    case UpkeepTask::Kind::kScrub:
      return "scrub";
    case UpkeepTask::Kind::kRelease:
      break;
  }
  return "release";
}

size_t Upkeep::num_kept_ready() const {
  constexpr size_t kBusyPart = 4;
  const size_t ready = state_.options.min_free_chunks;
  return busy_ == true ? ceil_div(ready, kBusyPart) : ready;
}

bool Upkeep::may_create() const {
  const PSet& pset = state_.pool.pset;
  if (pset.num_created() >= pset.budget_chunks()) return false;
  return busy_ != false || pset.num_free() + reclaimer_.num_idle() < reclaimer_.max_idle();
}

// Giving back comes first, and dirty chunks go first, so that nothing is scrubbed for nobody.
std::optional<UpkeepTask::Kind> Upkeep::next() const {
  const PSet& pset = state_.pool.pset;
  if (pset.num_apart_free() > 0) return UpkeepTask::Kind::kRelease;
  if (pset.num_free() > state_.options.max_free_chunks) return UpkeepTask::Kind::kRelease;
  if (pset.num_dirty_free() > 0 && state_.options.scrub != ScrubPolicy::kOff)
    return UpkeepTask::Kind::kScrub;
  if (pset.num_free() < num_kept_ready() && may_create()) return UpkeepTask::Kind::kCreate;
  return std::nullopt;
}

std::optional<UpkeepTask> Upkeep::plan() {
  if (busy_ != false && next() == UpkeepTask::Kind::kCreate) {
    // What will be free then counts as idle too: nobody uses it.
    const size_t ready = num_kept_ready(), bound = reclaimer_.max_idle();
    reclaimer_.recycle(ready, bound - std::min(bound, ready));
  }
  const std::optional<UpkeepTask::Kind> kind = next();
  if (!kind) return std::nullopt;
  PSet& pset = state_.pool.pset;
  const bool takes_dirty = *kind != UpkeepTask::Kind::kCreate && pset.num_dirty_free() > 0;
  const ChunkId id = pset.num_apart_free() > 0             ? pset.claim_apart()
                     : takes_dirty                         ? pset.claim_dirty()
                     : *kind == UpkeepTask::Kind::kRelease ? pset.claim()
                                                           : pset.claim_absent();
  const Chunk& chunk = pset[id];
  state_.claimed.insert(id);
  Claim claim{id, chunk.handle, chunk.created, false, chunk.dirty_bytes};
  claim.is_apart = chunk.apart;
  return UpkeepTask{*kind, claim};
}

void Upkeep::finish(const UpkeepTask& task) {
  Chunk& chunk = state_.pool.pset[task.claim.id];
  state_.claimed.erase(task.claim.id);
  chunk.handle = task.claim.handle;
  chunk.created = task.claim.created;
  chunk.dirty_bytes = task.claim.dirty_bytes;
  chunk.apart = task.claim.created && task.claim.is_apart;
  state_.pool.pset.unclaim(task.claim.id);
}

}  // namespace vtensor
