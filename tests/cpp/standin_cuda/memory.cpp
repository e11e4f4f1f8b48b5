// Reservations, physical memory and mappings. Sources of the rules: the documentation of each
// function in <cuda.h> ("Virtual Memory Management").
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "state.h"

namespace {

using namespace standin;  // NOLINT

void* as_pointer(uint64_t addr) { return reinterpret_cast<void*>(addr); }

int protection(int access) {
  if (access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE) return PROT_READ | PROT_WRITE;
  return access == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_NONE;
}

bool inside_reservation(uint64_t addr, size_t size_bytes) {
  const auto& reservations = state().reservations;
  auto it = reservations.upper_bound(addr);
  if (it == reservations.begin()) return false;
  --it;
  return addr - it->first <= it->second && size_bytes <= it->second - (addr - it->first);
}

std::map<uint64_t, Mapping>::iterator first_overlap(uint64_t addr, size_t size_bytes) {
  auto& mappings = state().mappings;
  auto it = mappings.lower_bound(addr);
  if (it != mappings.begin() && std::prev(it)->first + std::prev(it)->second.size_bytes > addr) {
    --it;
  }
  return it != mappings.end() && it->first < addr + size_bytes ? it : mappings.end();
}

// How many whole mappings fill the range exactly; 0 when they do not.
size_t whole_mappings(uint64_t addr, size_t size_bytes) {
  const auto& mappings = state().mappings;
  size_t count = 0;
  uint64_t next = addr;
  for (auto it = mappings.find(addr); it != mappings.end() && next < addr + size_bytes; ++it) {
    if (it->first != next) return 0;
    next += it->second.size_bytes;
    ++count;
  }
  return next == addr + size_bytes ? count : 0;
}

bool is_multiple(uint64_t value) { return value % state().granularity == 0; }

void free_if_unused(const std::shared_ptr<Allocation>& allocation) {
  if (!allocation->released || allocation->num_mappings != 0) return;
  State& s = state();
  if (allocation->shared.get() < 0) {
    (void)fallocate(s.memfd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, allocation->file_offset,
                    static_cast<off_t>(allocation->size_bytes));
  }
  allocation->shared = {};
  if (!allocation->is_imported) s.used_bytes[allocation->device] -= allocation->size_bytes;
  --s.num_allocations;
}

// CUDA promises nothing about the contents of new memory, so make sure that nobody relies on zeros.
void poison(int fd, int64_t file_offset, size_t size_bytes) {
  const std::string junk(kPageBytes, static_cast<char>(0xCD));
  const auto last = file_offset + static_cast<int64_t>(size_bytes - kPageBytes);
  (void)!pwrite(fd, junk.data(), junk.size(), file_offset);
  (void)!pwrite(fd, junk.data(), junk.size(), last);
}

CUresult check_prop(const char* function, const CUmemAllocationProp* prop) {
  if (prop == nullptr || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED ||
      prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      (prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE &&
       prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) ||
      prop->win32HandleMetaData != nullptr) {
    return violation(CUDA_ERROR_INVALID_VALUE, function, "bad allocation properties");
  }
  if (prop->location.id < 0 || prop->location.id >= state().num_devices) {
    return violation(CUDA_ERROR_INVALID_DEVICE, function,
                     "device " + std::to_string(prop->location.id) + " does not exist");
  }
  return CUDA_SUCCESS;
}

CUresult check_range(const char* function, uint64_t addr, size_t size_bytes) {
  if (size_bytes == 0 || !is_multiple(size_bytes) || !is_multiple(addr)) {
    return violation(CUDA_ERROR_INVALID_VALUE, function,
                     range_text(addr, size_bytes) + " is not a multiple of the granularity");
  }
  return CUDA_SUCCESS;
}

CUresult check_idle(const char* function, uint64_t addr, size_t size_bytes) {
  if (in_flight(addr, size_bytes)) {
    return violation(CUDA_ERROR_ILLEGAL_ADDRESS, function,
                     range_text(addr, size_bytes) + " is in use by a kernel or copy in flight");
  }
  return CUDA_SUCCESS;
}

}  // namespace

bool standin::extend_file(size_t size_bytes) {
  State& s = state();
  if (s.memfd < 0) s.memfd = memfd_create("standin_cuda", MFD_CLOEXEC);
  if (s.memfd < 0) return false;
  return ftruncate(s.memfd, s.file_end + static_cast<off_t>(size_bytes)) == 0;
}

uint64_t standin::add_allocation(Allocation allocation) {
  State& s = state();
  allocation.handle = s.next_id++;
  allocation.file_offset = s.file_end;
  s.file_end += static_cast<int64_t>(allocation.size_bytes);
  ++s.num_allocations;
  const uint64_t handle = allocation.handle;
  s.handles.emplace(handle, std::make_shared<Allocation>(std::move(allocation)));
  return handle;
}

bool standin::translate(uint64_t addr, size_t size_bytes, int access,
                        std::vector<Range>* physical) {
  const auto& mappings = state().mappings;
  auto it = mappings.upper_bound(addr);
  if (it == mappings.begin()) return false;
  --it;
  for (uint64_t next = addr; next < addr + size_bytes; ++it) {
    if (it == mappings.end() || next < it->first || next >= it->first + it->second.size_bytes ||
        (it->second.access & access) != access) {
      return false;
    }
    const uint64_t end = std::min(addr + size_bytes, it->first + it->second.size_bytes);
    if (physical != nullptr) {
      const auto offset = static_cast<uint64_t>(it->second.allocation->file_offset);
      physical->push_back({offset + (next - it->first), end - next});
    }
    next = end;
  }
  return true;
}

STANDIN_EXPORT CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
  STANDIN_ENTER("cuMemGetInfo", Needs::kContext);
  const uint64_t used = state().used_bytes[current_device()];
  *total_bytes = state().capacity_bytes;
  *free_bytes = used < state().capacity_bytes ? state().capacity_bytes - used : 0;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemGetAllocationGranularity(size_t* granularity,
                                                      const CUmemAllocationProp* prop,
                                                      CUmemAllocationGranularity_flags option) {
  constexpr char kFunction[] = "cuMemGetAllocationGranularity";
  STANDIN_ENTER(kFunction, Needs::kInit);
  if (const auto code = check_prop(kFunction, prop); code != CUDA_SUCCESS) return code;
  if (option != CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
      option != CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "bad option");
  }
  *granularity = state().granularity;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* ptr, size_t size, size_t alignment,
                                            CUdeviceptr hint, unsigned long long flags) {
  constexpr char kFunction[] = "cuMemAddressReserve";
  STANDIN_ENTER(kFunction, Needs::kContext);
  (void)hint;
  if (const auto code = check_range(kFunction, 0, size); code != CUDA_SUCCESS) return code;
  if (flags != 0 || (alignment & (alignment - 1)) != 0) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "flags, or alignment no power of two");
  }
  const size_t aligned_to = std::max(alignment, state().granularity);
  const size_t mapped = size + aligned_to;
  if (mapped < size) return CUDA_ERROR_OUT_OF_MEMORY;
  void* start =
      mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto begin = reinterpret_cast<uint64_t>(start);
  const uint64_t addr = (begin + aligned_to - 1) / aligned_to * aligned_to;
  if (addr > begin) (void)munmap(start, addr - begin);
  if (begin + mapped > addr + size) {
    (void)munmap(as_pointer(addr + size), begin + mapped - (addr + size));
  }
  state().reservations[addr] = size;
  *ptr = addr;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemAddressFree(CUdeviceptr ptr, size_t size) {
  constexpr char kFunction[] = "cuMemAddressFree";
  STANDIN_ENTER(kFunction, Needs::kContext);
  auto& reservations = state().reservations;
  const auto it = reservations.find(ptr);
  if (it == reservations.end() || it->second != size) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     range_text(ptr, size) + " is no whole reservation");
  }
  if (first_overlap(ptr, size) != state().mappings.end()) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     range_text(ptr, size) + " still has memory mapped");
  }
  (void)munmap(as_pointer(ptr), size);
  reservations.erase(it);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size,
                                    const CUmemAllocationProp* prop, unsigned long long flags) {
  constexpr char kFunction[] = "cuMemCreate";
  STANDIN_ENTER(kFunction, Needs::kContext);
  State& s = state();
  if (const auto code = check_prop(kFunction, prop); code != CUDA_SUCCESS) return code;
  if (flags != 0) return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "flags must be 0");
  if (const auto code = check_range(kFunction, 0, size); code != CUDA_SUCCESS) return code;
  const int device = prop->location.id;
  if (s.used_bytes[device] + size > s.capacity_bytes || !extend_file(size)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  Allocation allocation{.device = device, .size_bytes = size};
  if (prop->requestedHandleTypes == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    allocation.shared = shared_file(device, size);
    if (allocation.shared.get() < 0) return CUDA_ERROR_OUT_OF_MEMORY;
    poison(allocation.shared.get(), 0, size);
  } else {
    poison(s.memfd, s.file_end, size);
  }
  s.used_bytes[device] += size;
  *handle = add_allocation(std::move(allocation));
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  STANDIN_ENTER("cuMemRelease", Needs::kContext);
  const auto it = state().handles.find(handle);
  if (it == state().handles.end()) {
    return violation(CUDA_ERROR_INVALID_VALUE, "cuMemRelease",
                     "handle " + hex(handle) + " does not exist or was released before");
  }
  const auto allocation = it->second;
  state().handles.erase(it);
  allocation->released = true;  // mappings keep the memory, as documented
  free_if_unused(allocation);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemMap(CUdeviceptr ptr, size_t size, size_t offset,
                                 CUmemGenericAllocationHandle handle, unsigned long long flags) {
  constexpr char kFunction[] = "cuMemMap";
  STANDIN_ENTER(kFunction, Needs::kContext);
  State& s = state();
  if (flags != 0) return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "flags must be 0");
  if (offset != 0) return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "offset must be 0");
  if (const auto code = check_range(kFunction, ptr, size); code != CUDA_SUCCESS) return code;
  const auto it = s.handles.find(handle);
  if (it == s.handles.end()) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     "handle " + hex(handle) + " does not exist");
  }
  const auto& allocation = it->second;
  if (size > allocation->size_bytes) {
    if (allocation->is_imported) return CUDA_ERROR_INVALID_VALUE;  // others chose its size
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "more than the allocation holds");
  }
  if (!inside_reservation(ptr, size)) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     range_text(ptr, size) + " is not reserved");
  }
  if (first_overlap(ptr, size) != s.mappings.end()) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     range_text(ptr, size) + " has memory mapped already");
  }
  if (const auto code = check_idle(kFunction, ptr, size); code != CUDA_SUCCESS) return code;
  const bool is_shared = allocation->shared.get() >= 0;
  void* mapped =
      mmap(as_pointer(ptr), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
           is_shared ? allocation->shared.get() : s.memfd, is_shared ? 0 : allocation->file_offset);
  if (mapped == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  s.mappings.emplace(ptr, Mapping{size, allocation});
  ++allocation->num_mappings;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemUnmap(CUdeviceptr ptr, size_t size) {
  constexpr char kFunction[] = "cuMemUnmap";
  STANDIN_ENTER(kFunction, Needs::kContext);
  State& s = state();
  if (const auto code = check_range(kFunction, ptr, size); code != CUDA_SUCCESS) return code;
  const size_t count = whole_mappings(ptr, size);
  if (count == 0) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     range_text(ptr, size) + " is not a run of whole mappings");
  }
  if (s.single_unmap && count > 1) return CUDA_ERROR_INVALID_VALUE;
  if (const auto code = check_idle(kFunction, ptr, size); code != CUDA_SUCCESS) return code;
  void* mapped = mmap(as_pointer(ptr), size, PROT_NONE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  if (mapped == MAP_FAILED) return CUDA_ERROR_UNKNOWN;
  for (auto it = s.mappings.find(ptr); it != s.mappings.end() && it->first < ptr + size;) {
    const auto allocation = it->second.allocation;
    it = s.mappings.erase(it);
    --allocation->num_mappings;
    free_if_unused(allocation);
  }
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemSetAccess(CUdeviceptr ptr, size_t size, const CUmemAccessDesc* desc,
                                       size_t count) {
  constexpr char kFunction[] = "cuMemSetAccess";
  STANDIN_ENTER(kFunction, Needs::kContext);
  State& s = state();
  if (const auto code = check_range(kFunction, ptr, size); code != CUDA_SUCCESS) return code;
  if (desc == nullptr || count != 1 || desc->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
      (desc->flags != CU_MEM_ACCESS_FLAGS_PROT_NONE &&
       desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READ &&
       desc->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "bad access description");
  }
  if (desc->location.id < 0 || desc->location.id >= s.num_devices) {
    return violation(CUDA_ERROR_INVALID_DEVICE, kFunction, "device does not exist");
  }
  if (whole_mappings(ptr, size) == 0) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     range_text(ptr, size) + " is not a run of whole mappings without holes");
  }
  // No peer access in this model: one process uses each device on its own.
  for (auto it = s.mappings.find(ptr); it != s.mappings.end() && it->first < ptr + size; ++it) {
    if (it->second.allocation->device != desc->location.id) {
      return violation(CUDA_ERROR_INVALID_DEVICE, kFunction, "memory of another device");
    }
  }
  if (const auto code = check_idle(kFunction, ptr, size); code != CUDA_SUCCESS) return code;
  if (mprotect(as_pointer(ptr), size, protection(desc->flags)) != 0) return CUDA_ERROR_UNKNOWN;
  for (auto it = s.mappings.find(ptr); it != s.mappings.end() && it->first < ptr + size; ++it) {
    it->second.access = desc->flags;
  }
  return CUDA_SUCCESS;
}
