// Map and Unmap: putting whole rows of chunks behind a slot, in all planes, and taking them away.
//
// Driver calls only; page tables are the caller's. A run of rows is one map and one set_access call
// a plane. All-or-nothing: on failure the planes done so far are undone before the error goes up.
// Should the undo fail as well, BrokenMapping is thrown: the slot's state is unknown and it must
// not be used again. Thread-safety: as the driver's.
#pragma once

#include <cstddef>
#include <span>

#include "vtensor/driver/driver.h"
#include "vtensor/pool/vset.h"
#include "vtensor/util/error.h"

namespace vtensor {

// The driver failed, and failed again while the first failure was being undone.
class BrokenMapping : public Error {
  using Error::Error;
};

// Where rows go: a slot of the arena, seen through immutable parts only.
struct RowRange {
  const VSet& vset;
  const Geometry& geometry;
  SlotId slot = 0;
  size_t first_row = 0;
};

// `handles` holds whole rows, row-major over columns; kNoHandle, at one end of each plane alone, is
// passed over. Requires: the rows are unmapped.
void map(Driver& driver, const RowRange& where, std::span<const Handle> handles);
// Unmaps the rows that `handles` stand behind now (they are needed to undo a failure).
void unmap(Driver& driver, const RowRange& where, std::span<const Handle> handles);
// Chunks behind whole rows, row-major over columns, and what may be done with them.
struct Mapped {
  std::span<const Handle> handles;
  Access access = Access::kReadWrite;
};
// Puts `after` in the place of `before`. Where the driver remaps in place, a reader sees the one or
// the other all the time. Requires: equal sizes, kNoHandle in the same places; kReadWrite where the
// driver does not.
void remap(Driver& driver, const RowRange& where, const Mapped& before, const Mapped& after);
// Changes the access of the rows that `handles` stand behind.
void set_access(Driver& driver, const RowRange& where, std::span<const Handle> handles,
                Access before, Access after);

}  // namespace vtensor
