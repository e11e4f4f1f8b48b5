// CudaDriver: chunks behind ranges, and taking them away.
#include <algorithm>
#include <stdexcept>

#include "vtensor/driver/cuda/cuda_driver.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {
namespace {

using cuda::CUDA_SUCCESS;

cuda::CUmemAccess_flags access_flags(Access access) {
  switch (access) {
    case Access::kNone:
      return cuda::CU_MEM_ACCESS_FLAGS_PROT_NONE;
    case Access::kRead:
      return cuda::CU_MEM_ACCESS_FLAGS_PROT_READ;
    case Access::kCopyOnWrite:  // refused by set_access()
    case Access::kReadWrite:
      break;
  }
  return cuda::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
}

}  // namespace

std::vector<CudaDriver::Mapping> CudaDriver::chunks_of(std::span<const Ledger::Run> runs) {
  const size_t chunk_bytes = ledger_.chunk_bytes();
  std::vector<Mapping> mappings;
  for (const Ledger::Run& run : runs) {
    for (size_t done = 0; done < run.size_bytes; done += chunk_bytes) {
      const auto memory = allocation(Handle{run.offset + done}).handle;
      mappings.push_back({run.addr + done, memory, chunk_bytes, run.access});
    }
  }
  return mappings;
}

void CudaDriver::map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) {
  if (handles.empty()) return;
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  std::vector<cuda::CUmemGenericAllocationHandle> memory;
  {
    const std::lock_guard lock(mutex_);
    ledger_.map(addr, handles, chunk_bytes);
    for (const Handle handle : handles) memory.push_back(allocation(handle).handle);
  }
  size_t num_mapped = 0;
  auto code = CUDA_SUCCESS;
  for (; num_mapped < memory.size(); ++num_mapped) {
    code = api().cuMemMap(addr + num_mapped * chunk_bytes, chunk_bytes, 0, memory[num_mapped], 0);
    if (code != CUDA_SUCCESS) break;
  }
  if (code == CUDA_SUCCESS) return;

  std::vector<bool> is_stuck(memory.size());
  for (size_t i = 0; i < num_mapped; ++i) {
    is_stuck[i] = api().cuMemUnmap(addr + i * chunk_bytes, chunk_bytes) != CUDA_SUCCESS;
  }
  const auto num_stuck = std::ranges::count(is_stuck, true);
  {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < memory.size(); ++i) {
      if (!is_stuck[i]) ledger_.unmap(addr + i * chunk_bytes, chunk_bytes, chunk_bytes);
    }
  }
  api().fail(code, "cuMemMap",
             cuda_args("addr", addr + num_mapped * chunk_bytes, "size", chunk_bytes, "handle",
                       memory[num_mapped], "chunk", num_mapped, "of", memory.size()),
             num_stuck == 0 ? ""
                            : "and the rollback failed: " + std::to_string(num_stuck) +
                                  " chunk(s) of this call stay mapped");
}

cuda::CUresult CudaDriver::grant(uintptr_t addr, size_t size_bytes, Access access) const noexcept {
  cuda::CUmemAccessDesc desc{};
  desc.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, context_->device_index()};
  desc.flags = access_flags(access);
  return api().cuMemSetAccess(addr, size_bytes, &desc, 1);
}

void CudaDriver::set_access(uintptr_t addr, size_t size_bytes, Access access) {
  if (size_bytes == 0) return;
  if (access == Access::kCopyOnWrite) {
    throw std::invalid_argument("cuda: memory cannot be mapped copy-on-write");
  }
  std::vector<Ledger::Run> before;
  {
    const std::lock_guard lock(mutex_);
    before = ledger_.set_access(addr, size_bytes, access);
  }
  ScopeFail undo([&] {
    const std::lock_guard lock(mutex_);
    ledger_.undo_set_access(before);
  });
  const CudaContext::Scope scope(*context_);
  api().check(grant(addr, size_bytes, access), "cuMemSetAccess", [&] {
    return cuda_args("addr", addr, "size", size_bytes, "flags",
                     static_cast<int>(access_flags(access)));
  });
  undo.dismiss();
}

void CudaDriver::unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) {
  if (size_bytes == 0) return;
  const CudaContext::Scope scope(*context_);
  std::vector<Ledger::Run> before;
  std::vector<Mapping> mappings;
  {
    const std::lock_guard lock(mutex_);
    before = ledger_.unmap(addr, size_bytes, chunk_bytes);
    mappings = chunks_of(before);
  }
  std::vector<uintptr_t> lost;  // by a rollback that failed
  ScopeFail undo([&] {
    const std::lock_guard lock(mutex_);
    ledger_.undo_unmap(before);
    for (const uintptr_t gone : lost) ledger_.unmap(gone, chunk_bytes, chunk_bytes);
  });
  unmap_from_driver(mappings, lost);
  undo.dismiss();
}

// One call for the run: NVIDIA's own sample (vectorAddMMAP, multiple handles behind one range) does
// that, and one call is all-or-nothing by itself. The documentation only says "the entire
// contiguous address range that was mapped", so a driver that refuses is taken at its word, one
// chunk at a time.
void CudaDriver::unmap_from_driver(std::span<const Mapping> mappings,
                                   std::vector<uintptr_t>& lost) {
  const uintptr_t addr = mappings.front().addr;
  const size_t size_bytes = mappings.back().addr + mappings.back().size_bytes - addr;
  if (mappings.size() == 1 || can_unmap_runs_.load(std::memory_order_relaxed)) {
    const auto code = api().cuMemUnmap(addr, size_bytes);
    if (code == CUDA_SUCCESS) return;
    if (mappings.size() == 1 || code != cuda::CUDA_ERROR_INVALID_VALUE) {
      api().fail(code, "cuMemUnmap",
                 cuda_args("addr", addr, "size", size_bytes, "chunks", mappings.size()));
    }
  }
  unmap_one_by_one(mappings, lost);
  can_unmap_runs_.store(false, std::memory_order_relaxed);
}

void CudaDriver::unmap_one_by_one(std::span<const Mapping> mappings, std::vector<uintptr_t>& lost) {
  lost.reserve(mappings.size());
  for (size_t i = 0; i < mappings.size(); ++i) {
    const auto code = api().cuMemUnmap(mappings[i].addr, mappings[i].size_bytes);
    if (code == CUDA_SUCCESS) continue;
    for (const Mapping& mapping : mappings.first(i)) {
      if (map_again(mapping) != CUDA_SUCCESS) lost.push_back(mapping.addr);
    }
    api().fail(code, "cuMemUnmap",
               cuda_args("addr", mappings[i].addr, "size", mappings[i].size_bytes, "chunk", i, "of",
                         mappings.size()),
               lost.empty() ? ""
                            : "and the rollback failed: " + std::to_string(lost.size()) +
                                  " chunk(s) of this call stay unmapped");
  }
}

cuda::CUresult CudaDriver::map_again(const Mapping& mapping) const noexcept {
  auto code = api().cuMemMap(mapping.addr, mapping.size_bytes, 0, mapping.handle, 0);
  if (code != CUDA_SUCCESS || mapping.access == Access::kNone) return code;
  code = grant(mapping.addr, mapping.size_bytes, mapping.access);
  if (code != CUDA_SUCCESS) (void)api().cuMemUnmap(mapping.addr, mapping.size_bytes);
  return code;
}

std::optional<Handle> CudaDriver::mapped_at(uintptr_t addr) const {
  const std::lock_guard lock(mutex_);
  return ledger_.mapped_at(addr);
}

}  // namespace vtensor
