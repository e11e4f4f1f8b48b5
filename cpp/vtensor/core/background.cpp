#include "vtensor/core/background.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "vtensor/driver/call_scope.h"
#include "vtensor/driver/work_clock.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {

void Background::wait_until_idle(Lock& lock, std::span<const VTensorId> ids) {
  progress_.wait(lock, [&] {
    return std::ranges::none_of(ids, [&](VTensorId id) {
      return core_.vtensors.is_live(id) && core_.vtensors.live(id).busy;
    });
  });
}

void Background::wait_until_quiet(Lock& lock) {
  ++num_waiting_;
  progress_.wait(lock, [this] { return !holds_chunks(); });
  --num_waiting_;
  progress_.notify_all();
}

void Background::run_without(Lock& lock, const std::function<void()>& work) {
  lock.unlock();
  const ScopeFail end([&] {
    lock.lock();
    progress_.notify_all();  // they go on when it is committed or abandoned, and the mutex free
  });
  work();
}

void Background::post(const Lock&, std::span<const VTensorId> ids,
                      std::span<const size_t> num_tokens) {
  const Pool& pool = core_.state.pool;
  // Only those in need become work, so that a step without growth wakes nobody.
  for (size_t i = 0; i < ids.size(); ++i) {
    if (!core_.vtensors.is_live(ids[i])) continue;
    const size_t mapped = pool.vset.mapped_rows(core_.vtensors.live(ids[i]).slot);
    const size_t wanted = std::min(num_tokens[i], pool.geometry.max_tokens);
    if (pool.geometry.rows_for(wanted) <= mapped) continue;
    TraceOp(trace_, core_.state, "pre_extend", ids[i]).put("n", wanted);
    worker_.post([this, id = ids[i], wanted] { map_ahead(id, wanted); });
  }
  if (!upkeep_posted_ && core_.upkeep.next()) post_upkeep();
}

void Background::post_forget(const Lock&, std::span<const VTensorId> ids,
                             std::span<const size_t> num_tokens) {
  std::vector<VTensorId> due;
  for (size_t i = 0; i < ids.size(); ++i) {
    VTensor* const vtensor = core_.vtensors.find(ids[i]);
    if (vtensor == nullptr) continue;
    if (num_tokens[i] < vtensor->forget_at && vtensor->forgotten_tokens == 0) continue;
    if (core_.forgetter.note(*vtensor, num_tokens[i])) due.push_back(ids[i]);
  }
  if (due.empty()) return;
  worker_.post([this, due = std::move(due)] { give_back(due); });
}

void Background::give_back(const std::vector<VTensorId>& ids) {
  for (const VTensorId id : ids) {
    const CallScope scope(id, /*is_worker=*/true);
    Lock lock(mutex_);
    progress_.wait(lock, [this] { return num_waiting_ == 0; });
    if (core_.sleeper.is_asleep()) return;
    const Pool& pool = core_.state.pool;
    const std::optional<GiveBack> rows = core_.forgetter.plan(id);
    if (!rows) continue;
    gives_back_ = true;
    lock.unlock();
    const int64_t start_ns = work_now_ns();
    bool failed = false;
    bool broken = false;
    try {
      rows->run(*pool.driver, pool.vset, pool.geometry);
    } catch (const BrokenMapping&) {
      failed = broken = true;
    } catch (const std::exception&) {
      failed = true;  // it is due again with the next tokens
    }
    const auto spent_ns = static_cast<uint64_t>(work_now_ns() - start_ns);
    lock.lock();
    hidden_ns_ += spent_ns;
    num_failures_ += failed ? 1 : 0;
    if (failed) {
      core_.forgetter.abandon(*rows, broken);
    } else {
      const TraceOp op(trace_, core_.state, "give_back", id);
      core_.forgetter.commit(*rows);
    }
    gives_back_ = false;
    progress_.notify_all();
  }
}

// One piece of upkeep a job: the worker can be stopped, and can map ahead, between two.
void Background::post_upkeep() {
  upkeep_posted_ = true;
  worker_.post([this] {
    const CallScope scope(kNoVTensor, /*is_worker=*/true);
    Lock lock(mutex_);
    progress_.wait(lock, [this] { return num_waiting_ == 0; });
    upkeep_posted_ = false;
    if (!core_.sleeper.is_asleep() && run_upkeep(lock)) post_upkeep();
    progress_.notify_all();
  });
}

// Returns whether to go on.
bool Background::run_upkeep(Lock& lock) {
  std::optional<UpkeepTask> task;
  try {
    task = core_.upkeep.plan();
  } catch (const std::exception&) {
    return false;  // as below
  }
  if (!task) return false;
  TraceOp(trace_, core_.state, "upkeep").put("task", to_string(task->kind));
  lock.unlock();
  const int64_t start_ns = work_now_ns();
  bool failed = false;
  try {
    task->run(*core_.state.pool.driver, core_.state.pool.geometry.chunk_bytes);
  } catch (const std::exception&) {
    failed = true;  // whoever needs the chunk meets the error in its own thread
  }
  lock.lock();
  hidden_ns_ += static_cast<uint64_t>(work_now_ns() - start_ns);
  core_.upkeep.finish(*task);
  return !failed;
}

void Background::map_ahead(VTensorId id, size_t num_tokens) {
  const CallScope scope(id, /*is_worker=*/true);
  Lock lock(mutex_);
  // A step that extends it takes no more than it needs itself: what comes ahead is wanted still.
  progress_.wait(lock, [&] {
    return num_waiting_ == 0 && !(core_.vtensors.is_live(id) && core_.vtensors.live(id).busy);
  });
  if (core_.sleeper.is_asleep()) return;
  const Pool& pool = core_.state.pool;
  Extension extension;
  try {
    {
      TraceOp op(trace_, core_.state, "map_ahead", id);
      op.put("n", num_tokens);
      extension = core_.extender.plan_pre_extend(id, num_tokens);
      op.put("result", extension.num_claims());
    }
    if (extension.parts.empty()) return;
    lock.unlock();
    const int64_t start_ns = work_now_ns();
    const bool ran =
        extension.run(*pool.driver, pool.vset, pool.geometry, [this] { return num_waiting_ > 0; });
    const auto spent_ns = static_cast<uint64_t>(work_now_ns() - start_ns);
    lock.lock();
    hidden_ns_ += spent_ns;
    if (ran) {
      num_rows_mapped_ += extension.num_claims() / pool.geometry.row_chunks;
      core_.extender.commit(extension);
    } else {
      core_.extender.abandon(extension);
      TraceOp(trace_, core_.state, "map_ahead_failed", id).put("why", "others wait for memory");
      worker_.post([this, id, num_tokens] { map_ahead(id, num_tokens); });
    }
  } catch (const std::exception& failure) {
    // The step that needs these rows maps them itself, or meets the same error in its own thread.
    if (!lock.owns_lock()) lock.lock();
    core_.extender.abandon(extension);
    ++num_failures_;
    TraceOp(trace_, core_.state, "map_ahead_failed", id).put("why", failure.what());
  }
  progress_.notify_all();
}

}  // namespace vtensor
