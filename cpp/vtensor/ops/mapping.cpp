#include "vtensor/ops/mapping.h"

#include <string>
#include <vector>

namespace vtensor {
namespace {

[[noreturn]] void throw_broken(const std::exception& failure, const std::exception& second) {
  throw BrokenMapping(std::string(failure.what()) + "; and undoing it: " + second.what());
}

// What stands behind one plane of some rows: chunks side by side, without the ones given back.
struct Run {
  uintptr_t addr = 0;
  std::vector<Handle> handles;
};

Run plane_run(const RowRange& where, size_t plane_idx, std::span<const Handle> handles) {
  const Plane& plane = where.geometry.planes[plane_idx];
  const size_t row_chunks = where.geometry.row_chunks;
  const size_t num_rows = handles.size() / row_chunks;
  Run run;
  run.handles.reserve(num_rows * plane.num_columns);
  for (size_t row = 0; row < num_rows; ++row) {
    const auto chunks = handles.subspan(row * row_chunks + plane.first_column, plane.num_columns);
    if (chunks.front() == kNoHandle) continue;
    if (run.handles.empty()) {
      run.addr = where.vset.address(plane.first_column, where.slot, where.first_row + row);
    }
    run.handles.insert(run.handles.end(), chunks.begin(), chunks.end());
  }
  return run;
}

void map_plane(Driver& driver, const RowRange& where, size_t plane,
               std::span<const Handle> handles) {
  const size_t chunk_bytes = where.geometry.chunk_bytes;
  const Run run = plane_run(where, plane, handles);
  if (run.handles.empty()) return;
  const size_t num_bytes = run.handles.size() * chunk_bytes;
  driver.map(run.addr, run.handles, chunk_bytes);
  try {
    driver.set_access(run.addr, num_bytes, Access::kReadWrite);
  } catch (const std::exception& failure) {
    try {
      driver.unmap(run.addr, num_bytes, chunk_bytes);
    } catch (const std::exception& second) {
      throw_broken(failure, second);
    }
    throw;
  }
}

void unmap_plane(Driver& driver, const RowRange& where, size_t plane,
                 std::span<const Handle> handles) {
  const size_t chunk_bytes = where.geometry.chunk_bytes;
  const Run run = plane_run(where, plane, handles);
  if (!run.handles.empty()) driver.unmap(run.addr, run.handles.size() * chunk_bytes, chunk_bytes);
}

// Runs `step` for each plane; when one throws, runs `undo` for those that succeeded.
template <typename Step, typename Undo>
void for_planes(size_t num_planes, Step&& step, Undo&& undo) {
  size_t done = 0;
  try {
    for (; done < num_planes; ++done) step(done);
  } catch (const std::exception& failure) {
    try {
      while (done > 0) undo(--done);
    } catch (const std::exception& second) {
      throw_broken(failure, second);
    }
    throw;
  }
}

}  // namespace

void map(Driver& driver, const RowRange& where, std::span<const Handle> handles) {
  if (handles.empty()) return;
  for_planes(
      where.geometry.planes.size(), [&](size_t plane) { map_plane(driver, where, plane, handles); },
      [&](size_t plane) { unmap_plane(driver, where, plane, handles); });
}

void unmap(Driver& driver, const RowRange& where, std::span<const Handle> handles) {
  if (handles.empty()) return;
  for_planes(
      where.geometry.planes.size(),
      [&](size_t plane) { unmap_plane(driver, where, plane, handles); },
      [&](size_t plane) { map_plane(driver, where, plane, handles); });
}

void set_access(Driver& driver, const RowRange& where, std::span<const Handle> handles,
                Access before, Access after) {
  const auto set_plane = [&](size_t plane, Access access) {
    const Run run = plane_run(where, plane, handles);
    if (run.handles.empty()) return;
    driver.set_access(run.addr, run.handles.size() * where.geometry.chunk_bytes, access);
  };
  for_planes(
      where.geometry.planes.size(), [&](size_t plane) { set_plane(plane, after); },
      [&](size_t plane) { set_plane(plane, before); });
}

void remap(Driver& driver, const RowRange& where, const Mapped& before, const Mapped& after) {
  if (driver.remaps_in_place()) {
    const auto remap_plane = [&](size_t plane, const Mapped& mapped) {
      const Run run = plane_run(where, plane, mapped.handles);
      if (run.handles.empty()) return;
      driver.remap(run.addr, run.handles, where.geometry.chunk_bytes, mapped.access);
    };
    for_planes(
        where.geometry.planes.size(), [&](size_t plane) { remap_plane(plane, after); },
        [&](size_t plane) { remap_plane(plane, before); });
    return;
  }
  unmap(driver, where, before.handles);
  try {
    map(driver, where, after.handles);
  } catch (const BrokenMapping&) {
    throw;
  } catch (const std::exception& failure) {
    try {
      map(driver, where, before.handles);
    } catch (const std::exception& second) {
      throw_broken(failure, second);
    }
    throw;
  }
}

}  // namespace vtensor
