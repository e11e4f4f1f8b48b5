// Manager: vTensors that go to another process, and come from one.
#include <stdexcept>
#include <string>

#include "vtensor/driver/stopwatch.h"
#include "vtensor/manager.h"

namespace vtensor {

void Manager::check_hands_over() const {
  if (pool_.driver->hands_over()) return;
  throw std::invalid_argument("the " + std::string(pool_.driver->name()) +
                              " driver cannot hand memory to another process");
}

std::optional<Parcel> Manager::try_export(VTensorId id) {
  Lock held = lock();
  check_hands_over();
  TraceOp op(*trace_, core_.state, "export", id);
  wait_until_idle(held, {&id, 1});
  op.restart_counters();
  const auto run = [&](Copies& copies) {
    background_.run_without(held, [&] { copies.run(*pool_.driver, pool_.geometry.chunk_bytes); });
  };
  std::optional<Parcel> parcel = core_.handover.send(id, run);
  if (!parcel && background_.holds_chunks()) {
    wait_until_quiet(held);  // somebody held what was missing, for a moment
    wait_until_idle(held, {&id, 1});
    parcel = core_.handover.send(id, run);
  }
  op.put("result", parcel.has_value());
  return parcel;
}

std::optional<VTensorId> Manager::try_adopt(const Parcel& parcel, const std::string& salt) {
  Lock held = lock();
  check_hands_over();
  const Stopwatch watch(exposed_ns_);
  TraceOp op(*trace_, core_.state, "adopt");
  op.put("n", parcel.num_tokens).put("salt", salt);
  std::optional<VTensorId> id = core_.handover.receive(parcel, salt);
  if (!id && background_.holds_chunks()) {
    wait_until_quiet(held);
    id = core_.handover.receive(parcel, salt);
  }
  op.put("result", id.value_or(kNoVTensor));
  return id;
}

}  // namespace vtensor
