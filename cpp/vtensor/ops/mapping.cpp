#include "vtensor/ops/mapping.h"

#include <string>
#include <vector>

namespace vtensor {
namespace {

[[noreturn]] void throw_broken(const std::exception& failure, const std::exception& second) {
  throw BrokenMapping(std::string(failure.what()) + "; and undoing it: " + second.what());
}

std::vector<Handle> plane_of(const RowRange& where, size_t plane, std::span<const Handle> handles) {
  const size_t planes = where.geometry.num_planes;
  std::vector<Handle> run(handles.size() / planes);
  for (size_t row = 0; row < run.size(); ++row) run[row] = handles[row * planes + plane];
  return run;
}

void map_plane(Driver& driver, const RowRange& where, size_t plane,
               std::span<const Handle> handles) {
  const size_t chunk_bytes = where.geometry.chunk_bytes;
  const std::vector<Handle> run = plane_of(where, plane, handles);
  const size_t num_rows = run.size();
  const uintptr_t addr = where.vset.address(plane, where.slot, where.first_row);
  driver.map(addr, run, chunk_bytes);
  try {
    driver.set_access(addr, num_rows * chunk_bytes, Access::kReadWrite);
  } catch (const std::exception& failure) {
    try {
      driver.unmap(addr, num_rows * chunk_bytes, chunk_bytes);
    } catch (const std::exception& second) {
      throw_broken(failure, second);
    }
    throw;
  }
}

void unmap_plane(Driver& driver, const RowRange& where, size_t plane, size_t num_rows) {
  const size_t chunk_bytes = where.geometry.chunk_bytes;
  driver.unmap(where.vset.address(plane, where.slot, where.first_row), num_rows * chunk_bytes,
               chunk_bytes);
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
  const size_t num_rows = handles.size() / where.geometry.num_planes;
  for_planes(
      where.geometry.num_planes, [&](size_t plane) { map_plane(driver, where, plane, handles); },
      [&](size_t plane) { unmap_plane(driver, where, plane, num_rows); });
}

void unmap(Driver& driver, const RowRange& where, std::span<const Handle> handles) {
  if (handles.empty()) return;
  const size_t num_rows = handles.size() / where.geometry.num_planes;
  for_planes(
      where.geometry.num_planes, [&](size_t plane) { unmap_plane(driver, where, plane, num_rows); },
      [&](size_t plane) { map_plane(driver, where, plane, handles); });
}

void set_access(Driver& driver, const RowRange& where, size_t num_rows, Access before,
                Access after) {
  const auto set_plane = [&](size_t plane, Access access) {
    driver.set_access(where.vset.address(plane, where.slot, where.first_row),
                      num_rows * where.geometry.chunk_bytes, access);
  };
  for_planes(
      where.geometry.num_planes, [&](size_t plane) { set_plane(plane, after); },
      [&](size_t plane) { set_plane(plane, before); });
}

void remap(Driver& driver, const RowRange& where, const Mapped& before, const Mapped& after) {
  if (driver.remaps_in_place()) {
    const auto remap_plane = [&](size_t plane, const Mapped& mapped) {
      driver.remap(where.vset.address(plane, where.slot, where.first_row),
                   plane_of(where, plane, mapped.handles), where.geometry.chunk_bytes,
                   mapped.access);
    };
    for_planes(
        where.geometry.num_planes, [&](size_t plane) { remap_plane(plane, after); },
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
