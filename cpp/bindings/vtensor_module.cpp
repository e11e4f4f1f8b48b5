// The nanobind module flexinfer._vtensor: the manager and its plain values, nothing else.
//
// Same names as in C++. Every call that takes the manager's mutex or calls the driver releases the
// GIL. flexinfer/vtensor/manager.py puts the friendly face on top.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bindings/driver_config.h"
#include "bindings/errors.h"
#include "bindings/insight.h"
#include "bindings/parcel.h"
#include "vtensor/driver/host/host_memory.h"
#include "vtensor/manager.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor {
namespace {

using TokenArray = nb::ndarray<const Token, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using GilRelease = nb::call_guard<nb::gil_scoped_release>;
std::span<const Token> tokens_of(const TokenArray& array) { return {array.data(), array.size()}; }

nb::dlpack::dtype dtype_of(const std::string& name) {
  if (name == "uint8") return nb::dtype<uint8_t>();  // quantised
  if (name == "float32") return nb::dtype<float>();
  if (name == "float16") return {static_cast<uint8_t>(nb::dlpack::dtype_code::Float), 16, 1};
  if (name == "bfloat16") return {static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat), 16, 1};
  throw std::invalid_argument("no KV dtype is called '" + name + "'");
}

// An object with __dlpack__; it owns the view's lease. Python comes here with the GIL held, but a
// lease begins and ends under the manager's mutex, which others may hold for a whole sleep().
template <typename MakeView>
nb::ndarray<nb::array_api> export_view(Manager& manager, const std::string& dtype,
                                       MakeView&& make_view) {
  TensorView view = [&] {
    const nb::gil_scoped_release unlocked;
    return make_view();
  }();
  const Device device = manager.device();
  auto lease = std::make_unique<std::shared_ptr<void>>(std::move(view.lease));
  const nb::capsule owner(lease.get(), [](void* pointer) noexcept {
    const nb::gil_scoped_release unlocked;
    delete static_cast<std::shared_ptr<void>*>(pointer);
  });
  static_cast<void>(lease.release());
  return nb::ndarray<nb::array_api>(reinterpret_cast<void*>(view.address), view.shape.size(),
                                    view.shape.data(), owner, view.strides.data(), dtype_of(dtype),
                                    static_cast<int>(device.type), device.index);
}

void bind_values(nb::module_& m) {
  nb::enum_<ScrubPolicy>(m, "ScrubPolicy")
      .value("OWNER", ScrubPolicy::kOwner)
      .value("TENANT", ScrubPolicy::kTenant)
      .value("OFF", ScrubPolicy::kOff);
  nb::enum_<UnmappedPolicy>(m, "UnmappedPolicy")
      .value("GUARD", UnmappedPolicy::kGuard)
      .value("ZERO", UnmappedPolicy::kZero);
  nb::class_<KVGroup>(m, "KVGroup")
      .def(nb::init<>())
      .def_rw("layers", &KVGroup::layers)
      .def_rw("num_kv_heads", &KVGroup::num_kv_heads)
      .def_rw("key_dim", &KVGroup::key_dim)
      .def_rw("value_dim", &KVGroup::value_dim)
      .def_rw("element_bytes", &KVGroup::element_bytes)
      .def_rw("layers_per_plane", &KVGroup::layers_per_plane)
      .def_rw("window", &KVGroup::window);
  nb::class_<KVSpec>(m, "KVSpec")
      .def(nb::init<>())
      .def_rw("groups", &KVSpec::groups)
      .def_rw("max_seq_len", &KVSpec::max_seq_len)
      .def("check", &KVSpec::check)
      .def("num_planes", &KVSpec::num_planes)
      .def("row_chunks", &KVSpec::row_chunks)
      .def("bytes_per_token", &KVSpec::bytes_per_token)
      .def("token_bytes", &KVSpec::token_bytes);
  nb::class_<DriverConfig>(m, "DriverConfig")
      .def(nb::init<>())
      .def_rw("kind", &DriverConfig::kind)
      .def_rw("device_index", &DriverConfig::device_index)
      .def_rw("capacity_bytes", &DriverConfig::capacity_bytes)
      .def_rw("unmapped", &DriverConfig::unmapped)
      .def_rw("huge_pages", &DriverConfig::huge_pages)
      .def_rw("mapping_limit", &DriverConfig::mapping_limit)
      .def_rw("granularity_bytes", &DriverConfig::granularity_bytes)
      .def_rw("a100_latency", &DriverConfig::a100_latency)
      .def_rw("real_time", &DriverConfig::real_time);
  nb::class_<ManagerOptions>(m, "ManagerOptions")
      .def(nb::init<>())
      .def_rw("max_requests", &ManagerOptions::max_requests)
      .def_rw("memory_budget", &ManagerOptions::memory_budget)
      .def_rw("chunk_bytes", &ManagerOptions::chunk_bytes)
      .def_rw("step_tokens", &ManagerOptions::step_tokens)
      .def_rw("scrub", &ManagerOptions::scrub)
      .def_rw("park", &ManagerOptions::park)
      .def_rw("pre_extend", &ManagerOptions::pre_extend)
      .def_rw("alias", &ManagerOptions::alias)
      .def_rw("dedup", &ManagerOptions::dedup)
      .def_rw("min_free_bytes", &ManagerOptions::min_free_bytes)
      .def_rw("max_free_bytes", &ManagerOptions::max_free_bytes)
      .def_rw("prefix_cache_bytes", &ManagerOptions::prefix_cache_bytes)
      .def_rw("prefix_cache_fraction", &ManagerOptions::prefix_cache_fraction)
      .def_rw("swap_space_bytes", &ManagerOptions::swap_space_bytes)
      .def_rw("swap_directory", &ManagerOptions::swap_directory);
}

// (slot, start, end, members) of each.
nb::list range_tuples(const std::vector<SharedRange>& ranges) {
  nb::list out;
  for (const SharedRange& range : ranges) {
    nb::list members;
    for (const int64_t member : range.members) members.append(member);
    out.append(nb::make_tuple(range.slot, range.start, range.end, nb::tuple(members)));
  }
  return out;
}

// vTensors: life, lengths, steps.
void bind_vtensors(nb::class_<Manager>& manager) {
  manager
      .def_static(
          "open",
          [](const DriverConfig& driver, const KVSpec& spec, const ManagerOptions& options) {
            return Manager::open(open_driver(driver), spec, options);
          },
          "driver"_a, "spec"_a, "options"_a, GilRelease())
      .def(
          "try_create",
          [](Manager& self, const TokenArray& tokens, const std::string& cache_salt,
             size_t expected_tokens, bool to_export, bool wait) {
            const nb::gil_scoped_release unlocked;
            return self.try_create(tokens_of(tokens), cache_salt, expected_tokens, to_export, wait);
          },
          "tokens"_a, "cache_salt"_a, "expected_tokens"_a = 0, "to_export"_a = false,
          "wait"_a = false)
      .def("try_export", &Manager::try_export, "id"_a, GilRelease())
      .def("try_adopt", &Manager::try_adopt, "parcel"_a, "cache_salt"_a, GilRelease())
      .def("try_fork", &Manager::try_fork, "id"_a, GilRelease())
      .def("release", &Manager::release, "id"_a, GilRelease())
      .def(
          "try_extend",
          [](Manager& self, const std::vector<VTensorId>& ids,
             const std::vector<size_t>& num_tokens) { return self.try_extend(ids, num_tokens); },
          "ids"_a, "num_tokens"_a, GilRelease())
      .def(
          "extend",
          [](Manager& self, const std::vector<VTensorId>& ids,
             const std::vector<size_t>& num_tokens) { self.extend(ids, num_tokens); },
          "ids"_a, "num_tokens"_a, GilRelease())
      .def("pre_extend", &Manager::pre_extend, "ids"_a, "num_tokens"_a, GilRelease())
      .def("set_busy", &Manager::set_busy, "busy"_a, GilRelease())
      .def("forget", &Manager::forget, "ids"_a, "num_tokens"_a, GilRelease())
      .def("drain", &Manager::drain, GilRelease())
      .def("truncate", &Manager::truncate, "id"_a, "num_tokens"_a, GilRelease())
      .def("begin_step", &Manager::begin_step, GilRelease())
      .def("end_step", &Manager::end_step, "stream"_a, GilRelease());
}

// What is recorded.
void bind_prefixes(nb::class_<Manager>& manager) {
  manager
      .def(
          "record_prefix",
          [](Manager& self, VTensorId id, const TokenArray& tokens) {
            const nb::gil_scoped_release unlocked;
            return self.record_prefix(id, tokens_of(tokens));
          },
          "id"_a, "tokens"_a)
      .def(
          "match_prefix",
          [](Manager& self, const TokenArray& tokens, const std::string& cache_salt) {
            const nb::gil_scoped_release unlocked;
            return self.match_prefix(tokens_of(tokens), cache_salt);
          },
          "tokens"_a, "cache_salt"_a)
      .def(
          "pin_prefix",
          [](Manager& self, const TokenArray& tokens, const std::string& owner, double ttl_seconds,
             const std::string& cache_salt) {
            const nb::gil_scoped_release unlocked;
            return self.pin_prefix(tokens_of(tokens), owner, ttl_seconds, cache_salt);
          },
          "tokens"_a, "owner"_a, "ttl_seconds"_a, "cache_salt"_a)
      .def("unpin_prefix", &Manager::unpin_prefix, "owner"_a, GilRelease())
      .def("reset_prefix_cache", &Manager::reset_prefix_cache, GilRelease())
      .def("watch_blocks", &Manager::watch_blocks, GilRelease())
      .def("unwatch_blocks", &Manager::unwatch_blocks, GilRelease())
      .def("retell_blocks", &Manager::retell_blocks, GilRelease())
      .def("take_block_events", &Manager::take_block_events, "timeout_seconds"_a, GilRelease());
}

// Memory that moves, comes and goes.
void bind_memory(nb::class_<Manager>& manager) {
  manager.def("try_swap_out", &Manager::try_swap_out, "id"_a, GilRelease())
      .def(
          "try_swap_in",
          [](Manager& self, VTensorId id, const TokenArray& tokens) {
            const nb::gil_scoped_release unlocked;
            return self.try_swap_in(id, tokens_of(tokens));
          },
          "id"_a, "tokens"_a)
      .def("sleep", &Manager::sleep, "directory"_a, GilRelease())
      .def("wake", &Manager::wake, GilRelease())
      .def("is_asleep", &Manager::is_asleep, GilRelease())
      .def("evict", &Manager::evict, "num_bytes"_a, GilRelease())
      .def("trim", &Manager::trim, GilRelease())
      .def("memory_budget", &Manager::memory_budget, GilRelease())
      .def("set_memory_budget", &Manager::set_memory_budget, "num_bytes"_a, GilRelease())
      .def("bytes_for", &Manager::bytes_for, "num_tokens"_a, "with_windows"_a = true);
}

void bind_telling(nb::class_<Manager>& manager) {
  manager.def("mapping_times", &Manager::mapping_times, GilRelease())
      .def("available_bytes", &Manager::available_bytes, GilRelease())
      .def("start_trace", &Manager::start_trace, "path"_a, GilRelease())
      .def("stop_trace", &Manager::stop_trace, GilRelease())
      .def("is_tracing", &Manager::is_tracing)
      .def("label", &Manager::label, "id"_a, "text"_a, GilRelease())
      .def("resident_bytes", &Manager::resident_bytes, GilRelease())
      .def("info", &Manager::info, "id"_a, GilRelease())
      .def("snapshot", &Manager::snapshot, GilRelease())
      .def("stats", &Manager::stats, GilRelease())
      .def("check_integrity", &Manager::check_integrity, GilRelease())
      .def("close", &Manager::close, GilRelease());
}

// What attention reads.
void bind_views(nb::class_<Manager>& manager) {
  manager
      .def(
          "shared_ranges",
          [](Manager& self, const std::vector<VTensorId>& ids,
             const std::vector<size_t>& num_tokens) {
            const std::vector<SharedRange> ranges = [&] {
              const nb::gil_scoped_release unlocked;
              return self.shared_ranges(ids, num_tokens);
            }();
            return range_tuples(ranges);
          },
          "ids"_a, "num_tokens"_a,
          nb::sig("def shared_ranges(self, ids: Sequence[int], num_tokens: Sequence[int]) -> "
                  "list[tuple[int, int, int, tuple[int, ...]]]"))
      .def(
          "view",
          [](Manager& self, VTensorId id, size_t layer, KV which, const std::string& dtype) {
            return export_view(self, dtype, [&] { return self.view(id, layer, which); });
          },
          "id"_a, "layer"_a, "which"_a, "dtype"_a)
      .def(
          "arena",
          [](Manager& self, size_t layer, KV which, const std::string& dtype) {
            return export_view(self, dtype, [&] { return self.arena(layer, which); });
          },
          "layer"_a, "which"_a, "dtype"_a);
}

void bind_manager(nb::module_& m) {
  nb::enum_<KV>(m, "KV").value("KEY", KV::kKey).value("VALUE", KV::kValue);
  nb::class_<Manager> manager(m, "Manager");
  bind_vtensors(manager);
  bind_prefixes(manager);
  bind_memory(manager);
  bind_telling(manager);
  bind_views(manager);
}

}  // namespace
}  // namespace vtensor

NB_MODULE(_vtensor, m) {
  m.doc() = "The vTensor Manager. Use it through flexinfer.vtensor.";
  vtensor::bind_errors(m);
  vtensor::bind_values(m);
  vtensor::bind_parcel(m);
  vtensor::bind_insight(m);
  vtensor::bind_manager(m);
  m.attr("NO_CHUNK") = vtensor::kNoChunk;  // in page tables: a window has left the row behind
  m.def(
      "available_bytes", [] { return vtensor::available_bytes(); },
      "Bytes that this machine, or this container, can still give.");
}
