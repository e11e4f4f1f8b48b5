#include "vtensor/manager.h"

#include <cmath>
#include <stdexcept>
#include <utility>

#include "vtensor/driver/stopwatch.h"
#include "vtensor/driver/wrappers/tracing_driver.h"
#include "vtensor/util/error.h"
#include "vtensor/util/fork.h"

namespace vtensor {
namespace {

void check_same_size(size_t num_ids, size_t num_lengths) {
  if (num_ids != num_lengths) {
    throw std::invalid_argument(std::to_string(num_ids) + " vTensors but " +
                                std::to_string(num_lengths) + " lengths");
  }
}

}  // namespace

std::shared_ptr<Manager> Manager::open(std::unique_ptr<Driver> driver, const KVSpec& spec,
                                       const ManagerOptions& options) {
  const Geometry geometry =
      make_geometry(spec, options.chunk_bytes, driver->granularity(), options.max_requests);
  core_options(options, geometry.chunk_bytes);  // throws before anything is reserved
  auto trace = std::make_shared<TraceWriter>();
  auto traced = std::make_unique<TracingDriver>(
      std::move(driver), [trace](const DriverCall& call) { trace->write_call(call); },
      std::shared_ptr<const std::atomic<bool>>(trace, &trace->open_flag()));
  auto* manager = new Manager(std::make_unique<MeteredDriver>(std::move(traced)), trace, spec,
                              geometry, options);
  // A forked child has no worker to join, and what its copy would give back is its parent's.
  return {manager, [](Manager* owned) {
            if (!owned->is_inherited()) delete owned;
          }};
}

Manager::Manager(std::unique_ptr<MeteredDriver> driver, std::shared_ptr<TraceWriter> trace,
                 const KVSpec& spec, const Geometry& geometry, const ManagerOptions& options)
    : spec_(spec),
      options_(options),
      trace_(std::move(trace)),
      meter_(driver.get()),
      pool_(std::move(driver), geometry, budget_chunks(options.memory_budget, geometry)),
      core_(pool_, core_options(options, geometry.chunk_bytes)),
      swap_store_(options.swap_space_bytes, geometry.chunk_bytes, options.swap_directory),
      background_(core_, *trace_, mutex_) {}

Manager::~Manager() {
  background_.stop();
  try {
    core_.discard(swap_store_, sleep_store_.get());
  } catch (const std::exception&) {
    return;  // the driver's own destructor gives back what this cannot
  }
}

bool Manager::is_inherited() const noexcept { return generation_ != process_generation(); }

void Manager::check_process() const {
  if (is_inherited()) {
    throw Error("this manager belongs to the parent process: open one of your own after fork()");
  }
}

Manager::Lock Manager::lock_in_any_state() const {
  check_process();
  return Lock(mutex_);
}

Manager::Lock Manager::lock_awake_or_not() const {
  Lock lock = lock_in_any_state();
  if (closed_) throw ReleasedError("the manager is closed");
  return lock;
}

Manager::Lock Manager::lock() const {
  Lock lock = lock_in_any_state();
  check_usable();
  return lock;
}

void Manager::check_usable() const {
  if (closed_) throw ReleasedError("the manager is closed");
  if (core_.sleeper.is_asleep())
    throw std::invalid_argument("the manager is asleep; wake() it first");
}

void Manager::wait_until_idle(Lock& lock, std::span<const VTensorId> ids) {
  background_.wait_until_idle(lock, ids);
  check_usable();
}

void Manager::wait_until_quiet(Lock& lock) {
  background_.wait_until_quiet(lock);
  check_usable();
}

void Manager::expire_pins() {
  const size_t num_pins = pool_.rtree.pins().size();
  if (num_pins == 0) return;
  pool_.rtree.expire_pins(steady_now_ns());
  const size_t num_expired = num_pins - pool_.rtree.pins().size();
  if (num_expired > 0) TraceOp(*trace_, core_.state, "expire_pins").put("result", num_expired);
}

std::optional<VTensorId> Manager::try_create(std::span<const Token> tokens, const std::string& salt,
                                             size_t expected_tokens, bool to_export, bool wait) {
  const Lock held = lock();
  if (to_export) check_hands_over();
  const Stopwatch watch(exposed_ns_);
  TraceOp op(*trace_, core_.state, "create");
  op.tokens(tokens).put("salt", salt).put("expected", expected_tokens);
  expire_pins();
  std::optional<VTensorId> id = core_.placement.create(tokens, salt, expected_tokens, to_export);
  if (!id && wait) {
    core_.retirement.reap_all();
    id = core_.placement.create(tokens, salt, expected_tokens, to_export);
  }
  op.put("result", id.value_or(kNoVTensor));
  return id;
}

std::optional<VTensorId> Manager::try_fork(VTensorId id) {
  Lock held = lock();
  const Stopwatch watch(exposed_ns_);
  TraceOp op(*trace_, core_.state, "fork", id);
  wait_until_idle(held, {&id, 1});
  op.restart_counters();
  std::optional<VTensorId> child = core_.placement.fork(id);
  if (!child) {
    core_.retirement.reap_all();
    child = core_.placement.fork(id);
  }
  op.put("result", child.value_or(kNoVTensor));
  return child;
}

void Manager::release(VTensorId id) {
  Lock held = lock_awake_or_not();
  background_.wait_until_idle(held, {&id, 1});
  if (closed_) throw ReleasedError("the manager is closed");
  core_.sleeper.is_asleep() ? core_.sleeper.release_later(id) : release_now(id);
}

void Manager::release_now(VTensorId id) {
  const TraceOp op(*trace_, core_.state, "release", id);
  core_.swapper.forget(core_.vtensors.live(id), swap_store_);
  core_.retirement.release(id);
}

bool Manager::try_extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens) {
  Lock held = lock();
  TraceOp op(*trace_, core_.state, "extend");
  op.put("ids", ids).put("n", num_tokens);
  bool extended = core_.extender.extend_in_place(ids, num_tokens);
  if (!extended) {
    const Stopwatch watch(exposed_ns_);
    wait_until_idle(held, ids);
    op.restart_counters();
    expire_pins();
    extended = extend_by_chunks(held, ids, num_tokens);
    if (!extended && background_.holds_chunks()) {
      wait_until_quiet(held);  // somebody held what was missing, for a moment
      extended = extend_by_chunks(held, ids, num_tokens);
    }
    if (!extended && spill(core_.extender.num_missing(ids, num_tokens))) {
      extended = extend_by_chunks(held, ids, num_tokens);
    }
  }
  op.put("result", extended);
  return extended;
}

// The driver's work is done without the mutex: what it is about is claimed, or marked as busy.
bool Manager::extend_by_chunks(Lock& held, std::span<const VTensorId> ids,
                               std::span<const size_t> num_tokens) {
  return core_.extender.extend(ids, num_tokens, [&](Extension& extension) {
    if (extension.num_claims() == 0) return;
    background_.run_without(held,
                            [&] { extension.run(*pool_.driver, pool_.vset, pool_.geometry); });
  });
}

void Manager::extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens) {
  if (try_extend(ids, num_tokens)) return;
  const Lock held = lock();
  const std::string& why = core_.extender.last_shortage();
  throw OutOfMemoryError(bytes_of(core_.extender.num_missing(ids, num_tokens)),
                         bytes_of(core_.reclaimer.num_available()),
                         bytes_of(pool_.pset.budget_chunks()),
                         why.empty() ? "release or preempt a request, or raise the budget" : why);
}

void Manager::pre_extend(const std::vector<VTensorId>& ids, const std::vector<size_t>& num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  const Lock held = lock();
  if (options_.pre_extend) background_.post(held, ids, num_tokens);
}

void Manager::set_busy(bool busy) {
  const Lock held = lock_awake_or_not();
  core_.upkeep.set_busy(busy);
  if (options_.pre_extend && !busy) background_.post(held, {}, {});
}

void Manager::forget(const std::vector<VTensorId>& ids, const std::vector<size_t>& num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  if (pool_.geometry.windows.empty()) return;
  const Lock held = lock();
  TraceOp(*trace_, core_.state, "forget")
      .put("ids", std::span(ids))
      .put("n", std::span(num_tokens));
  background_.post_forget(held, ids, num_tokens);
}

void Manager::drain() {
  check_process();
  background_.drain();
}

void Manager::truncate(VTensorId id, size_t num_tokens) {
  Lock held = lock();
  wait_until_idle(held, {&id, 1});
  TraceOp op(*trace_, core_.state, "truncate", id);
  op.put("n", num_tokens);
  core_.extender.truncate(id, num_tokens);
}

void Manager::begin_step() {
  const Lock held = lock();
  const TraceOp op(*trace_, core_.state, "begin_step");
  core_.state.epochs.begin();
}

void Manager::end_step(uintptr_t stream) {
  const Lock held = lock();
  const TraceOp op(*trace_, core_.state, "end_step");
  core_.state.epochs.end(pool_.driver->fence(stream));
  core_.retirement.reap();
}

size_t Manager::record_prefix(VTensorId id, std::span<const Token> tokens) {
  Lock held = lock();
  wait_until_idle(held, {&id, 1});  // dedup changes its page table: the worker must not be at it
  TraceOp op(*trace_, core_.state, "record_prefix", id);
  op.tokens(tokens);
  if (options_.dedup) core_.recorder.dedup(id, tokens);
  const size_t num_new = core_.recorder.record_prefix(id, tokens);
  op.put("result", num_new);
  return num_new;
}

size_t Manager::match_prefix(std::span<const Token> tokens, const std::string& salt) {
  const Lock held = lock();
  TraceOp op(*trace_, core_.state, "match_prefix");
  const RTree::Match match = pool_.rtree.usable(pool_.rtree.match(salt, tokens));
  op.tokens(tokens).put("salt", salt).put("result", match.num_tokens);
  op.put("recorded", match.num_recorded).put("cut_by_window", match.cut_by_window);
  return match.num_tokens;
}

size_t Manager::pin_prefix(std::span<const Token> tokens, const std::string& owner,
                           double ttl_seconds, const std::string& salt) {
  const Lock held = lock();
  if (std::isnan(ttl_seconds)) throw std::invalid_argument("the time to live is not a number");
  constexpr double kCenturySeconds = 100 * 365.25 * 24 * 3600;  // and all beyond: for good
  const bool expires = ttl_seconds > 0 && ttl_seconds < kCenturySeconds;
  const int64_t expires_ns =
      expires ? steady_now_ns() + static_cast<int64_t>(ttl_seconds * 1e9) : 0;
  TraceOp op(*trace_, core_.state, "pin_prefix");
  op.tokens(tokens).put("salt", salt).put("owner", owner).put("ttl_s", ttl_seconds);
  const size_t pinned = pool_.rtree.pin(salt, tokens, owner, expires_ns);
  op.put("result", pinned);
  return pinned;
}

size_t Manager::unpin_prefix(const std::string& owner) {
  const Lock held = lock();
  TraceOp op(*trace_, core_.state, "unpin_prefix");
  const size_t num_pins = pool_.rtree.unpin(owner);
  op.put("owner", owner).put("result", num_pins);
  return num_pins;
}

size_t Manager::reset_prefix_cache() {
  const Lock held = lock();
  expire_pins();
  TraceOp op(*trace_, core_.state, "reset_prefix_cache");
  const size_t num_tokens = pool_.rtree.clear();
  op.put("result", num_tokens);
  return num_tokens;
}

size_t Manager::evict(size_t num_bytes) {
  const Lock held = lock();
  expire_pins();
  TraceOp op(*trace_, core_.state, "evict");
  const size_t num_chunks = ceil_div(num_bytes, pool_.geometry.chunk_bytes);
  const size_t freed = bytes_of(core_.reclaimer.evict(num_chunks));
  op.put("n", num_bytes).put("result", freed);
  return freed;
}

size_t Manager::trim() {
  Lock held = lock();
  wait_until_quiet(held);
  TraceOp op(*trace_, core_.state, "trim");
  const size_t released = core_.reclaimer.trim();
  op.put("result", released);
  return released;
}

size_t Manager::memory_budget() const {
  const Lock held = lock();
  return bytes_of(pool_.pset.budget_chunks());
}

void Manager::set_memory_budget(size_t num_bytes) {
  Lock held = lock();
  wait_until_quiet(held);
  const size_t chunks = budget_chunks(num_bytes, pool_.geometry);
  expire_pins();
  TraceOp op(*trace_, core_.state, "set_budget");
  bool is_set = core_.reclaimer.set_budget_chunks(chunks);
  if (!is_set && spill(pool_.pset.num_created() - chunks)) {
    is_set = core_.reclaimer.set_budget_chunks(chunks);
  }
  op.put("n", num_bytes).put("result", is_set);
  if (is_set) return;
  const size_t used = pool_.pset.num_created() - pool_.pset.num_free();
  throw OutOfMemoryError(
      bytes_of(pool_.pset.num_created() - chunks), bytes_of(pool_.pset.num_free()), num_bytes,
      std::to_string(bytes_of(used)) + " bytes are in use; release or preempt requests first");
}

size_t Manager::bytes_for(size_t num_tokens, bool with_windows) const {
  const Geometry& geometry = pool_.geometry;
  checked_mul(num_tokens, geometry.token_bytes, "num_tokens x bytes of a token");
  const size_t rows = geometry.rows_for(num_tokens);
  checked_mul(rows, geometry.row_bytes(), "num_tokens");
  size_t num_chunks = rows * geometry.lasting_chunks();
  for (const Window& window : geometry.windows) {
    if (!with_windows) break;
    num_chunks += geometry.rows_kept(window, num_tokens, options_.step_tokens) *
                  (window.end_column - window.first_column);
  }
  return bytes_of(num_chunks);
}

std::vector<SharedRange> Manager::shared_ranges(std::span<const VTensorId> ids,
                                                std::span<const size_t> num_tokens) {
  check_same_size(ids.size(), num_tokens.size());
  const Lock held = lock();
  std::vector<ReadExtent> extents;
  extents.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const VTensor& vtensor = core_.vtensors.resident(ids[i]);
    if (num_tokens[i] > vtensor.num_tokens) {
      throw std::invalid_argument("vTensor " + std::to_string(ids[i]) + " has " +
                                  std::to_string(vtensor.num_tokens) + " tokens, not " +
                                  std::to_string(num_tokens[i]));
    }
    extents.push_back({vtensor.slot, num_tokens[i]});
  }
  return vtensor::shared_ranges(pool_, extents);
}

void Manager::close() {
  if (is_inherited()) return;
  background_.stop();
  try {
    trace_->close();
  } catch (const DriverError&) {
    // Callers that want to know use stop_trace(); a replay finds the end missing.
  }
  Lock held = lock_in_any_state();
  background_.wait_until_quiet(held);  // a step of another thread may be extending
  stop_watching();
  closed_ = true;  // a second call tries again to give back what the driver refused in the first
  core_.discard(swap_store_, sleep_store_.get());
}

}  // namespace vtensor
