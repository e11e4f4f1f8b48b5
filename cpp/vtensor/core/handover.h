// Handover: vTensors that go to another process, and come from one, as descriptors of their memory.
//
//   sender                                                      receiver
//   vTensor [c0 ][c1 ][c2, half full]     -- Parcel -->         vTensor [c0 ][c1 ][c2, goes on]
//           apart from now on for good; here never               counted in its budget; given back,
//           written again, and given back when unused            not recycled, when unused
//
// A chunk is sent as it is when its memory stands apart (PSet), its file shows nothing else, and
// nobody here writes on in it or has written beyond what is sent. All others are copied first, and
// counted: send() plans that under the manager's mutex, and has it run without it, as extensions
// are.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "vtensor/core/parcel.h"
#include "vtensor/core/placement.h"

namespace vtensor {

// The driver work of sending: chunks that others must not see, or still write to, are copied.
// Thread-safety: one thread at a time.
struct Copies {
  std::vector<Claim> claims;  // what is copied to
  std::vector<Handle> sources;
  std::vector<uint32_t> used_bytes;  // of each, which are copied

  // Creates and copies. On failure the claims remember what was created.
  void run(Driver& driver, size_t chunk_bytes);
};

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
  // is empty, swapped out or has views. `run` runs copies, and may let others at the manager's
  // mutex meanwhile; the vTensor is busy for so long. Requires: not busy.
  using Runner = std::function<void(Copies&)>;
  std::optional<Parcel> send(VTensorId id, const Runner& run);
  // A vTensor of what was sent, or nothing when slots or memory are short. Throws
  // std::invalid_argument for a parcel that does not fit this pool, before anything is mapped.
  std::optional<VTensorId> receive(const Parcel& parcel, const std::string& salt);

 private:
  struct Entry;
  VTensor& prepared(VTensorId id);
  bool is_written_elsewhere(const VTensor& vtensor, const Entry& entry) const;
  std::vector<Entry> entries_of(const VTensor& vtensor) const;
  bool is_current(const VTensor& vtensor, std::span<const Entry> entries) const;
  std::optional<Copies> plan(VTensor& vtensor, std::span<const Entry> entries);
  void run_beside(VTensor& vtensor, Copies& copies, const Runner& run);
  Parcel pack(const VTensor& vtensor, std::span<const Entry> entries,
              std::span<const Claim> copies);
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
