#include "vtensor/core/retirement.h"

#include <exception>

namespace vtensor {

void Retirement::release(VTensorId id) {
  VTensor& vtensor = vtensors_.live(id);
  vtensors_.record_watermark(vtensor);
  const SlotId slot = vtensor.slot;
  if (state_.pool.vset[slot].num_views > 0) {
    state_.pool.vset.hold(slot);
  } else {
    retire(slot);
  }
}

void Retirement::unhold(SlotId slot) {
  if (state_.pool.vset[slot].state == SlotState::kHeld) retire(slot);
}

// The slot of a released vTensor is parked or freed once no running step can read it.
void Retirement::retire(SlotId slot) {
  state_.pool.vset.retire(slot);
  retiring_.emplace_back(state_.epochs.last_used(), slot);
  reap();
}

void Retirement::reap() {
  while (!retiring_.empty() && retiring_.front().first <= state_.epochs.completed()) {
    const SlotId slot = retiring_.front().second;
    retiring_.pop_front();
    park_or_free(slot);
  }
}

void Retirement::reap_all() {
  if (retiring_.empty() || state_.epochs.is_open()) return;
  state_.epochs.wait();
  reap();
}

void Retirement::finish_steps() {
  if (state_.epochs.is_open()) {
    state_.pool.driver->synchronize();
    state_.epochs.end(nullptr);
  }
  state_.epochs.wait();
  reap();
}

// Where the slot of a released vTensor goes. A driver that fails leaves it parked, which loses
// nothing: the rows are unmapped when they are needed.
void Retirement::park_or_free(SlotId slot) {
  vtensors_.park(slot);
  try {
    if (state_.options.park && state_.pool.vset.mapped_rows(slot) > 0) {
      return vtensors_.unguard(slot);  // else nobody could adopt its rows
    }
    vtensors_.shrink(slot, 0);
    v_free(state_.pool, slot);
  } catch (const std::exception&) {
    return;
  }
}

}  // namespace vtensor
