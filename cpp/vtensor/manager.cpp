#include "vtensor/manager.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "vtensor/core/integrity.h"
#include "vtensor/driver/stopwatch.h"
#include "vtensor/driver/wrappers/tracing_driver.h"
#include "vtensor/util/error.h"

namespace vtensor {
namespace {

size_t budget_chunks_of(size_t budget_bytes, const Geometry& geometry) {
  const size_t chunks = budget_bytes / geometry.chunk_bytes;
  if (chunks < geometry.num_planes) {
    throw std::invalid_argument("memory_budget " + std::to_string(budget_bytes) +
                                " bytes is less than one chunk in each " +
                                "plane: " + std::to_string(geometry.num_planes) + " x " +
                                std::to_string(geometry.chunk_bytes) + " bytes");
  }
  return chunks;
}

}  // namespace

std::shared_ptr<Manager> Manager::open(std::unique_ptr<Driver> driver, const KVSpec& spec,
                                       const ManagerOptions& options) {
  const Geometry geometry =
      make_geometry(spec, options.chunk_bytes, driver->granularity(), options.max_requests);
  budget_chunks_of(options.memory_budget_bytes, geometry);
  auto trace = std::make_shared<TraceWriter>();
  auto traced = std::make_unique<TracingDriver>(
      std::move(driver), [trace](const DriverCall& call) { trace->write_call(call); },
      std::shared_ptr<const std::atomic<bool>>(trace, &trace->open_flag()));
  return std::shared_ptr<Manager>(new Manager(std::make_unique<MeteredDriver>(std::move(traced)),
                                              trace, spec, geometry, options));
}

Manager::Manager(std::unique_ptr<MeteredDriver> driver, std::shared_ptr<TraceWriter> trace,
                 const KVSpec& spec, const Geometry& geometry, const ManagerOptions& options)
    : spec_(spec),
      options_(options),
      trace_(std::move(trace)),
      meter_(driver.get()),
      pool_(std::move(driver), geometry, budget_chunks_of(options.memory_budget_bytes, geometry)),
      scheduler_(pool_, options.scheduler),
      swap_store_(options.swap_space_bytes, geometry.chunk_bytes, options.swap_directory) {}

Manager::~Manager() {
  worker_.stop();
  unmap_everything();
}

// The driver's own destructor gives back what this cannot.
void Manager::unmap_everything() noexcept {
  try {
    scheduler_.finish_steps();
    if (scheduler_.is_asleep()) scheduler_.discard_sleep(*sleep_store_);
    for (const VTensorId id : scheduler_.live_ids()) scheduler_.release(id);
    for (SlotId slot = 0; slot < pool_.vset.num_slots(); ++slot) scheduler_.unhold(slot);
    scheduler_.trim();
  } catch (const std::exception&) {
    return;
  }
}

Manager::Lock Manager::lock_awake_or_not() const {
  Lock lock(mutex_);
  if (closed_) throw ReleasedError("the manager is closed");
  return lock;
}

Manager::Lock Manager::lock() const {
  Lock lock(mutex_);
  check_usable();
  return lock;
}

void Manager::check_usable() const {
  if (closed_) throw ReleasedError("the manager is closed");
  if (scheduler_.is_asleep()) throw std::invalid_argument("the manager is asleep; wake() it first");
}

void Manager::wait_until_idle(Lock& lock, std::span<const VTensorId> ids) {
  settled_.wait(lock, [&] {
    return std::ranges::none_of(
        ids, [&](VTensorId id) { return scheduler_.is_live(id) && scheduler_.live(id).busy; });
  });
  check_usable();
}

// Waits until the worker holds no chunk in its hands.
void Manager::wait_until_quiet(Lock& lock) {
  settled_.wait(lock, [this] { return scheduler_.claimed().empty(); });
  check_usable();
}

void Manager::expire_pins() {
  const size_t num_pins = pool_.rtree.pins().size();
  if (num_pins == 0) return;
  pool_.rtree.expire_pins(steady_now_ns());
  const size_t num_expired = num_pins - pool_.rtree.pins().size();
  if (num_expired > 0) TraceOp(*trace_, scheduler_, "expire_pins").put("result", num_expired);
}

std::optional<VTensorId> Manager::try_create(std::span<const Token> tokens, const std::string& salt,
                                             size_t expected_tokens) {
  const Lock held = lock();
  const Stopwatch watch(exposed_ns_);
  TraceOp op(*trace_, scheduler_, "create");
  op.tokens(tokens).put("salt", salt).put("expected", expected_tokens);
  expire_pins();
  const std::optional<VTensorId> id = scheduler_.create(tokens, salt, expected_tokens);
  op.put("result", id.value_or(kNoVTensor));
  return id;
}

std::optional<VTensorId> Manager::try_fork(VTensorId id) {
  Lock held = lock();
  const Stopwatch watch(exposed_ns_);
  TraceOp op(*trace_, scheduler_, "fork", id);
  wait_until_idle(held, {&id, 1});
  op.restart_counters();
  const std::optional<VTensorId> child = scheduler_.fork(id);
  op.put("result", child.value_or(kNoVTensor));
  return child;
}

void Manager::release(VTensorId id) {
  Lock held = lock_awake_or_not();
  settled_.wait(held, [&] { return !scheduler_.is_live(id) || !scheduler_.live(id).busy; });
  if (closed_) throw ReleasedError("the manager is closed");
  if (!scheduler_.is_asleep()) return release_now(id);
  if (std::ranges::find(released_asleep_, scheduler_.live(id).id) != released_asleep_.end()) {
    throw ReleasedError("vTensor " + std::to_string(id) + " has been released");
  }
  released_asleep_.push_back(id);
}

void Manager::release_now(VTensorId id) {
  const TraceOp op(*trace_, scheduler_, "release", id);
  scheduler_.forget_swapped(scheduler_.live(id), swap_store_);
  scheduler_.release(id);
}

bool Manager::try_extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens) {
  Lock held = lock();
  TraceOp op(*trace_, scheduler_, "extend");
  op.put("ids", ids).put("n", num_tokens);
  bool extended = scheduler_.extend_in_place(ids, num_tokens);
  if (!extended) {
    const Stopwatch watch(exposed_ns_);
    wait_until_idle(held, ids);
    op.restart_counters();
    expire_pins();
    extended = grow(ids, num_tokens);
    if (!extended && !scheduler_.claimed().empty()) {
      wait_until_quiet(held);  // the worker held what was missing, for a moment
      extended = grow(ids, num_tokens);
    }
  }
  op.put("result", extended);
  return extended;
}

bool Manager::grow(std::span<const VTensorId> ids, std::span<const size_t> num_tokens) {
  last_shortage_.clear();
  std::optional<Growth> growth = scheduler_.plan_extend(ids, num_tokens);
  for (bool retried = false; growth; retried = true) {
    try {
      growth->run(*pool_.driver, pool_.vset, pool_.geometry);
      scheduler_.commit(*growth);
      return true;
    } catch (const OutOfMemoryError& shortage) {
      // The budget promised more than the system has: go on with what exists already.
      scheduler_.abandon(*growth);
      last_shortage_ = shortage.what();
      if (retried || !scheduler_.make_claimable(growth->num_claims(), /*created=*/true)) break;
      growth = scheduler_.plan_extend(ids, num_tokens);
    } catch (...) {
      scheduler_.abandon(*growth);
      throw;
    }
  }
  return false;
}

void Manager::extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens) {
  if (try_extend(ids, num_tokens)) return;
  const Lock held = lock();
  size_t asked = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const size_t rows = pool_.geometry.rows_for(num_tokens[i]);
    const size_t mapped = pool_.vset.mapped_rows(scheduler_.live(ids[i]).slot);
    if (rows > mapped) asked += (rows - mapped) * pool_.geometry.row_bytes();
  }
  const size_t chunk_bytes = pool_.geometry.chunk_bytes;
  throw OutOfMemoryError(
      asked, scheduler_.num_obtainable() * chunk_bytes, pool_.pset.budget_chunks() * chunk_bytes,
      last_shortage_.empty() ? "release or preempt a request, or raise the budget"
                             : last_shortage_);
}

void Manager::truncate(VTensorId id, size_t num_tokens) {
  Lock held = lock();
  wait_until_idle(held, {&id, 1});
  TraceOp op(*trace_, scheduler_, "truncate", id);
  op.put("n", num_tokens);
  scheduler_.truncate(id, num_tokens);
}

void Manager::begin_step() {
  const Lock held = lock();
  const TraceOp op(*trace_, scheduler_, "begin_step");
  scheduler_.epochs().begin();
}

void Manager::end_step(uintptr_t stream) {
  const Lock held = lock();
  const TraceOp op(*trace_, scheduler_, "end_step");
  scheduler_.epochs().end(pool_.driver->fence(stream));
  scheduler_.reap();
}

size_t Manager::record_prefix(VTensorId id, std::span<const Token> tokens) {
  Lock held = lock();
  wait_until_idle(held, {&id, 1});  // dedup changes its page table: the worker must not be at it
  TraceOp op(*trace_, scheduler_, "record_prefix", id);
  op.tokens(tokens);
  if (options_.dedup) scheduler_.dedup(id, tokens);
  const size_t num_new = scheduler_.record_prefix(id, tokens);
  op.put("result", num_new);
  return num_new;
}

size_t Manager::match_prefix(std::span<const Token> tokens, const std::string& salt) {
  const Lock held = lock();
  TraceOp op(*trace_, scheduler_, "match_prefix");
  const size_t matched = pool_.rtree.match(salt, tokens).num_tokens;
  op.tokens(tokens).put("salt", salt).put("result", matched);
  return matched;
}

size_t Manager::pin_prefix(std::span<const Token> tokens, const std::string& owner,
                           double ttl_seconds, const std::string& salt) {
  const Lock held = lock();
  const int64_t expires_ns =
      ttl_seconds > 0 ? steady_now_ns() + static_cast<int64_t>(ttl_seconds * 1e9) : 0;
  TraceOp op(*trace_, scheduler_, "pin_prefix");
  op.tokens(tokens).put("salt", salt).put("owner", owner).put("ttl_s", ttl_seconds);
  const size_t pinned = pool_.rtree.pin(salt, tokens, owner, expires_ns);
  op.put("result", pinned);
  return pinned;
}

size_t Manager::unpin_prefix(const std::string& owner) {
  const Lock held = lock();
  TraceOp op(*trace_, scheduler_, "unpin_prefix");
  const size_t num_pins = pool_.rtree.unpin(owner);
  op.put("owner", owner).put("result", num_pins);
  return num_pins;
}

size_t Manager::reset_prefix_cache() {
  const Lock held = lock();
  expire_pins();
  TraceOp op(*trace_, scheduler_, "reset_prefix_cache");
  const size_t num_tokens = pool_.rtree.clear();
  op.put("result", num_tokens);
  return num_tokens;
}

size_t Manager::evict(size_t num_bytes) {
  const Lock held = lock();
  expire_pins();
  const size_t chunk_bytes = pool_.geometry.chunk_bytes;
  TraceOp op(*trace_, scheduler_, "evict");
  const size_t freed = scheduler_.evict(ceil_div(num_bytes, chunk_bytes)) * chunk_bytes;
  op.put("n", num_bytes).put("result", freed);
  return freed;
}

size_t Manager::trim() {
  Lock held = lock();
  wait_until_quiet(held);
  TraceOp op(*trace_, scheduler_, "trim");
  const size_t released = scheduler_.trim();
  op.put("result", released);
  return released;
}

size_t Manager::memory_budget_bytes() const {
  const Lock held = lock();
  return pool_.pset.budget_chunks() * pool_.geometry.chunk_bytes;
}

void Manager::set_memory_budget_bytes(size_t budget_bytes) {
  Lock held = lock();
  wait_until_quiet(held);
  const size_t chunks = budget_chunks_of(budget_bytes, pool_.geometry);
  expire_pins();
  TraceOp op(*trace_, scheduler_, "set_budget");
  const bool is_set = scheduler_.set_budget_chunks(chunks);
  op.put("n", budget_bytes).put("result", is_set);
  if (is_set) return;
  const size_t chunk_bytes = pool_.geometry.chunk_bytes;
  const size_t used = pool_.pset.num_created() - pool_.pset.num_free();
  throw OutOfMemoryError(
      (pool_.pset.num_created() - chunks) * chunk_bytes, pool_.pset.num_free() * chunk_bytes,
      budget_bytes,
      std::to_string(used * chunk_bytes) + " bytes are in use; release or preempt requests first");
}

size_t Manager::bytes_for(size_t num_tokens) const {
  return pool_.geometry.rows_for(num_tokens) * pool_.geometry.row_bytes();
}

std::vector<SharedRange> Manager::shared_ranges(std::span<const VTensorId> ids,
                                                std::span<const size_t> num_tokens) {
  if (ids.size() != num_tokens.size()) {
    throw std::invalid_argument(std::to_string(ids.size()) + " vTensors but " +
                                std::to_string(num_tokens.size()) + " lengths");
  }
  const Lock held = lock();
  std::vector<Reader> readers;
  readers.reserve(ids.size());
  for (size_t i = 0; i < ids.size(); ++i) {
    const VTensor& vtensor = scheduler_.resident(ids[i]);
    if (num_tokens[i] > vtensor.num_tokens) {
      throw std::invalid_argument("vTensor " + std::to_string(ids[i]) + " has " +
                                  std::to_string(vtensor.num_tokens) + " tokens, not " +
                                  std::to_string(num_tokens[i]));
    }
    readers.push_back({vtensor.slot, num_tokens[i]});
  }
  return vtensor::shared_ranges(pool_, readers);
}

void Manager::check_integrity() const {
  const Lock held = lock_awake_or_not();
  vtensor::check_integrity(scheduler_);
}

void Manager::close() {
  worker_.stop();
  try {
    trace_->close();
  } catch (const DriverError&) {
    // Whoever wants to know calls stop_trace(); a replay finds the end missing.
  }
  const Lock held(mutex_);
  closed_ = true;  // a second call tries again to give back what the driver refused in the first
  settled_.notify_all();
  while (!pool_.rtree.pins().empty()) {
    const std::string owner = pool_.rtree.pins().begin()->first;
    pool_.rtree.unpin(owner);
  }
  for (const VTensorId id : scheduler_.live_ids()) {
    scheduler_.forget_swapped(scheduler_.live(id), swap_store_);
  }
  scheduler_.finish_steps();
  if (scheduler_.is_asleep()) scheduler_.discard_sleep(*sleep_store_);
  for (const VTensorId id : scheduler_.live_ids()) scheduler_.release(id);
  pool_.rtree.clear();
  scheduler_.trim();
}

}  // namespace vtensor
