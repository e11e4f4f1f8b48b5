// Retirement: from a vTensor's release to a parked or a free slot.
//
//   live --release()--> held (views of it live) --unhold()--> retiring (a step may read it)
//                                                  --reap()--> parked, or free when nothing is kept
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstdint>
#include <deque>
#include <utility>

#include "vtensor/core/vtensor_table.h"

namespace vtensor {

class Retirement {
 public:
  Retirement(CoreState& state, VTensorTable& vtensors) : state_(state), vtensors_(vtensors) {}

  // Requires: not busy.
  void release(VTensorId id);
  // Called when the last view of a slot is gone.
  void unhold(SlotId slot);
  // Parks or frees the slots whose steps are over.
  void reap();
  // The same for all slots: waits for their steps. Nothing while a step is open.
  void reap_all();
  // With the last epoch that may read each, oldest first.
  using Retiring = std::deque<std::pair<uint64_t, SlotId>>;
  const Retiring& retiring() const { return retiring_; }
  // Waits for every step, one without end() as well, and reaps.
  void finish_steps();

 private:
  void retire(SlotId slot);
  void park_or_free(SlotId slot);

  CoreState& state_;
  VTensorTable& vtensors_;
  Retiring retiring_;
};

}  // namespace vtensor
