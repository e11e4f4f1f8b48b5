// Manager: what goes to a store and comes back: swapped-out vTensors, and the whole pool asleep.
#include <algorithm>
#include <limits>

#include "vtensor/driver/stopwatch.h"
#include "vtensor/manager.h"

namespace vtensor {

bool Manager::spill(size_t num_chunks, VTensorId spared) {
  // A step that is open may still write what would be saved.
  if (core_.state.epochs.is_open()) return false;
  return core_.swapper.spill(std::max(num_chunks, pool_.geometry.row_chunks), swap_store_, spared) >
         0;
}

bool Manager::try_swap_out(VTensorId id) {
  Lock held = lock();
  wait_until_idle(held, {&id, 1});
  TraceOp op(*trace_, core_.state, "swap_out", id);
  const bool swapped = core_.swapper.swap_out(id, swap_store_);
  op.put("result", swapped);
  return swapped;
}

bool Manager::try_swap_in(VTensorId id, std::span<const Token> tokens) {
  Lock held = lock();
  const Stopwatch watch(exposed_ns_);
  wait_until_idle(held, {&id, 1});
  expire_pins();
  TraceOp op(*trace_, core_.state, "swap_in", id);
  op.tokens(tokens);
  bool swapped = core_.swapper.swap_in(id, tokens, swap_store_);
  if (!swapped && background_.holds_chunks()) {
    wait_until_quiet(held);  // the worker held what was missing, for a moment
    swapped = core_.swapper.swap_in(id, tokens, swap_store_);
  }
  if (!swapped && spill(core_.vtensors.live(id).swapped.size(), id)) {
    swapped = core_.swapper.swap_in(id, tokens, swap_store_);
  }
  op.put("result", swapped);
  return swapped;
}

size_t Manager::sleep(const std::string& directory) {
  Lock held = lock();
  wait_until_quiet(held);
  sleep_store_ = std::make_unique<SwapStore>(std::numeric_limits<size_t>::max(),
                                             pool_.geometry.chunk_bytes, directory);
  try {
    TraceOp op(*trace_, core_.state, "sleep");
    const size_t num_bytes = core_.sleeper.sleep(*sleep_store_);
    op.put("result", num_bytes);
    return num_bytes;
  } catch (...) {
    if (!core_.sleeper.is_asleep()) sleep_store_.reset();
    throw;
  }
}

void Manager::wake() {
  const Lock held = lock_awake_or_not();
  if (!core_.sleeper.is_asleep()) return;
  std::vector<VTensorId> released;
  {
    const TraceOp op(*trace_, core_.state, "wake");
    released = core_.sleeper.wake(*sleep_store_);
  }
  sleep_store_.reset();
  for (const VTensorId id : released) release_now(id);
}

bool Manager::is_asleep() const {
  const Lock held = lock_in_any_state();
  return core_.sleeper.is_asleep();
}

}  // namespace vtensor
