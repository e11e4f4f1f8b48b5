#include "vtensor/core/core.h"

#include <string>

namespace vtensor {

void Core::discard(SwapStore& swap_store, SwapStore* sleep_store) {
  Pool& pool = state.pool;
  while (!pool.rtree.pins().empty()) {
    const std::string owner = pool.rtree.pins().begin()->first;
    pool.rtree.unpin(owner);
  }
  for (const VTensorId id : vtensors.live_ids()) swapper.forget(vtensors.live(id), swap_store);
  retirement.finish_steps();
  if (sleeper.is_asleep()) sleeper.discard(*sleep_store);
  for (const VTensorId id : vtensors.live_ids()) retirement.release(id);
  pool.rtree.clear();
  reclaimer.trim();
}

}  // namespace vtensor
