#include "bindings/insight.h"

#include <nanobind/operators.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>

#include "vtensor/manager.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor {
namespace {

void bind_block_events(nb::module_& m) {
  nb::enum_<BlockEvent::Kind>(m, "BlockEventKind")
      .value("STORED", BlockEvent::Kind::kStored)
      .value("REMOVED", BlockEvent::Kind::kRemoved)
      .value("CLEARED", BlockEvent::Kind::kCleared);
  nb::class_<BlockEvent>(m, "BlockEvent")
      .def_ro("kind", &BlockEvent::kind)
      .def_ro("blocks", &BlockEvent::blocks)
      .def_ro("parent", &BlockEvent::parent)
      .def_ro("tokens", &BlockEvent::tokens)
      .def_ro("cache_salt", &BlockEvent::salt);
  m.attr("BLOCK_TOKENS") = kBlockTokens;
}

void bind_snapshot(nb::module_& m) {
  nb::class_<MappingTimes>(m, "MappingTimes")
      .def_ro("exposed_us", &MappingTimes::exposed_us)
      .def_ro("hidden_us", &MappingTimes::hidden_us)
      .def_ro("pre_extended_rows", &MappingTimes::pre_extended_rows);
  nb::class_<ChunkInfo>(m, "ChunkInfo")
      .def_ro("id", &ChunkInfo::id)
      .def_ro("generation", &ChunkInfo::generation)
      .def_ro("refs", &ChunkInfo::refs)
      .def_ro("recorded", &ChunkInfo::recorded)
      .def_ro("pinned", &ChunkInfo::pinned)
      .def_ro("appender", &ChunkInfo::appender)
      .def_ro("sharers", &ChunkInfo::sharers);
  nb::class_<VTensorInfo>(m, "VTensorInfo")
      .def_ro("id", &VTensorInfo::id)
      .def_ro("slot", &VTensorInfo::slot)
      .def_prop_ro("state", [](const VTensorInfo& info) { return to_string(info.state); })
      .def_ro("num_tokens", &VTensorInfo::num_tokens)
      .def_ro("num_cached_tokens", &VTensorInfo::num_cached_tokens)
      .def_ro("num_cut_tokens", &VTensorInfo::num_cut_tokens)
      .def_ro("cut_by_window", &VTensorInfo::cut_by_window)
      .def_ro("mapped_tokens", &VTensorInfo::mapped_tokens)
      .def_ro("mapped_bytes", &VTensorInfo::mapped_bytes)
      .def_ro("chunks_aliased", &VTensorInfo::chunks_aliased)
      .def_ro("chunks_copied", &VTensorInfo::chunks_copied)
      .def_ro("table", &VTensorInfo::table);
  nb::class_<PrefixInfo>(m, "PrefixInfo")
      .def_ro("cache_salt", &PrefixInfo::cache_salt)
      .def_ro("parent", &PrefixInfo::parent)
      .def_ro("start_tokens", &PrefixInfo::start_tokens)
      .def_ro("num_tokens", &PrefixInfo::num_tokens)
      .def_ro("last_used", &PrefixInfo::last_used)
      .def_ro("first_tokens", &PrefixInfo::first_tokens)
      .def_ro("chunks", &PrefixInfo::chunks)
      .def_ro("blocks", &PrefixInfo::blocks)
      .def_ro("pinned_by", &PrefixInfo::pinned_by);
  nb::class_<Snapshot>(m, "Snapshot")
      .def_ro("chunk_bytes", &Snapshot::chunk_bytes)
      .def_ro("num_planes", &Snapshot::num_planes)
      .def_ro("vtensors", &Snapshot::vtensors)
      .def_ro("chunks", &Snapshot::chunks)
      .def_ro("prefixes", &Snapshot::prefixes);
}

// Calls of one kind, in Python's units.
struct DriverCalls {
  int64_t calls = 0;
  double us = 0;
  double hidden_us = 0;
  bool operator==(const DriverCalls&) const = default;
};

nb::dict driver_calls(const DriverStats& stats) {
  nb::dict out;
  for (size_t i = 0; i < kNumCallKinds; ++i) {
    const CallStats& kind = stats.calls[i];
    out[nb::str(kCallNames[i].data(), kCallNames[i].size())] =
        DriverCalls{kind.num_calls, static_cast<double>(kind.total_ns) / 1e3,
                    static_cast<double>(kind.hidden_ns) / 1e3};
  }
  return out;
}

void bind_stats(nb::module_& m) {
  nb::class_<DriverCalls>(m, "DriverCalls",
                          "Calls of one kind to the driver, and the microseconds they took; "
                          "hidden_us of these were spent by the background worker.")
      .def(nb::init<int64_t, double, double>(), "calls"_a, "us"_a, "hidden_us"_a = 0.0)
      .def_rw("calls", &DriverCalls::calls)
      .def_rw("us", &DriverCalls::us)
      .def_rw("hidden_us", &DriverCalls::hidden_us)
      .def("__getstate__",
           [](const DriverCalls& self) {
             return std::make_tuple(self.calls, self.us, self.hidden_us);
           })
      .def("__setstate__",
           [](DriverCalls& self, const std::tuple<int64_t, double, double>& state) {
             new (&self) DriverCalls{std::get<0>(state), std::get<1>(state), std::get<2>(state)};
           })
      .def(nb::self == nb::self, nb::sig("def __eq__(self, arg: object, /) -> bool"))
      .def(
          "as_dict",
          [](const DriverCalls& self) {
            nb::dict out;
            out["calls"] = self.calls;
            out["us"] = self.us;
            out["hidden_us"] = self.hidden_us;
            return out;
          },
          nb::sig("def as_dict(self) -> dict[str, float]"));
  nb::class_<Stats> stats(m, "Stats",
                          "Numbers of a manager: bytes are of now, counts and times are totals "
                          "since the start.");
  nb::list fields;
#define X(name, trace_name)          \
  stats.def_ro(#name, &Stats::name); \
  fields.append(#name);
  VTENSOR_COUNTERS(X)
#undef X
#define X(type, name, doc)                \
  stats.def_ro(#name, &Stats::name, doc); \
  fields.append(#name);
  VTENSOR_STATS(X)
#undef X
  stats.def_prop_ro(
      "driver_calls", [](const Stats& self) { return driver_calls(self.driver); },
      nb::sig("def driver_calls(self) -> dict[str, DriverCalls]"), "By the driver's operation.");
  stats.def(
      "as_dict",
      [fields = nb::tuple(fields)](nb::handle self) {
        nb::dict out;
        for (const nb::handle name : fields) out[name] = nb::getattr(self, name);
        nb::dict calls;
        for (const auto [kind, entry] : nb::cast<nb::dict>(nb::getattr(self, "driver_calls"))) {
          calls[kind] = entry.attr("as_dict")();
        }
        out["driver_calls"] = calls;
        return out;
      },
      nb::sig("def as_dict(self) -> dict[str, Any]"), "All numbers as plain values, for JSON.");
}

}  // namespace

void bind_insight(nb::module_& m) {
  bind_block_events(m);
  bind_snapshot(m);
  bind_stats(m);
}

}  // namespace vtensor
