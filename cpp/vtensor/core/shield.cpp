#include "vtensor/core/shield.h"

#include <algorithm>

#include "vtensor/util/error.h"

namespace vtensor {

void Shield::before_view(VTensor& vtensor) {
  if (vtensor.frozen_tokens == 0 || !pool_.driver->remaps_in_place()) return;
  const Geometry& geometry = pool_.geometry;
  const size_t row = geometry.full_rows(vtensor.frozen_tokens);
  if (appends_to_shared(vtensor, row)) {
    give_up_row(vtensor, row);
    if (vtensor.num_tokens > vtensor.frozen_tokens && !extender_.copy_shared_row(vtensor)) {
      extender_.take_back_row(vtensor);
      vtensors_.update_write_limit(vtensor);
      throw OutOfMemoryError(geometry.row_bytes(),
                             pool_.pset.num_claimable() * geometry.chunk_bytes,
                             pool_.pset.budget_chunks() * geometry.chunk_bytes,
                             "a view needs a copy of the row that holds recorded and later tokens");
    }
  }
  protect(vtensor);
}

size_t Shield::before_sharing(VTensor& vtensor, size_t num_tokens) {
  const Geometry& geometry = pool_.geometry;
  if (pool_.vset[vtensor.slot].num_views == 0 || num_tokens == 0) return num_tokens;
  if (!pool_.driver->remaps_in_place()) return num_tokens;
  const size_t full = geometry.full_rows(num_tokens);
  const bool ends_in_row = full < geometry.rows_for(num_tokens);
  const size_t shared =
      ends_in_row && num_tokens < vtensor.num_tokens ? geometry.tokens_in(full) : num_tokens;
  if (ends_in_row && shared == num_tokens && !vtensor.last_row_shared) {
    give_up_row(vtensor, full);
  }
  vtensor.frozen_tokens = std::max(vtensor.frozen_tokens, num_tokens);
  protect(vtensor);
  return shared;
}

void Shield::before_sending(VTensor& vtensor) {
  const size_t row = pool_.geometry.full_rows(vtensor.num_tokens);
  const bool ends_in_row = row < pool_.geometry.rows_for(vtensor.num_tokens);
  vtensor.frozen_tokens = vtensor.num_tokens;
  if (ends_in_row && !vtensor.last_row_shared) {
    give_up_row(vtensor, row);
  } else {
    vtensors_.freeze_rows(vtensor, row);
    vtensors_.update_write_limit(vtensor);
  }
}

bool Shield::appends_to_shared(const VTensor& vtensor, size_t row) const {
  const size_t row_chunks = pool_.geometry.row_chunks;
  if (row >= pool_.vset.mapped_rows(vtensor.slot)) return false;
  const auto chunks =
      std::span(pool_.vset[vtensor.slot].table).subspan(row * row_chunks, row_chunks);
  return std::ranges::any_of(chunks, [&](ChunkId id) {
    return id != kNoChunk && pool_.pset[id].appender == vtensor.id && pool_.pset[id].refs() > 1;
  });
}

void Shield::protect(VTensor& vtensor) {
  const size_t aliased = vtensor.first_owned_row + (vtensor.last_row_shared ? 1 : 0);
  vtensors_.guard(vtensor.slot, std::max(aliased, pool_.geometry.full_rows(vtensor.frozen_tokens)));
}

// The row becomes as one that the vTensor found recorded: to be copied before it writes there.
void Shield::give_up_row(VTensor& vtensor, size_t row) {
  vtensors_.freeze_rows(vtensor, row);
  vtensors_.leave_row(vtensor, row);
  vtensor.last_row_shared = true;
  vtensors_.update_write_limit(vtensor);
}

}  // namespace vtensor
