// Manager: what it hands to the worker: mapping ahead of need, and chores.
#include <algorithm>
#include <utility>
#include <vector>

#include "vtensor/driver/call_scope.h"
#include "vtensor/driver/work_clock.h"
#include "vtensor/manager.h"

namespace vtensor {

void Manager::pre_extend(std::vector<VTensorId> ids, std::vector<size_t> num_tokens) {
  if (!options_.pre_extend) return;
  if (ids.size() != num_tokens.size()) {
    throw std::invalid_argument(std::to_string(ids.size()) + " vTensors but " +
                                std::to_string(num_tokens.size()) + " lengths");
  }
  const Lock held = lock();
  // Only those in need become work, so that a step without growth wakes nobody.
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!scheduler_.is_live(ids[i])) continue;
    const size_t mapped = pool_.vset.mapped_rows(scheduler_.live(ids[i]).slot);
    const size_t wanted = std::min(num_tokens[i], pool_.geometry.max_tokens);
    if (pool_.geometry.rows_for(wanted) <= mapped) continue;
    TraceOp(*trace_, scheduler_, "pre_extend", ids[i]).put("n", wanted);
    worker_.post([this, id = ids[i], wanted] { pre_extend_one(id, wanted); });
  }
  if (!chores_posted_ && scheduler_.next_chore()) {
    chores_posted_ = true;
    worker_.post([this] { do_chores(); });
  }
}

void Manager::do_chores() {
  const CallScope scope(kNoVTensor, /*is_worker=*/true);
  Lock held(mutex_);
  chores_posted_ = false;
  while (!closed_ && !scheduler_.is_asleep()) {
    std::optional<Chore> chore;
    try {
      chore = scheduler_.plan_chore();
    } catch (const std::exception&) {
      return;  // as below
    }
    if (!chore) return;
    TraceOp(*trace_, scheduler_, "chore").put("chore", chore_name(chore->kind));
    held.unlock();
    const int64_t start_ns = work_now_ns();
    bool failed = false;
    try {
      chore->run(*pool_.driver, pool_.geometry.chunk_bytes);
    } catch (const std::exception&) {
      failed = true;  // whoever needs the chunk meets the error in its own thread
    }
    held.lock();
    hidden_ns_ += static_cast<uint64_t>(work_now_ns() - start_ns);
    scheduler_.finish_chore(*chore);
    settled_.notify_all();
    if (failed) return;
  }
}

void Manager::pre_extend_one(VTensorId id, size_t num_tokens) {
  const CallScope scope(id, /*is_worker=*/true);
  Lock held(mutex_);
  if (closed_ || scheduler_.is_asleep()) return;
  Growth growth;
  try {
    {
      TraceOp op(*trace_, scheduler_, "map_ahead", id);
      op.put("n", num_tokens);
      growth = scheduler_.plan_pre_extend({&id, 1}, {&num_tokens, 1});
      op.put("result", growth.num_claims());
    }
    if (growth.parts.empty()) return;
    held.unlock();
    const int64_t start_ns = work_now_ns();
    growth.run(*pool_.driver, pool_.vset, pool_.geometry);
    const auto spent_ns = static_cast<uint64_t>(work_now_ns() - start_ns);
    held.lock();
    hidden_ns_ += spent_ns;
    pre_extended_rows_ += growth.num_claims() / pool_.geometry.num_planes;
    scheduler_.commit(growth);
  } catch (const std::exception& failure) {
    // The step that needs these rows maps them itself, or meets the same error in its own thread.
    if (!held.owns_lock()) held.lock();
    scheduler_.abandon(growth);
    last_shortage_ = failure.what();
    ++pre_extend_failures_;
    TraceOp(*trace_, scheduler_, "map_ahead_failed", id).put("why", last_shortage_);
  }
  settled_.notify_all();
}

void Manager::drain() { worker_.drain(); }

}  // namespace vtensor
