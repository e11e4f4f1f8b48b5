// The nanobind module flexinfer._vtensor_testing: makes chosen driver calls of a manager fail.
//
// For the Python tests. Editable installs have it, wheels do not (VTENSOR_TESTING_MODULE).
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "bindings/driver_config.h"
#include "tests/cpp/support/faulty_driver.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace vtensor {
namespace {

// The faulty driver belongs to the manager: usable while that lives.
struct FaultInjector {
  FaultyDriver* driver = nullptr;

  FaultyDriver& opened() const {
    if (driver == nullptr) throw std::logic_error("no manager has been opened with these faults");
    return *driver;
  }
};

std::shared_ptr<FaultInjector> inject_faults(DriverConfig& config) {
  auto injector = std::make_shared<FaultInjector>();
  config.wrap = [injector](std::unique_ptr<Driver> inner) {
    auto faulty = std::make_unique<FaultyDriver>(std::move(inner));
    injector->driver = faulty.get();
    return faulty;
  };
  return injector;
}

void fail(FaultInjector& self, int64_t fail_at, bool out_of_memory, bool persistent) {
  FaultPlan plan;
  plan.fail_at = fail_at;
  plan.kind = out_of_memory ? FaultPlan::Kind::kOutOfMemory : FaultPlan::Kind::kDriverError;
  plan.persistent = persistent;
  self.opened().set_plan(plan);
}

}  // namespace
}  // namespace vtensor

NB_MODULE(_vtensor_testing, m) {
  using vtensor::FaultInjector;
  m.doc() = "Fault injection for the tests of flexinfer.vtensor.";
  nb::module_::import_("flexinfer._vtensor");  // DriverConfig is bound there
  nb::class_<FaultInjector>(m, "FaultInjector")
      .def("fail", &vtensor::fail, "fail_at"_a, "out_of_memory"_a = false, "persistent"_a = false,
           "Fail the fail_at-th driver call from now on (0: none).")
      .def("num_calls", [](const FaultInjector& self) { return self.opened().num_calls(); })
      .def("num_failed", [](const FaultInjector& self) { return self.opened().num_failed(); });
  m.def("inject_faults", &vtensor::inject_faults, "config"_a,
        "Wrap the driver of the manager that is opened with this config next.");
}
