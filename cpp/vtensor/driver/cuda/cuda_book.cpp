#include "vtensor/driver/cuda/cuda_book.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "vtensor/driver/cuda/cuda_api.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

[[noreturn]] void mistake(const std::string& what) { throw std::invalid_argument("cuda: " + what); }

std::string range_text(uintptr_t addr, size_t size_bytes) {
  return "[" + cuda_args("addr", addr, "size", size_bytes) + "]";
}

uint64_t key(Handle handle) { return static_cast<uint64_t>(handle); }

std::string chunk_text(Handle handle) { return "chunk " + std::to_string(key(handle)); }

}  // namespace

void CudaBook::check_size(size_t size_bytes, const char* what) const {
  if (size_bytes == 0 || size_bytes % granularity_ != 0) {
    mistake(std::string(what) + " " + std::to_string(size_bytes) +
            " is not a positive multiple of the granularity, " + std::to_string(granularity_) +
            " bytes");
  }
}

void CudaBook::add_reservation(uintptr_t addr, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  reservations_.emplace(addr, size_bytes);
}

void CudaBook::check_free(uintptr_t addr, size_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  const auto it = reservations_.find(addr);
  if (it == reservations_.end() || it->second != size_bytes) {
    mistake("free: " + range_text(addr, size_bytes) + " is not a range that reserve() returned");
  }
  check_nothing_mapped(addr, size_bytes);
}

void CudaBook::remove_reservation(uintptr_t addr) noexcept {
  const std::lock_guard lock(mutex_);
  reservations_.erase(addr);
}

void CudaBook::add_chunk(Handle handle, const Chunk& chunk) {
  const std::lock_guard lock(mutex_);
  chunks_.emplace(key(handle), chunk);
}

CudaBook::Chunk CudaBook::begin_release(Handle handle, size_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  const Chunk& chunk = find_chunk(handle, chunk_bytes);
  if (chunk.num_mappings != 0) {
    mistake("release: " + chunk_text(handle) + " is still mapped at " +
            std::to_string(chunk.num_mappings) + " address(es)");
  }
  chunks_.find(key(handle))->second.in_release = true;
  return chunk;
}

void CudaBook::finish_release(Handle handle) noexcept {
  const std::lock_guard lock(mutex_);
  chunks_.erase(key(handle));
}

void CudaBook::undo_release(Handle handle, uintptr_t window_addr) noexcept {
  const std::lock_guard lock(mutex_);
  Chunk& chunk = chunks_.find(key(handle))->second;
  chunk.window_addr = window_addr;
  chunk.in_release = false;
}

uintptr_t CudaBook::content_addr(Handle handle, size_t offset, size_t size_bytes) const {
  const std::lock_guard lock(mutex_);
  const Chunk& chunk = find_chunk(handle, 0);
  if (offset > chunk.size_bytes || size_bytes > chunk.size_bytes - offset) {
    mistake("offset " + std::to_string(offset) + " + " + std::to_string(size_bytes) +
            " bytes is outside " + chunk_text(handle) + " of " + std::to_string(chunk.size_bytes) +
            " bytes");
  }
  if (chunk.window_addr == 0) {
    mistake(chunk_text(handle) + " cannot be reached: an earlier release of it failed half way");
  }
  return chunk.window_addr + offset;
}

void CudaBook::claim_map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) {
  check_size(chunk_bytes, "chunk size");
  const size_t size_bytes = checked_mul(handles.size(), chunk_bytes, "map size");
  if (addr % granularity_ != 0) mistake("map: address is not aligned: " + cuda_args("addr", addr));
  std::map<uintptr_t, Mapping> added;  // allocated before anything changes; merge() cannot fail
  for (size_t i = 0; i < handles.size(); ++i) {
    added.emplace_hint(added.end(), addr + i * chunk_bytes, Mapping{handles[i], chunk_bytes});
  }
  const std::lock_guard lock(mutex_);
  check_inside_reservation(addr, size_bytes);
  check_nothing_mapped(addr, size_bytes);
  for (const Handle handle : handles) (void)find_chunk(handle, chunk_bytes);
  for (const Handle handle : handles) ++chunks_.find(key(handle))->second.num_mappings;
  mappings_.merge(added);
}

void CudaBook::forget_mappings(uintptr_t addr, size_t num_chunks) noexcept {
  const std::lock_guard lock(mutex_);
  auto it = mappings_.find(addr);
  for (size_t i = 0; i < num_chunks && it != mappings_.end(); ++i) {
    --chunks_.find(key(it->second.handle))->second.num_mappings;
    it = mappings_.erase(it);
  }
}

std::vector<CudaBook::PlacedMapping> CudaBook::check_run(uintptr_t addr, size_t size_bytes,
                                                         size_t chunk_bytes) const {
  std::vector<PlacedMapping> run;
  const std::lock_guard lock(mutex_);
  check_inside_reservation(addr, size_bytes);
  const uintptr_t end = addr + size_bytes;
  uintptr_t next = addr;
  for (auto it = mappings_.find(addr); next < end; ++it) {
    if (it == mappings_.end() || it->first != next || it->second.size_bytes > end - next) {
      mistake(range_text(addr, size_bytes) + " is not exactly a run of whole mapped chunks, see " +
              cuda_args("addr", next));
    }
    if (chunk_bytes != 0 && it->second.size_bytes != chunk_bytes) {
      mistake("chunk size " + std::to_string(chunk_bytes) + " given, but a chunk of " +
              std::to_string(it->second.size_bytes) + " bytes is mapped at " +
              cuda_args("addr", next));
    }
    run.push_back({it->first, it->second});
    next += it->second.size_bytes;
  }
  return run;
}

std::optional<Handle> CudaBook::mapped_at(uintptr_t addr) const {
  const std::lock_guard lock(mutex_);
  const auto found = mappings_.find(addr);
  if (found == mappings_.end()) return std::nullopt;
  return found->second.handle;
}

void CudaBook::set_run_access(uintptr_t addr, size_t size_bytes, Access access) noexcept {
  const std::lock_guard lock(mutex_);
  for (auto it = mappings_.find(addr); it != mappings_.end() && it->first < addr + size_bytes;
       ++it) {
    it->second.access = access;
  }
}

std::vector<CudaBook::PlacedMapping> CudaBook::all_mappings() const {
  std::vector<PlacedMapping> all;
  const std::lock_guard lock(mutex_);
  for (const auto& [addr, mapping] : mappings_) all.push_back({addr, mapping});
  return all;
}

void CudaBook::check_inside_reservation(uintptr_t addr, size_t size_bytes) const {
  auto it = reservations_.upper_bound(addr);
  if (it != reservations_.begin()) {
    --it;
    const size_t offset = addr - it->first;
    if (offset <= it->second && size_bytes <= it->second - offset) return;
  }
  mistake(range_text(addr, size_bytes) + " is not inside a reserved range");
}

void CudaBook::check_nothing_mapped(uintptr_t addr, size_t size_bytes) const {
  auto it = mappings_.lower_bound(addr);
  if (it != mappings_.begin() && std::prev(it)->first + std::prev(it)->second.size_bytes > addr) {
    --it;
  }
  if (it != mappings_.end() && it->first < addr + size_bytes) {
    mistake(range_text(addr, size_bytes) + " has " + chunk_text(it->second.handle) + " mapped at " +
            cuda_args("addr", it->first));
  }
}

const CudaBook::Chunk& CudaBook::find_chunk(Handle handle, size_t chunk_bytes) const {
  const auto it = chunks_.find(key(handle));
  if (it == chunks_.end() || it->second.in_release) {
    mistake(chunk_text(handle) + " does not exist");
  }
  if (chunk_bytes != 0 && it->second.size_bytes != chunk_bytes) {
    mistake(chunk_text(handle) + " has " + std::to_string(it->second.size_bytes) +
            " bytes, not the chunk size given, " + std::to_string(chunk_bytes));
  }
  return it->second;
}

}  // namespace vtensor
