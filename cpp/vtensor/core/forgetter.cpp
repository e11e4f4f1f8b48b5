#include "vtensor/core/forgetter.h"

#include <algorithm>
#include <exception>

#include "vtensor/ops/mapping.h"

namespace vtensor {

void GiveBack::run(Driver& driver, const VSet& vset, const Geometry& geometry) const {
  unmap(driver, {vset, geometry, slot, first_row}, handles);
}

bool Forgetter::note(VTensor& vtensor, size_t num_tokens) {
  vtensor.past_tokens = std::max(vtensor.past_tokens, std::min(num_tokens, vtensor.num_tokens));
  if (vtensor.forgotten_tokens == 0) {  // else what is due first is waited for
    vtensor.forgotten_tokens = vtensor.past_tokens;
    vtensor.forgotten_epoch = state_.epochs.last_used();
  }
  if (vtensor.forget_posted || vtensor.forgotten_epoch > state_.epochs.completed()) return false;
  vtensor.forget_posted = true;
  return true;
}

std::optional<GiveBack> Forgetter::plan(VTensorId id) {
  if (!vtensors_.is_live(id)) return std::nullopt;
  VTensor& vtensor = vtensors_.live(id);
  vtensor.forget_posted = false;
  if (vtensor.busy || vtensor.is_swapped || pool_.vset[vtensor.slot].num_views > 0 ||
      vtensor.forgotten_epoch > state_.epochs.completed()) {
    return std::nullopt;
  }
  if (state_.epochs.last_used() <= state_.epochs.completed()) {
    vtensor.forgotten_tokens = vtensor.past_tokens;  // no step is under way
  }
  const Geometry& geometry = pool_.geometry;
  const std::vector<ChunkId>& table = pool_.vset[vtensor.slot].table;
  size_t first_row = SIZE_MAX;
  size_t end_row = 0;
  for (const Window& window : geometry.windows) {
    first_row = std::min(first_row, vtensors_.rows_forgotten(vtensor.slot, window));
    end_row = std::max(end_row, geometry.first_row_kept(window, vtensor.forgotten_tokens));
  }
  end_row = std::min(end_row, pool_.vset.mapped_rows(vtensor.slot));
  const size_t forgotten_tokens = vtensor.forgotten_tokens;
  vtensor.forgotten_tokens = 0;
  if (first_row >= end_row) return std::nullopt;
  GiveBack rows{id, vtensor.slot, first_row, {}};
  rows.handles.assign((end_row - first_row) * geometry.row_chunks, kNoHandle);
  for (const Window& window : geometry.windows) {
    const size_t end = std::min(end_row, geometry.first_row_kept(window, forgotten_tokens));
    for (size_t row = vtensors_.rows_forgotten(vtensor.slot, window); row < end; ++row) {
      for (size_t column = window.first_column; column < window.end_column; ++column) {
        rows.handles[(row - first_row) * geometry.row_chunks + column] =
            pool_.pset.handle(table[row * geometry.row_chunks + column]);
      }
    }
  }
  vtensor.busy = true;
  return rows;
}

void Forgetter::commit(const GiveBack& rows) {
  VTensor& vtensor = vtensors_.live(rows.vtensor);
  std::vector<ChunkId>& table = pool_.vset[rows.slot].table;
  const size_t first = rows.first_row * pool_.geometry.row_chunks;
  for (size_t i = 0; i < rows.handles.size(); ++i) {
    if (rows.handles[i] == kNoHandle) continue;
    vtensors_.leave_entry(vtensor, first + i);
    pool_.pset.drop_table_ref(table[first + i]);
    table[first + i] = kNoChunk;
    ++state_.counters.chunks_given_back;
  }
  vtensor.busy = false;
  vtensors_.update_forget_at(vtensor);
}

void Forgetter::abandon(const GiveBack& rows, bool broken) {
  vtensors_.live(rows.vtensor).busy = false;
  if (broken) vtensors_.break_slot(rows.slot, {});
}

void Forgetter::give_back(VTensorId id) {
  const std::optional<GiveBack> rows = plan(id);
  if (!rows) return;
  try {
    rows->run(*pool_.driver, pool_.vset, pool_.geometry);
  } catch (const BrokenMapping&) {
    return abandon(*rows, /*broken=*/true);
  } catch (const std::exception&) {
    return abandon(*rows, /*broken=*/false);  // it is due again with the next tokens
  }
  commit(*rows);
}

void Forgetter::give_back_all() {
  if (pool_.geometry.windows.empty()) return;
  for (const VTensorId id : vtensors_.live_ids()) {
    if (vtensors_.live(id).forgotten_tokens > 0) give_back(id);
  }
}

}  // namespace vtensor
