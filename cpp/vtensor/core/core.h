// Core: what the memory of vTensors does, built from the operations of ops/. Each class below says
// one noun, and knows only those above it.
//
// Expected shortage is a value; nothing has changed then. Other failures throw, rolled back.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include "vtensor/core/core_state.h"
#include "vtensor/core/extender.h"
#include "vtensor/core/forgetter.h"
#include "vtensor/core/handover.h"
#include "vtensor/core/placement.h"
#include "vtensor/core/reclaimer.h"
#include "vtensor/core/recorder.h"
#include "vtensor/core/retirement.h"
#include "vtensor/core/shield.h"
#include "vtensor/core/sleeper.h"
#include "vtensor/core/swapper.h"
#include "vtensor/core/upkeep.h"
#include "vtensor/core/vtensor_table.h"

namespace vtensor {

struct Core {
  Core(Pool& pool, const CoreOptions& options) : state{pool, options, {}, {}, {}} {}

  // Waits for running steps, releases and forgets everything, and gives all memory that no view
  // needs back. `sleep_store` may be nullptr while awake. May be repeated when the driver fails.
  void discard(SwapStore& swap_store, SwapStore* sleep_store);

  CoreState state;
  VTensorTable vtensors{state};
  Retirement retirement{state, vtensors};
  Forgetter forgetter{state, vtensors};
  Reclaimer reclaimer{state, vtensors, retirement, forgetter};
  Extender extender{state, vtensors, retirement, reclaimer};
  Shield shield{state, vtensors, extender};
  Placement placement{state, vtensors, retirement, forgetter, extender, shield};
  Handover handover{state, vtensors, reclaimer, extender, shield, placement};
  Recorder recorder{state, vtensors, shield};
  Swapper swapper{state, vtensors, reclaimer, extender};
  Sleeper sleeper{state, vtensors, retirement, reclaimer};
  Upkeep upkeep{state, reclaimer};
};

}  // namespace vtensor
