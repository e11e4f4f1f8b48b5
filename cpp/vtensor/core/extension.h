// Extension: the driver work of extending vTensors, planned under the manager's mutex and run with
// or without it. All-or-nothing over all its parts.
//
// A part adds rows at the end of one vTensor and may first replace its last, partly filled row by a
// private copy (copy-on-write). run() touches only the claims and the driver; the page tables
// change when the Extender commits. Thread-safety: one thread at a time.
#pragma once

#include <cstddef>
#include <utility>
#include <vector>

#include "vtensor/ops/alloc.h"
#include "vtensor/ops/mapping.h"

namespace vtensor {

struct ExtensionPart {
  VTensorId vtensor = kNoVTensor;
  SlotId slot = 0;
  uint64_t tenant = 0;
  Apart apart{};          // where its new chunks lie
  size_t num_tokens = 0;  // declared length after commit; 0 = unchanged (pre-extension)

  size_t first_row = 0;
  std::vector<Claim> rows;      // new rows from first_row on, row-major over planes
  std::vector<Handle> sources;  // their first num_tokens are copied into `rows`

  size_t copied_row = 0;
  size_t copied_tokens = 0;            // whose bytes in it are copied
  std::vector<Claim> copies;           // empty: no row is copied
  std::vector<size_t> copied_columns;  // where they go in the row
  std::vector<Handle> originals;       // the whole row as it was
  Access originals_access = Access::kReadWrite;

  bool broken = false;  // run() failed and could not undo this part
};

struct Extension {
  std::vector<ExtensionPart> parts;
  std::vector<std::pair<VTensorId, size_t>> declared;  // lengths that need no driver work

  size_t num_claims() const;
  // Creates, scrubs, copies and maps. On failure everything is undone (but for created chunks,
  // which the claims remember) and the error is rethrown. False: it gave way while it created and
  // scrubbed, and nothing is mapped.
  bool run(Driver& driver, const VSet& vset, const Geometry& geometry,
           const GiveWay& give_way = nullptr);
};

}  // namespace vtensor
