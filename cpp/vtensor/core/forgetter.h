// Forgetter: gives back the rows that windows have left behind.
//
//   window plane   | given back ....... | kept: what later queries read | write_limit ...
//                  0    rows_forgotten()^
//
// What is due is noted together with the last epoch that may read it. plan() and commit() or
// abandon() enclose the unmapping, which may run without the manager's mutex in between; the
// vTensor is `busy` for so long. Addresses and positions stay as they are.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "vtensor/core/vtensor_table.h"

namespace vtensor {

// The driver work of giving rows of one vTensor back.
struct GiveBack {
  VTensorId vtensor = kNoVTensor;
  SlotId slot = 0;
  size_t first_row = 0;
  std::vector<Handle> handles;  // whole rows from first_row on; kNoHandle where nothing goes

  // Unmaps them. On failure nothing has changed, but for BrokenMapping.
  void run(Driver& driver, const VSet& vset, const Geometry& geometry) const;
};

class Forgetter {
 public:
  Forgetter(CoreState& state, VTensorTable& vtensors)
      : state_(state), pool_(state.pool), vtensors_(vtensors) {}

  // Notes that no query below token `num_tokens` of the vTensor follows. True: the worker is to be
  // told, since the steps that may read what is due are over.
  bool note(VTensor& vtensor, size_t num_tokens);
  // What is due and may be unmapped now, with the vTensor busy until commit() or abandon(). Nothing
  // for what is released, busy or swapped out, shown by views or read by a step.
  std::optional<GiveBack> plan(VTensorId id);
  void commit(const GiveBack& rows);
  void abandon(const GiveBack& rows, bool broken);
  // All three at once, of one vTensor or of all: what fails is left as it is.
  void give_back(VTensorId id);
  void give_back_all();

 private:
  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
};

}  // namespace vtensor
