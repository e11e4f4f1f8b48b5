// Reclaimer: where memory comes from when it is short, and how it goes back to the system.
//
// The order in which chunks are found: free chunks; new chunks under the budget; what windows have
// left behind; private chunks of parked slots, the longest parked first; rows mapped ahead of need;
// unpinned recorded prefixes by last use, whether parked slots map them or nothing does. New chunks
// come before eviction, or a cache could never grow: docs/design.md.
//
// Costs are flat in what is recorded and parked, but for one look at each parked slot where a
// prefix that it maps is evicted.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <span>

#include "vtensor/core/forgetter.h"
#include "vtensor/core/retirement.h"

namespace vtensor {

class Reclaimer {
 public:
  Reclaimer(CoreState& state, VTensorTable& vtensors, Retirement& retirement, Forgetter& forgetter)
      : state_(state),
        pool_(state.pool),
        vtensors_(vtensors),
        retirement_(retirement),
        forgetter_(forgetter) {}

  // Makes `num_chunks` chunks claimable (`created`: even without creating any). False: short.
  bool make_claimable(size_t num_chunks, bool created = false);
  // Frees idle chunks beyond `max_idle`, the least recently used first, as long as fewer than
  // `num_chunks` are free: memory grows with what is in use, not with what was.
  void recycle(size_t num_chunks, size_t max_idle);
  // What the options let idle chunks be.
  size_t max_idle() const;
  // Chunks that no vTensor uses: of recorded prefixes, and of parked slots.
  size_t num_idle() const;
  // Chunks that make_claimable() could reach.
  size_t num_available() const;
  // Frees idle chunks, as above but for the surplus. Returns how many became free.
  size_t evict(size_t num_chunks);
  // Gives free chunks back to the system while more than `num_chunks` are created.
  void release_created_beyond(size_t num_chunks);
  // Gives free chunks back whose memory stands apart; what the driver refuses waits.
  void release_apart();
  // Gives free chunks (and those of parked slots) back to the system. Returns bytes.
  size_t trim();
  // False: more than that is in use, nothing changed.
  bool set_budget_chunks(size_t budget_chunks);

 private:
  size_t num_obtained(bool created) const;
  size_t private_end_rows(SlotId slot) const;
  size_t surplus_rows(const VTensor& vtensor) const;
  void reclaim_surplus(size_t num_chunks, bool created);
  void reclaim_parked_private(size_t num_chunks, bool created);
  void release_free_chunk();
  void release_chunk(ChunkId id);
  void shrink_parked(SlotId slot, size_t keep_rows);
  void unmap_parked(size_t first_row, size_t last_row, std::span<const ChunkId> chunks);
  void evict_recorded(size_t num_chunks, bool any = false);

  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
  Retirement& retirement_;
  Forgetter& forgetter_;
};

}  // namespace vtensor
