// Scheduler: what the memory of vTensors does, built from the operations of ops/.
//
//   create / fork        a vTensor, with a recorded prefix or a sibling's chunks aliased
//   extend / pre_extend  back the first n tokens, now or ahead of need
//   record / match       prefixes in the rTree
//   release              park the slot for the next vTensor
//   reclaim              evict, trim, budget: where memory comes from when it is short
//
// Expected shortage is a value; nothing has changed then. Other failures throw, rolled back.
//
// Thread-safety: none; the manager's mutex guards it. plan() and commit() / abandon() enclose a
// Growth, which may run without the mutex in between; its vTensors are `busy` for so long.
//
// The order in which chunks are found: free chunks; new chunks under the budget; private chunks of
// parked slots, the longest parked first; rows mapped ahead of need; unpinned recorded prefixes by
// last use; chunks that parked slots share with the rTree. Two differences from the sentence in
// shared/design.md, section 4: new chunks come before eviction, or a cache could never grow, and
// parked slots, which that sentence leaves open, come before recorded prefixes.
#pragma once

#include <cstddef>
#include <deque>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "vtensor/core/epochs.h"
#include "vtensor/core/extension.h"
#include "vtensor/core/upkeep_task.h"
#include "vtensor/core/vtensor.h"
#include "vtensor/ops/alloc.h"
#include "vtensor/ops/mapping.h"
#include "vtensor/ops/prefix.h"
#include "vtensor/pool/pool.h"
#include "vtensor/store/swap_store.h"

namespace vtensor {

struct SchedulerOptions {
  ScrubPolicy scrub = ScrubPolicy::kOwner;
  bool park = true;   // released slots stay mapped for the next vTensor (deferred reclamation)
  bool alias = true;  // false: prefixes and forks are copied, chunk by chunk
  size_t eager_chunks = 0;  // clean free chunks that upkeep keeps ready (eager allocation)
  size_t max_free_chunks = SIZE_MAX;  // free chunks beyond this go back to the system
  // Idle chunks beyond this, free ones that upkeep keeps ready among them, are reused before any is
  // created; the lesser of the two.
  size_t max_idle_chunks = SIZE_MAX;
  double max_idle_fraction = 1;  // of the budget, as it is then
};

// Totals since the start; see docs/metrics.md.
struct SchedulerCounters {
  size_t prefix_queries = 0;
  size_t prefix_query_tokens = 0;
  size_t prefix_hit_tokens = 0;
  size_t chunks_aliased = 0;
  size_t chunks_copied = 0;
  size_t chunks_evicted = 0;
  size_t chunks_adopted = 0;       // reused in place, in a parked slot
  size_t chunks_deduplicated = 0;  // given up for equal chunks of a recorded prefix
  size_t dedup_failures = 0;       // the driver failed, and the vTensor kept chunks of its own
  size_t chunks_swapped_out = 0;
  size_t chunks_swapped_in = 0;
};

class Scheduler {
 public:
  Scheduler(Pool& pool, const SchedulerOptions& options);

  // A vTensor that aliases the longest recorded prefix of `tokens`, or nothing when no slot is
  // left. Its num_tokens is the length of that prefix. `expected_tokens`: how long it will become,
  // as far as known: the fitting parked slot is chosen by that.
  std::optional<VTensorId> create(std::span<const Token> tokens, const std::string& salt,
                                  size_t expected_tokens = 0);
  // A vTensor with the same contents, or nothing when no slot is left. The tail chunk is copied
  // when either of the two first writes to it.
  std::optional<VTensorId> fork(VTensorId id);
  // Requires: not busy.
  void release(VTensorId id);

  // The fast path of a decode step: true, and the lengths declared, if every vTensor may already
  // be written up to its length. False: nothing changed.
  bool extend_in_place(std::span<const VTensorId> ids, std::span<const size_t> num_tokens);
  // Claims what these vTensors need to be written up to these lengths; nothing when memory is
  // short. Reclaims from parked slots and recorded prefixes if it must. Requires: none is busy.
  std::optional<Growth> plan_extend(std::span<const VTensorId> ids,
                                    std::span<const size_t> num_tokens);
  // The same ahead of need: maps rows only, takes memory from nobody but the free set, the budget
  // and evictable prefixes, leaves out who is released, busy or in no need. May be empty.
  Growth plan_pre_extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens);
  void commit(Growth& growth);
  void abandon(Growth& growth);

  // The most urgent piece of upkeep, or nothing: to be run without the mutex, one at a time.
  std::optional<Chore> plan_chore();
  std::optional<Chore::Kind> next_chore() const;
  // After the chore has run, or failed to.
  void finish_chore(const Chore& chore);

  // Lowers the declared length. Rows that others see are given up, so that they are not rewritten.
  // Throws std::invalid_argument when such rows may be seen by living views. Requires: not busy.
  void truncate(VTensorId id, size_t num_tokens);
  // Records tokens [0, tokens.size()) of the vTensor. Returns how many were new.
  size_t record_prefix(VTensorId id, std::span<const Token> tokens);

  // Remaps full rows of `tokens` that the rTree holds in other chunks onto those. Returns the
  // number of chunks given up: 0, with nothing changed, between begin() and end() of a step and
  // when the driver fails. Waits for steps in flight. Throws BrokenMapping when the driver fails
  // and fails again; the vTensor is lost then.
  size_t dedup(VTensorId id, std::span<const Token> tokens);

  // Moves the contents of a vTensor to the store and gives its chunks up; it keeps its slot.
  // False: the store is too full, nothing changed. Throws std::invalid_argument while views of it
  // are alive. Requires: not busy.
  bool swap_out(VTensorId id, SwapStore& store);
  // Brings them back to the same addresses; whole rows of `tokens` (may be empty) that are
  // recorded are aliased. False: memory is short, nothing changed. IntegrityError: the contents are
  // damaged; it stays swapped out.
  bool swap_in(VTensorId id, std::span<const Token> tokens, SwapStore& store);
  // Saves every chunk and gives all memory back, but for that of broken slots and what the driver
  // refuses to release; page tables and the rTree stay. Returns bytes. Throws, awake, when saving
  // or unmapping fails. Requires: no vTensor is busy, no views. Until wake() nothing else may be
  // called.
  size_t sleep(SwapStore& store);
  // Throws, still asleep, when memory is short or the driver fails; may be repeated.
  void wake(SwapStore& store);
  bool is_asleep() const { return is_asleep_; }
  // Chunks with memory behind them, asleep or awake.
  size_t num_resident_chunks() const;
  // Forgets everything that sleeps, vTensors and prefixes. The pool is awake then, and empty but
  // for broken slots. May be repeated when the driver fails.
  void discard_sleep(SwapStore& store);
  void forget_swapped(VTensor& vtensor, SwapStore& store);

  // Makes `num_chunks` chunks claimable (`created`: even without creating any). False: short.
  bool make_claimable(size_t num_chunks, bool created = false);
  // Frees idle chunks beyond `max_idle`, the least recently used first, as long as fewer than
  // `num_chunks` are free: memory grows with what is in use, not with what was.
  void recycle(size_t num_chunks, size_t max_idle);
  size_t max_idle() const;
  // Chunks that no vTensor uses: of recorded prefixes, and of parked slots.
  size_t num_idle() const;
  // Chunks that make_claimable() could reach.
  size_t num_obtainable() const;
  size_t evict(size_t num_chunks);
  // Gives free chunks (and those of parked slots) back to the system. Returns bytes.
  size_t trim();
  // False: more than that is in use, nothing changed.
  bool set_budget_chunks(size_t budget_chunks);

  // Throws ReleasedError for a vTensor of the past, std::out_of_range for an id never given out.
  VTensor& live(VTensorId id);
  const VTensor& live(VTensorId id) const { return const_cast<Scheduler*>(this)->live(id); }
  // As live(), and std::invalid_argument for one that is swapped out.
  VTensor& resident(VTensorId id);
  const VTensor& live_in(SlotId slot) const { return vtensors_[slot]; }  // Requires: slot is live.
  bool is_live(VTensorId id) const;
  std::vector<VTensorId> live_ids() const;
  // Called when the last view of a held slot is gone.
  void unhold(SlotId slot);

  // Steps whose kernels may be running. What they may read is kept as it is until they are over.
  Epochs& epochs() { return epochs_; }
  // Settles released slots whose steps are over.
  void reap();
  // Waits for every step, one without end() as well, and settles all released slots.
  void finish_steps();

  Pool& pool() { return pool_; }
  const Pool& pool() const { return pool_; }
  const SchedulerCounters& counters() const { return counters_; }
  // Chunks of growths that are planned but neither committed nor abandoned.
  const std::unordered_set<ChunkId>& claimed() const { return claimed_; }

 private:
  struct Fit {  // how well a parked slot suits a new vTensor
    SlotId slot = 0;
    size_t common_rows = 0;  // rows that show the wanted chunks already
    size_t keep_rows = 0;    // rows that stay mapped
    size_t useful_rows = 0;
    size_t dropped_rows = 0;
  };

  VTensorId id_of(SlotId slot) const;
  VTensor& open(SlotId slot, const std::string& salt, size_t num_tokens, size_t aliased_rows);
  std::optional<SlotId> place(std::span<const ChunkId> table, size_t wanted_rows, uint64_t tenant);
  Fit fit(SlotId slot, std::span<const ChunkId> table, size_t wanted_rows) const;
  std::optional<Fit> best_parked(std::span<const ChunkId> table, size_t wanted_rows) const;
  void adopt(const Fit& fit, std::span<const ChunkId> table, uint64_t tenant);
  void scrub_rows(SlotId slot, size_t first_row, size_t end_row, uint64_t tenant);
  std::optional<VTensorId> create_copy(const RTree::Match& match, const std::string& salt);
  void own_rows(VTensor& vtensor, size_t first_row, size_t end_row);
  bool is_private(ChunkId id) const;
  std::vector<Handle> handles(SlotId slot, size_t first_row, size_t end_row) const;
  void shrink_slot(SlotId slot, size_t keep_rows);
  void break_slot(SlotId slot, std::span<const ChunkId> chunks);
  void retire_slot(SlotId slot);
  void settle_slot(SlotId slot);
  void stamp(const VTensor& vtensor, size_t first_row = 0);

  void replace_rows(VTensor& vtensor, size_t begin, size_t end, std::span<const ChunkId> table);
  void fill_swapped(VTensor& vtensor, std::span<const ChunkId> aliased, std::vector<Claim>& claims,
                    const SwapStore& store);
  bool bring_back(VTensor& vtensor, std::span<const Token> tokens, SwapStore& store, bool created);
  size_t bytes_to_save(ChunkId id) const;
  std::unordered_set<ChunkId> broken_chunks() const;
  size_t release_asleep();
  void unmap_all_slots();
  void unmap_slot(SlotId slot);
  void map_slot(SlotId slot);
  void fall_asleep_again();
  void end_sleep(SwapStore& store);

  bool take_tail(VTensor& vtensor);
  void update_write_limit(VTensor& vtensor) const;
  GrowthPart outline(const VTensor& vtensor, size_t num_tokens) const;
  std::vector<GrowthPart> outline_all(std::span<const VTensorId> ids,
                                      std::span<const size_t> num_tokens);
  std::optional<Growth> claim_for(std::vector<GrowthPart> parts);
  void commit_tail(VTensor& vtensor, const GrowthPart& part);

  size_t private_tail_rows(SlotId slot) const;
  size_t surplus_rows(const VTensor& vtensor) const;
  void reclaim_surplus(size_t num_chunks, bool created);
  void reclaim_parked_private(size_t num_chunks, bool created);
  void release_free_chunk();
  void free_parked(SlotId slot);
  bool enough(size_t num_chunks, bool created) const;
  void unclaim(std::vector<Claim>& claims, uint64_t tenant);

  Pool& pool_;
  SchedulerOptions options_;
  SchedulerCounters counters_;
  std::vector<VTensor> vtensors_;  // by slot; of the past where the slot is not live
  std::unordered_set<ChunkId> claimed_;
  Epochs epochs_;
  std::deque<std::pair<uint64_t, SlotId>> retiring_;  // with the last epoch that may read it
  uint64_t plan_ = 0;
  bool is_asleep_ = false;
  std::unordered_map<ChunkId, SwapStore::Ticket> asleep_;  // chunks whose contents are in the store
  SlotId num_awake_slots_ = 0;  // while asleep: slots below it are mapped, left by a failed wake()
};

}  // namespace vtensor
