// Manager: swapping one vTensor out and in, and putting the whole manager to sleep.
#include <limits>
#include <stdexcept>
#include <utility>

#include "vtensor/driver/stopwatch.h"
#include "vtensor/manager.h"

namespace vtensor {

bool Manager::try_swap_out(VTensorId id) {
  Lock held = lock();
  wait_until_idle(held, {&id, 1});
  TraceOp op(*trace_, scheduler_, "swap_out", id);
  const bool swapped = scheduler_.swap_out(id, swap_store_);
  op.put("result", swapped);
  return swapped;
}

bool Manager::try_swap_in(VTensorId id, std::span<const Token> tokens) {
  Lock held = lock();
  const Stopwatch watch(exposed_ns_);
  wait_until_idle(held, {&id, 1});
  expire_pins();
  TraceOp op(*trace_, scheduler_, "swap_in", id);
  op.tokens(tokens);
  bool swapped = scheduler_.swap_in(id, tokens, swap_store_);
  if (!swapped && !scheduler_.claimed().empty()) {
    wait_until_quiet(held);  // the worker held what was missing, for a moment
    swapped = scheduler_.swap_in(id, tokens, swap_store_);
  }
  op.put("result", swapped);
  return swapped;
}

size_t Manager::sleep(const std::string& directory) {
  Lock held = lock();
  wait_until_quiet(held);
  size_t num_views = 0;
  for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot)
    num_views += pool_.vset[slot].num_views;
  if (num_views > 0) {
    throw std::invalid_argument("cannot sleep while " + std::to_string(num_views) +
                                " tensor views of vTensors are alive");
  }
  sleep_store_ = std::make_unique<SwapStore>(std::numeric_limits<size_t>::max(),
                                             pool_.geometry.chunk_bytes, directory);
  try {
    TraceOp op(*trace_, scheduler_, "sleep");
    const size_t num_bytes = scheduler_.sleep(*sleep_store_);
    op.put("result", num_bytes);
    return num_bytes;
  } catch (...) {
    sleep_store_.reset();
    throw;
  }
}

void Manager::wake() {
  const Lock held = lock_awake_or_not();
  if (!scheduler_.is_asleep()) return;
  {
    const TraceOp op(*trace_, scheduler_, "wake");
    scheduler_.wake(*sleep_store_);
  }
  sleep_store_.reset();
  for (const VTensorId id : std::exchange(released_asleep_, {})) {
    if (scheduler_.is_live(id)) release_now(id);  // else wake() has broken its slot
  }
}

bool Manager::is_asleep() const {
  const Lock held(mutex_);
  return scheduler_.is_asleep();
}

}  // namespace vtensor
