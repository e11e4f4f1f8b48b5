#include "vtensor/driver/cuda/cuda_driver.h"

#include <bit>
#include <stdexcept>
#include <utility>

#include "vtensor/util/error.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {
namespace {

using cuda::CUDA_SUCCESS;

uint64_t raw(Handle handle) { return static_cast<uint64_t>(handle); }

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

// Checked before libcuda is even opened, so that the mistake is named on every machine.
std::shared_ptr<const CudaContext> open_context(const CudaOptions& options) {
  if (options.unmapped == UnmappedPolicy::kZero) {
    throw std::invalid_argument(
        "cuda: unmapped='zero' is not available: CUDA has no lazy zero page; use 'guard', and a "
        "mapped, scrubbed tail for padded kernels");
  }
  return std::make_shared<const CudaContext>(CudaApi::load(options.libcuda_path),
                                             options.device_index);
}

cuda::CUmemAllocationProp prop_on(int device_index) {
  cuda::CUmemAllocationProp prop{};
  prop.type = cuda::CU_MEM_ALLOCATION_TYPE_PINNED;
  prop.location = {cuda::CU_MEM_LOCATION_TYPE_DEVICE, device_index};
  return prop;
}

size_t query_granularity(const CudaContext& context) {
  const CudaContext::Scope scope(context);
  const auto prop = prop_on(context.device_index());
  size_t granularity = 0;
  context.api().check(context.api().cuMemGetAllocationGranularity(
                          &granularity, &prop, cuda::CU_MEM_ALLOC_GRANULARITY_MINIMUM),
                      "cuMemGetAllocationGranularity",
                      [&] { return cuda_args("device", context.device_index()); });
  return granularity;
}

}  // namespace

CudaDriver::CudaDriver(const CudaOptions& options)
    : context_(open_context(options)),
      granularity_(query_granularity(*context_)),
      book_(granularity_),
      window_(context_, options.window_slab_bytes) {
  const CudaContext::Scope scope(*context_);
  stream_ = create_stream();
  ScopeFail destroy([&] { (void)api().cuStreamDestroy(stream_); });
  zero_stream_ = create_stream();
  destroy.dismiss();
}

// Non-blocking: the legacy default stream would otherwise order every copy after all of torch's
// work, and all of torch's work after every copy.
cuda::CUstream CudaDriver::create_stream() const {
  cuda::CUstream stream = nullptr;
  api().check(api().cuStreamCreate(&stream, cuda::CU_STREAM_NON_BLOCKING), "cuStreamCreate",
              [] { return cuda_args("flags", "NON_BLOCKING"); });
  return stream;
}

CudaDriver::~CudaDriver() {
  try {
    const CudaContext::Scope scope(*context_);
    (void)api().cuStreamSynchronize(stream_);
    (void)api().cuStreamSynchronize(zero_stream_);
    for (const auto& [addr, mapping] : book_.all_mappings()) {
      (void)api().cuMemUnmap(addr, mapping.size_bytes);
    }
    for (const auto& [handle, chunk] : book_.chunks()) {
      if (chunk.window_addr != 0) (void)api().cuMemUnmap(chunk.window_addr, chunk.size_bytes);
      (void)api().cuMemRelease(handle);
    }
    for (const auto& [addr, size_bytes] : book_.reservations()) {
      (void)api().cuMemAddressFree(addr, size_bytes);
    }
    (void)api().cuStreamDestroy(stream_);
    (void)api().cuStreamDestroy(zero_stream_);
  } catch (...) {
    // The driver is going down and takes everything with it; a destructor must not throw.
  }
}

uintptr_t CudaDriver::reserve(size_t size_bytes, size_t alignment_bytes) {
  book_.check_size(size_bytes, "range size");
  if (!std::has_single_bit(alignment_bytes) || alignment_bytes < granularity_) {
    throw std::invalid_argument("cuda: alignment " + std::to_string(alignment_bytes) +
                                " is not a power of two >= the granularity, " +
                                std::to_string(granularity_));
  }
  const CudaContext::Scope scope(*context_);
  const auto arguments = [&] {
    return cuda_args("size", size_bytes, "alignment", alignment_bytes);
  };
  cuda::CUdeviceptr addr = 0;
  api().check(api().cuMemAddressReserve(&addr, size_bytes, alignment_bytes, 0, 0),
              "cuMemAddressReserve", arguments);
  ScopeFail give_back([&] { (void)api().cuMemAddressFree(addr, size_bytes); });
  if (addr % alignment_bytes != 0) {
    api().fail(cuda::CUDA_ERROR_NOT_SUPPORTED, "cuMemAddressReserve", arguments(),
               "the driver returned an address without the alignment asked for");
  }
  book_.add_reservation(addr, size_bytes);
  give_back.dismiss();
  return addr;
}

void CudaDriver::free(uintptr_t addr, size_t size_bytes) {
  book_.check_free(addr, size_bytes);
  const CudaContext::Scope scope(*context_);
  api().check(api().cuMemAddressFree(addr, size_bytes), "cuMemAddressFree",
              [&] { return cuda_args("addr", addr, "size", size_bytes); });
  book_.remove_reservation(addr);
}

Handle CudaDriver::create(size_t chunk_bytes) {
  book_.check_size(chunk_bytes, "chunk size");
  const CudaContext::Scope scope(*context_);
  const auto slot = window_.acquire(chunk_bytes);
  bool slot_is_clean = true;
  ScopeFail give_back([&] {
    if (slot_is_clean) window_.give_back(slot, chunk_bytes);
  });
  const auto prop = prop_on(context_->device_index());
  cuda::CUmemGenericAllocationHandle handle = 0;
  check_create(api().cuMemCreate(&handle, chunk_bytes, &prop, 0), "cuMemCreate", chunk_bytes);
  ScopeFail release([&] { (void)api().cuMemRelease(handle); });

  check_create(api().cuMemMap(slot, chunk_bytes, 0, handle, 0), "cuMemMap", chunk_bytes);
  ScopeFail unmap([&] { slot_is_clean = api().cuMemUnmap(slot, chunk_bytes) == CUDA_SUCCESS; });
  check_create(grant(slot, chunk_bytes, Access::kReadWrite), "cuMemSetAccess", chunk_bytes);

  check_create(api().cuMemsetD8Async(slot, 0, chunk_bytes, zero_stream_), "cuMemsetD8Async",
               chunk_bytes);
  num_zero_fills_.fetch_add(1);
  book_.add_chunk(Handle{handle}, {.size_bytes = chunk_bytes, .window_addr = slot});
  unmap.dismiss();
  release.dismiss();
  give_back.dismiss();
  return Handle{handle};
}

void CudaDriver::check_create(cuda::CUresult code, const char* call, size_t chunk_bytes) const {
  if (code == cuda::CUDA_ERROR_OUT_OF_MEMORY) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    (void)api().cuMemGetInfo(&free_bytes, &total_bytes);
    throw OutOfMemoryError(
        chunk_bytes, free_bytes, total_bytes,
        std::string(call) + " on CUDA device " + std::to_string(context_->device_index()) + " (" +
            context_->device_name() + "); free torch's cached memory or lower the KV budget");
  }
  api().check(code, call, [&] {
    return cuda_args("device", context_->device_index(), "chunk_bytes", chunk_bytes);
  });
}

// Unmap before release, so that a refused unmap leaves the handle whole. When the release is what
// is refused, the window mapping is made again.
void CudaDriver::release(Handle handle, size_t chunk_bytes) {
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  const CudaBook::Chunk chunk = book_.begin_release(handle, chunk_bytes);
  uintptr_t window_addr = chunk.window_addr;
  ScopeFail undo([&] { book_.undo_release(handle, window_addr); });
  if (window_addr != 0) {
    api().check(api().cuMemUnmap(window_addr, chunk_bytes), "cuMemUnmap",
                [&] { return cuda_args("window_addr", window_addr, "size", chunk_bytes); });
  }
  const auto code = api().cuMemRelease(raw(handle));
  if (code != CUDA_SUCCESS) {
    std::string detail;
    const CudaBook::PlacedMapping window{window_addr, {handle, chunk_bytes, Access::kReadWrite}};
    if (window_addr != 0 && map_again(window) != CUDA_SUCCESS) {
      window_addr = 0;
      detail = "and the rollback failed: the chunk's contents cannot be reached any more";
    }
    api().fail(code, "cuMemRelease", cuda_args("handle", raw(handle)), detail);
  }
  undo.dismiss();
  book_.finish_release(handle);
  if (window_addr != 0) window_.give_back(window_addr, chunk_bytes);
}

void CudaDriver::map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) {
  if (handles.empty()) return;
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  book_.claim_map(addr, handles, chunk_bytes);
  size_t num_mapped = 0;
  auto code = CUDA_SUCCESS;
  for (; num_mapped < handles.size(); ++num_mapped) {
    code = api().cuMemMap(addr + num_mapped * chunk_bytes, chunk_bytes, 0, raw(handles[num_mapped]),
                          0);
    if (code != CUDA_SUCCESS) break;
  }
  if (code == CUDA_SUCCESS) return;

  const uintptr_t failed_addr = addr + num_mapped * chunk_bytes;
  book_.forget_mappings(failed_addr, handles.size() - num_mapped);
  size_t num_stuck = 0;
  for (uintptr_t done_addr = addr; done_addr < failed_addr; done_addr += chunk_bytes) {
    if (api().cuMemUnmap(done_addr, chunk_bytes) == CUDA_SUCCESS) {
      book_.forget_mappings(done_addr, 1);
    } else {
      ++num_stuck;
    }
  }
  api().fail(code, "cuMemMap",
             cuda_args("addr", failed_addr, "size", chunk_bytes, "handle", raw(handles[num_mapped]),
                       "chunk", num_mapped, "of", handles.size()),
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
  (void)book_.check_run(addr, size_bytes, 0);
  const CudaContext::Scope scope(*context_);
  api().check(grant(addr, size_bytes, access), "cuMemSetAccess", [&] {
    return cuda_args("addr", addr, "size", size_bytes, "flags",
                     static_cast<int>(access_flags(access)));
  });
  book_.set_run_access(addr, size_bytes, access);
}

void CudaDriver::unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) {
  if (size_bytes == 0) return;
  book_.check_size(chunk_bytes, "chunk size");
  const auto run = book_.check_run(addr, size_bytes, chunk_bytes);
  const CudaContext::Scope scope(*context_);
  unmap_run(run);
  book_.forget_mappings(addr, run.size());
}

// One call for the run: NVIDIA's own sample (vectorAddMMAP, multiple handles behind one range) does
// that, and one call is all-or-nothing by itself. The documentation only says "the entire
// contiguous address range that was mapped", so a driver that refuses is taken at its word, one
// chunk at a time.
void CudaDriver::unmap_run(std::span<const CudaBook::PlacedMapping> run) {
  const uintptr_t addr = run.front().addr;
  const size_t size_bytes = run.back().addr + run.back().mapping.size_bytes - addr;
  if (run.size() == 1 || can_unmap_runs_.load(std::memory_order_relaxed)) {
    const auto code = api().cuMemUnmap(addr, size_bytes);
    if (code == CUDA_SUCCESS) return;
    if (run.size() == 1 || code != cuda::CUDA_ERROR_INVALID_VALUE) {
      api().fail(code, "cuMemUnmap",
                 cuda_args("addr", addr, "size", size_bytes, "chunks", run.size()));
    }
  }
  unmap_one_by_one(run);
  can_unmap_runs_.store(false, std::memory_order_relaxed);
}

void CudaDriver::unmap_one_by_one(std::span<const CudaBook::PlacedMapping> run) {
  for (size_t i = 0; i < run.size(); ++i) {
    const auto code = api().cuMemUnmap(run[i].addr, run[i].mapping.size_bytes);
    if (code == CUDA_SUCCESS) continue;
    size_t num_lost = 0;
    for (const auto& placed : run.first(i)) {
      if (map_again(placed) == CUDA_SUCCESS) continue;
      book_.forget_mappings(placed.addr, 1);
      ++num_lost;
    }
    api().fail(code, "cuMemUnmap",
               cuda_args("addr", run[i].addr, "size", run[i].mapping.size_bytes, "chunk", i, "of",
                         run.size()),
               num_lost == 0 ? ""
                             : "and the rollback failed: " + std::to_string(num_lost) +
                                   " chunk(s) of this call stay unmapped");
  }
}

cuda::CUresult CudaDriver::map_again(const CudaBook::PlacedMapping& placed) const noexcept {
  const auto& mapping = placed.mapping;
  auto code = api().cuMemMap(placed.addr, mapping.size_bytes, 0, raw(mapping.handle), 0);
  if (code != CUDA_SUCCESS || mapping.access == Access::kNone) return code;
  code = grant(placed.addr, mapping.size_bytes, mapping.access);
  if (code != CUDA_SUCCESS) (void)api().cuMemUnmap(placed.addr, mapping.size_bytes);
  return code;
}

void CudaDriver::copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
                      size_t size_bytes) {
  const uintptr_t dst_addr = book_.content_addr(dst, dst_offset, size_bytes);
  const uintptr_t src_addr = book_.content_addr(src, src_offset, size_bytes);
  if (size_bytes == 0) return;
  if (dst_addr < src_addr + size_bytes && src_addr < dst_addr + size_bytes) {
    throw std::invalid_argument(
        "cuda: copy within one chunk overlaps: " +
        cuda_args("dst_offset", dst_offset, "src_offset", src_offset, "size", size_bytes));
  }
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  api().check(
      api().cuMemcpyDtoDAsync(dst_addr, src_addr, size_bytes, stream_), "cuMemcpyDtoDAsync",
      [&] { return cuda_args("dst_addr", dst_addr, "src_addr", src_addr, "size", size_bytes); });
  finish(stream_);
}

void CudaDriver::fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte value) {
  const uintptr_t dst_addr = book_.content_addr(dst, dst_offset, size_bytes);
  if (size_bytes == 0) return;
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  api().check(
      api().cuMemsetD8Async(dst_addr, static_cast<unsigned char>(value), size_bytes, stream_),
      "cuMemsetD8Async", [&] { return cuda_args("addr", dst_addr, "size", size_bytes); });
  finish(stream_);
}

void CudaDriver::read(Handle src, size_t src_offset, std::span<std::byte> out) {
  const uintptr_t src_addr = book_.content_addr(src, src_offset, out.size());
  if (out.empty()) return;
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  api().check(api().cuMemcpyDtoHAsync(out.data(), src_addr, out.size(), stream_),
              "cuMemcpyDtoHAsync",
              [&] { return cuda_args("src_addr", src_addr, "size", out.size()); });
  finish(stream_);
}

void CudaDriver::write(Handle dst, size_t dst_offset, std::span<const std::byte> in) {
  const uintptr_t dst_addr = book_.content_addr(dst, dst_offset, in.size());
  if (in.empty()) return;
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  api().check(api().cuMemcpyHtoDAsync(dst_addr, in.data(), in.size(), stream_), "cuMemcpyHtoDAsync",
              [&] { return cuda_args("dst_addr", dst_addr, "size", in.size()); });
  finish(stream_);
}

void CudaDriver::finish_zero_fills() {
  const uint64_t goal = num_zero_fills_.load();
  uint64_t over = num_zero_fills_over_.load();
  if (over >= goal) return;
  finish(zero_stream_);
  while (over < goal && !num_zero_fills_over_.compare_exchange_weak(over, goal)) {
  }
}

void CudaDriver::finish(cuda::CUstream stream) const {
  api().check(api().cuStreamSynchronize(stream), "cuStreamSynchronize",
              [] { return "a stream of the driver's own"; });
}

std::unique_ptr<Fence> CudaDriver::fence(uintptr_t stream) {
  CudaEvent event(context_);
  event.record(stream);
  return std::make_unique<CudaFence>(std::move(event));
}

void CudaDriver::synchronize() {
  const CudaContext::Scope scope(*context_);
  api().check(api().cuCtxSynchronize(), "cuCtxSynchronize",
              [&] { return cuda_args("device", context_->device_index()); });
}

}  // namespace vtensor
