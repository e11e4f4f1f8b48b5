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

// False: gave way.
bool prepare(Driver& driver, const Geometry& geometry, ExtensionPart& part,
             const GiveWay& give_way) {
  const CallScope scope(part.vtensor);
  for (std::vector<Claim>* claims : {&part.copies, &part.rows}) {
    if (!p_create(driver, geometry.chunk_bytes, *claims, give_way)) return false;
  }
  for (size_t i = 0; i < part.copies.size(); ++i) {
    const size_t column = part.copied_columns[i];
    const size_t entry = part.copied_row * geometry.row_chunks + column;
    const uint32_t used = geometry.bytes_used(entry, part.copied_tokens);
    if (used > 0) driver.copy(part.copies[i].handle, 0, part.originals[column], 0, used);
    part.copies[i].dirty_bytes = std::max(part.copies[i].dirty_bytes, used);
  }
  for (size_t i = 0; i < part.sources.size(); ++i) {
    if (part.sources[i] == kNoHandle) continue;
    // No more than the tokens: the rest of a source may be somebody else's.
    const size_t entry = part.first_row * geometry.row_chunks + i;
    const uint32_t used = geometry.bytes_used(entry, part.num_tokens);
    if (used > 0) driver.copy(part.rows[i].handle, 0, part.sources[i], 0, used);
    part.rows[i].dirty_bytes = std::max(part.rows[i].dirty_bytes, used);
  }
  return true;
}

struct PartMapper {
  Driver& driver;
  const VSet& vset;
  const Geometry& geometry;
  ExtensionPart& part;

  RowRange at(size_t row) const { return {vset, geometry, part.slot, row}; }

  std::vector<Handle> copies() const {
    std::vector<Handle> row(geometry.row_chunks, kNoHandle);
    for (size_t i = 0; i < part.copies.size(); ++i) {
      row[part.copied_columns[i]] = part.copies[i].handle;
    }
    return row;
  }

  Mapped originals() const { return {part.originals, part.originals_access}; }

  void map_part() {
    const CallScope scope(part.vtensor);
    if (!part.copies.empty()) remap(driver, at(part.copied_row), originals(), {copies()});
    try {
      map(driver, at(part.first_row), handles_of(part.rows));
    } catch (const BrokenMapping&) {
      throw;
    } catch (...) {
      if (!part.copies.empty()) unmap_tail();
      throw;
    }
  }

  void unmap_part() {
    const CallScope scope(part.vtensor);
    unmap(driver, at(part.first_row), handles_of(part.rows));
    if (!part.copies.empty()) unmap_tail();
  }

  void unmap_tail() {
    try {
      remap(driver, at(part.copied_row), {copies()}, originals());
    } catch (const std::exception& failure) {
      throw BrokenMapping(failure.what());
    }
  }
};

}  // namespace

size_t Extension::num_claims() const {
  size_t total = 0;
  for (const ExtensionPart& part : parts) total += part.rows.size() + part.copies.size();
  return total;
}

bool Extension::run(Driver& driver, const VSet& vset, const Geometry& geometry,
                    const GiveWay& give_way) {
  for (ExtensionPart& part : parts) {
    if (!prepare(driver, geometry, part, give_way)) return false;
  }
  size_t done = 0;
  try {
    for (; done < parts.size(); ++done) PartMapper{driver, vset, geometry, parts[done]}.map_part();
  } catch (const std::exception& failure) {
    const std::exception_ptr first = std::current_exception();
    if (dynamic_cast<const BrokenMapping*>(&failure) != nullptr) parts[done].broken = true;
    while (done > 0) {
      ExtensionPart& part = parts[--done];
      try {
        PartMapper{driver, vset, geometry, part}.unmap_part();
      } catch (const std::exception&) {
        part.broken = true;
      }
    }
    std::rethrow_exception(first);
  }
  return true;
}

}  // namespace vtensor
