// Swapper: moves the contents of one vTensor to a store and back to the same addresses.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "vtensor/core/extender.h"
#include "vtensor/store/swap_store.h"

namespace vtensor {

class Swapper {
 public:
  Swapper(CoreState& state, VTensorTable& vtensors, Reclaimer& reclaimer, Extender& extender)
      : state_(state),
        pool_(state.pool),
        vtensors_(vtensors),
        reclaimer_(reclaimer),
        extender_(extender) {}

  // Moves the contents of a vTensor to the store and gives its chunks up; it keeps its slot, and
  // its first rows as far as others hold them: writing these would free nothing.
  // False: the store is too full, nothing changed. Throws std::invalid_argument while views of it
  // are alive. Requires: not busy.
  bool swap_out(VTensorId id, SwapStore& store);
  // When memory is short: saves rows that swapped-out vTensors other than `spared` kept and no
  // other vTensor has any more, each chunk once, the last rows first, and gives them up. Returns
  // the number of chunks, `num_chunks` rounded up to rows or less.
  size_t spill(size_t num_chunks, SwapStore& store, VTensorId spared = kNoVTensor);
  // Chunks that spill() could give up. O(kept).
  size_t num_spillable(const SwapStore& store) const;
  // Brings them back to the same addresses; whole rows of `tokens` (may be empty) that are
  // recorded are aliased. False: memory is short, nothing changed. IntegrityError: the contents are
  // damaged; it stays swapped out.
  bool swap_in(VTensorId id, std::span<const Token> tokens, SwapStore& store);
  // Drops what the store holds of it.
  void forget(VTensor& vtensor, SwapStore& store);

 private:
  size_t num_shared_rows(const VTensor& vtensor) const;
  size_t bytes_from(const VTensor& vtensor, size_t first_row) const;
  bool spill_row(size_t row, std::span<VTensor* const> holders, SwapStore& store);
  std::vector<ChunkId> match_beyond_kept(const VTensor& vtensor, std::span<const Token> tokens);
  bool bring_back(VTensor& vtensor, std::span<const Token> tokens, SwapStore& store, bool created);
  std::span<const ChunkId> row_of(const VTensor& holder, size_t row) const;
  void fill(VTensor& vtensor, std::span<const ChunkId> shared, std::span<const size_t> missing,
            std::vector<Claim>& claims, const SwapStore& store);

  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
  Reclaimer& reclaimer_;
  Extender& extender_;
};

}  // namespace vtensor
