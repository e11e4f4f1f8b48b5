// Shield: what is written through a tensor view of one vTensor reaches no chunk that others share.
//
//   rows   0 ......... | first_owned_row ....... | ......... mapped rows
//          guarded     | the last shared row:    | the vTensor's own
//                      | guarded, or copied      |
//
// Invariants, while views of a vTensor are alive:
//  1. its rows below what is shared are guarded: mapped copy-on-write, so that a write becomes a
//     page that this vTensor alone sees until it is released;
//  2. the last shared row, where it holds tokens of the vTensor's own, is a private copy; where it
//     does not, it is guarded, and copied when the vTensor grows.
//
// Only where the driver remaps in place, which copy-on-write needs. Elsewhere, on CUDA, writing to
// shared tokens is the caller's mistake, and nothing here does anything.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include "vtensor/core/extender.h"

namespace vtensor {

class Shield {
 public:
  Shield(CoreState& state, VTensorTable& vtensors, Extender& extender)
      : pool_(state.pool), vtensors_(vtensors), extender_(extender) {}

  // Before a view of it is handed out. Copies a row where others share what lies before tokens of
  // its own. Throws OutOfMemoryError, nothing changed, when there is no memory for that.
  // Requires: resident, not busy.
  void before_view(VTensor& vtensor);
  // Before its first `num_tokens` tokens are shared: returns how many of them may be. All, but
  // whole rows only while views are alive and it is longer: it still writes to the row that
  // follows.
  size_t before_sharing(VTensor& vtensor, size_t num_tokens);
  // Before another process may go on where this one ends: it never writes again to the rows that it
  // has. Requires: no views, not busy.
  void before_sending(VTensor& vtensor);

 private:
  bool appends_to_shared(const VTensor& vtensor, size_t row) const;
  void protect(VTensor& vtensor);
  void give_up_row(VTensor& vtensor, size_t row);

  Pool& pool_;
  VTensorTable& vtensors_;
  Extender& extender_;
};

}  // namespace vtensor
