// Handover: vTensors that go to another process, and come from one, as descriptors of their memory.
//
//   sender                                                      receiver
//   vTensor [c0 ][c1 ][c2, half full]     -- Parcel -->         vTensor [c0 ][c1 ][c2, goes on]
//           apart from now on for good; here never               counted in its budget; given back,
//           written again, and given back when unused            not recycled, when unused
//
// A chunk is sent as it is when its memory stands apart (PSet), its file shows nothing else, and
// nobody here writes on in it or has written beyond what is sent. All others are copied first, and
// counted.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "vtensor/core/parcel.h"
#include "vtensor/core/placement.h"

namespace vtensor {

class Handover {
 public:
  Handover(CoreState& state, VTensorTable& vtensors, Reclaimer& reclaimer, Extender& extender,
           Shield& shield, Placement& placement)
      : state_(state),
        pool_(state.pool),
        vtensors_(vtensors),
        reclaimer_(reclaimer),
        extender_(extender),
        shield_(shield),
        placement_(placement) {}

  // All tokens of a vTensor, which stays, but never writes again to the rows that it has. Nothing,
  // and nothing changed, when memory for copies is short. Throws std::invalid_argument for one that
  // is empty, swapped out or has views. Requires: not busy.
  std::optional<Parcel> send(VTensorId id);
  // A vTensor of what was sent, or nothing when slots or memory are short. Throws
  // std::invalid_argument for a parcel that does not fit this pool, before anything is mapped.
  std::optional<VTensorId> receive(const Parcel& parcel, const std::string& salt);

 private:
  struct Entry;
  std::vector<Entry> entries_of(const VTensor& vtensor) const;
  void copy(std::span<Entry> entries, std::vector<Claim>& claims);
  Parcel pack(const VTensor& vtensor, std::span<const Entry> entries);
  void check(const Parcel& parcel) const;
  void take_in(const Parcel& parcel, std::vector<Claim>& claims);
  RTree::Match commit(const Parcel& parcel, std::span<const Claim> claims, uint64_t tenant);

  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
  Reclaimer& reclaimer_;
  Extender& extender_;
  Shield& shield_;
  Placement& placement_;
};

}  // namespace vtensor
