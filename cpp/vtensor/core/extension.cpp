#include "vtensor/core/extension.h"

#include <algorithm>
#include <exception>

#include "vtensor/driver/call_scope.h"

namespace vtensor {
namespace {

std::vector<Handle> handles_of(const std::vector<Claim>& claims) {
  std::vector<Handle> handles;
  handles.reserve(claims.size());
  for (const Claim& claim : claims) handles.push_back(claim.handle);
  return handles;
}

void prepare(Driver& driver, const Geometry& geometry, GrowthPart& part) {
  const CallScope scope(part.vtensor);
  p_create(driver, geometry.chunk_bytes, part.tail);
  p_create(driver, geometry.chunk_bytes, part.rows);
  for (size_t i = 0; i < part.tail.size(); ++i) {
    driver.copy(part.tail[i].handle, 0, part.old_tail[i], 0, part.tail_bytes);
    part.tail[i].dirty_bytes = std::max(part.tail[i].dirty_bytes, part.tail_bytes);
  }
  for (size_t i = 0; i < part.sources.size(); ++i) {
    // No more than the tokens: the rest of a source may be somebody else's.
    const size_t row = part.first_row + i / geometry.num_planes;
    const size_t used = geometry.bytes_used(row, part.num_tokens);
    driver.copy(part.rows[i].handle, 0, part.sources[i], 0, used);
    part.rows[i].dirty_bytes = std::max(part.rows[i].dirty_bytes, used);
  }
}

struct PartMapper {
  Driver& driver;
  const VSet& vset;
  const Geometry& geometry;
  GrowthPart& part;

  RowRange at(size_t row) const { return {vset, geometry, part.slot, row}; }

  void map_part() {
    const CallScope scope(part.vtensor);
    if (!part.tail.empty()) remap(driver, at(part.tail_row), part.old_tail, handles_of(part.tail));
    try {
      map(driver, at(part.first_row), handles_of(part.rows));
    } catch (const BrokenMapping&) {
      throw;
    } catch (...) {
      if (!part.tail.empty()) unmap_tail();
      throw;
    }
  }

  void unmap_part() {
    const CallScope scope(part.vtensor);
    unmap(driver, at(part.first_row), handles_of(part.rows));
    if (!part.tail.empty()) unmap_tail();
  }

  void unmap_tail() {
    try {
      remap(driver, at(part.tail_row), handles_of(part.tail), part.old_tail);
    } catch (const std::exception& failure) {
      throw BrokenMapping(failure.what());
    }
  }
};

}  // namespace

size_t Growth::num_claims() const {
  size_t total = 0;
  for (const GrowthPart& part : parts) total += part.rows.size() + part.tail.size();
  return total;
}

void Growth::run(Driver& driver, const VSet& vset, const Geometry& geometry) {
  for (GrowthPart& part : parts) prepare(driver, geometry, part);
  size_t done = 0;
  try {
    for (; done < parts.size(); ++done) PartMapper{driver, vset, geometry, parts[done]}.map_part();
  } catch (const std::exception& failure) {
    const std::exception_ptr first = std::current_exception();
    if (dynamic_cast<const BrokenMapping*>(&failure) != nullptr) parts[done].broken = true;
    while (done > 0) {
      GrowthPart& part = parts[--done];
      try {
        PartMapper{driver, vset, geometry, part}.unmap_part();
      } catch (const std::exception&) {
        part.broken = true;
      }
    }
    std::rethrow_exception(first);
  }
}

}  // namespace vtensor
