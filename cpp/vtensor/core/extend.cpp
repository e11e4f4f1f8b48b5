// Scheduler: extending vTensors, in place, by a planned growth, or ahead of need.
#include <algorithm>
#include <stdexcept>

#include "vtensor/core/scheduler.h"
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

bool Scheduler::extend_in_place(std::span<const VTensorId> ids,
                                std::span<const size_t> num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const VTensor& vtensor = resident(ids[i]);
    if (num_tokens[i] > std::max(vtensor.write_limit, vtensor.num_tokens)) return false;
  }
  for (size_t i = 0; i < ids.size(); ++i) {
    declare(vtensors_[ids[i] % vtensors_.size()], num_tokens[i]);
  }
  return true;
}

// What extending to `num_tokens` takes, sizes only: `rows` and `tail` hold blank claims.
GrowthPart Scheduler::outline(const VTensor& vtensor, size_t num_tokens) const {
  if (num_tokens > pool_.geometry.max_tokens) {
    throw std::invalid_argument("extend to " + std::to_string(num_tokens) +
                                " tokens is beyond max_seq_len " +
                                std::to_string(pool_.geometry.max_tokens));
  }
  const size_t planes = pool_.geometry.num_planes;
  GrowthPart part;
  part.vtensor = vtensor.id;
  part.slot = vtensor.slot;
  part.tenant = vtensor.tenant;
  part.num_tokens = num_tokens;
  part.first_row = pool_.vset.mapped_rows(vtensor.slot);
  const size_t rows = pool_.geometry.rows_for(num_tokens);
  if (rows > part.first_row) part.rows.resize((rows - part.first_row) * planes);
  if (vtensor.tail_shared && num_tokens > vtensor.num_tokens) {
    part.tail_row = vtensor.own_row;
    part.tail_bytes = pool_.geometry.bytes_used(vtensor.own_row, vtensor.num_tokens);
    part.tail.resize(planes);
    part.old_tail = handles(vtensor.slot, vtensor.own_row, vtensor.own_row + 1);
  }
  return part;
}

// Fills the blank claims of all parts, or changes nothing.
std::optional<Growth> Scheduler::claim_for(std::vector<GrowthPart> parts) {
  Growth growth{std::move(parts), {}};
  if (pool_.pset.num_claimable() < growth.num_claims()) return std::nullopt;
  for (GrowthPart& part : growth.parts) {
    part.tail = *p_claim(pool_, part.tail.size(), options_.scrub, part.tenant);
    part.rows = *p_claim(pool_, part.rows.size(), options_.scrub, part.tenant);
    for (const Claim& claim : part.tail) claimed_.insert(claim.id);
    for (const Claim& claim : part.rows) claimed_.insert(claim.id);
    live(part.vtensor).busy = true;
  }
  return growth;
}

// Who needs rows or a tail of its own, as outlines; who does not is only to be declared.
std::vector<GrowthPart> Scheduler::outline_all(std::span<const VTensorId> ids,
                                               std::span<const size_t> num_tokens) {
  std::vector<GrowthPart> parts;
  reap();
  ++plan_;
  for (size_t i = 0; i < ids.size(); ++i) {
    VTensor& vtensor = resident(ids[i]);
    if (vtensor.plan == plan_) {
      throw std::invalid_argument("vTensor " + std::to_string(ids[i]) +
                                  " stands twice in one extend");
    }
    vtensor.plan = plan_;
    if (num_tokens[i] <= std::max(vtensor.num_tokens, vtensor.write_limit)) continue;
    if (vtensor.tail_shared && take_tail(vtensor)) update_write_limit(vtensor);
    parts.push_back(outline(vtensor, num_tokens[i]));
  }
  return parts;
}

std::optional<Growth> Scheduler::plan_extend(std::span<const VTensorId> ids,
                                             std::span<const size_t> num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  std::vector<GrowthPart> parts = outline_all(ids, num_tokens);
  size_t num_claims = 0;
  for (const GrowthPart& part : parts) num_claims += part.rows.size() + part.tail.size();
  if (!make_claimable(num_claims)) return std::nullopt;
  const bool copies =
      std::ranges::any_of(parts, [](const GrowthPart& part) { return !part.tail.empty(); });
  if (copies) epochs_.wait();  // a running step may still write what is copied
  std::optional<Growth> growth = claim_for(std::move(parts));
  if (!growth) return std::nullopt;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!live(ids[i]).busy) growth->declared.emplace_back(ids[i], num_tokens[i]);
  }
  ++plan_;  // from here on `busy` protects them
  return growth;
}

Growth Scheduler::plan_pre_extend(std::span<const VTensorId> ids,
                                  std::span<const size_t> num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  std::vector<GrowthPart> parts;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!is_live(ids[i])) continue;
    const VTensor& vtensor = live(ids[i]);
    if (vtensor.busy || vtensor.is_swapped) continue;
    GrowthPart part = outline(vtensor, std::min(num_tokens[i], pool_.geometry.max_tokens));
    part.num_tokens = 0;
    part.tail.clear();  // the tail is decided when it is written
    part.old_tail.clear();
    if (part.rows.empty()) continue;
    const size_t wanted = part.rows.size();
    const size_t claimable = pool_.pset.num_claimable();
    if (claimable + pool_.pset.num_evictable() < wanted) continue;
    if (claimable < wanted) {
      evict(wanted - claimable);
    } else {
      recycle(wanted, max_idle());
    }
    std::vector<GrowthPart> one;
    one.push_back(std::move(part));
    if (std::optional<Growth> claimed = claim_for(std::move(one))) {
      parts.push_back(std::move(claimed->parts.front()));
    }
  }
  return Growth{std::move(parts), {}};
}

void Scheduler::commit_tail(VTensor& vtensor, const GrowthPart& part) {
  const size_t planes = pool_.geometry.num_planes;
  std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  for (size_t plane = 0; plane < planes; ++plane) {
    ChunkId& entry = table[part.tail_row * planes + plane];
    pool_.pset.drop_table_ref(entry);
    entry = part.tail[plane].id;
  }
  own_rows(vtensor, part.tail_row, part.tail_row + 1);
  vtensor.tail_shared = false;
  vtensor.chunks_copied += planes;
  counters_.chunks_copied += planes;
}

void Scheduler::commit(Growth& growth) {
  for (GrowthPart& part : growth.parts) {
    VTensor& vtensor = live(part.vtensor);
    std::vector<ChunkId>& table = pool_.vset[part.slot].table;
    p_settle(pool_, part.tail, part.tenant);
    p_settle(pool_, part.rows, part.tenant);
    if (!part.tail.empty()) commit_tail(vtensor, part);
    for (const Claim& claim : part.rows) table.push_back(claim.id);
    own_rows(vtensor, part.first_row, pool_.vset.mapped_rows(part.slot));
    for (const Claim& claim : part.tail) claimed_.erase(claim.id);
    for (const Claim& claim : part.rows) claimed_.erase(claim.id);
    declare(vtensor, part.num_tokens);
    vtensor.busy = false;
    update_write_limit(vtensor);
  }
  for (const auto& [id, num_tokens] : growth.declared) declare(live(id), num_tokens);
}

// What is not, or no longer, to be scrubbed holds nothing but data of `tenant`, who may have
// written some: the next tenant must find its name there.
void Scheduler::unclaim(std::vector<Claim>& claims, uint64_t tenant) {
  for (const Claim& claim : claims) {
    claimed_.erase(claim.id);
    if (!claim.scrub) pool_.pset[claim.id].tenant = tenant;
  }
  p_unclaim(pool_, claims);
}

void Scheduler::abandon(Growth& growth) {
  for (GrowthPart& part : growth.parts) {
    VTensor& vtensor = live(part.vtensor);
    vtensor.busy = false;
    if (!part.broken) {
      unclaim(part.tail, part.tenant);
      unclaim(part.rows, part.tenant);
      continue;
    }
    stamp(vtensor);
    std::vector<ChunkId> maybe_mapped;
    for (const std::vector<Claim>* claims : {&part.tail, &part.rows}) {
      p_settle(pool_, *claims, part.tenant);
      for (const Claim& claim : *claims) maybe_mapped.push_back(claim.id);
    }
    break_slot(part.slot, maybe_mapped);
    unclaim(part.tail, part.tenant);
    unclaim(part.rows, part.tenant);
  }
}

}  // namespace vtensor
