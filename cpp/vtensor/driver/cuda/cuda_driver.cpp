#include "vtensor/driver/cuda/cuda_driver.h"

#include <stdexcept>
#include <utility>

#include "vtensor/util/error.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {
namespace {

using cuda::CUDA_SUCCESS;

// Checked before libcuda is even opened, so that the mistake is named on every machine.
std::shared_ptr<const CudaContext> open_context(const CudaOptions& options) {
  if (options.unmapped == UnmappedPolicy::kZero) {
    throw std::invalid_argument(
        "cuda: unmapped='zero' is not available: CUDA has no lazy zero page; use 'guard', and a "
        "mapped, scrubbed rows for padded kernels");
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
      hands_over_(
          context_->has(cuda::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)),
      ledger_(granularity_),
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
    const size_t chunk_bytes = ledger_.chunk_bytes();
    for (const Mapping& mapping : chunks_of(ledger_.runs())) {
      (void)api().cuMemUnmap(mapping.addr, chunk_bytes);
    }
    for (size_t i = 0; i < allocations_.size(); ++i) {
      if (!allocations_[i].exists) continue;
      if (allocations_[i].in_window) {
        (void)api().cuMemUnmap(window_.address(i * chunk_bytes), chunk_bytes);
      }
      (void)api().cuMemRelease(allocations_[i].handle);
    }
    for (const auto& [addr, size_bytes] : ledger_.ranges()) {
      (void)api().cuMemAddressFree(addr, size_bytes);
    }
    (void)api().cuStreamDestroy(stream_);
    (void)api().cuStreamDestroy(zero_stream_);
  } catch (...) {
    // The driver is going down and takes everything with it; a destructor must not throw.
  }
}

uintptr_t CudaDriver::reserve(size_t size_bytes, size_t alignment_bytes) {
  ledger_.require_range_shape(size_bytes, alignment_bytes);
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
  const std::lock_guard lock(mutex_);
  ledger_.add_range(addr, size_bytes);
  give_back.dismiss();
  return addr;
}

void CudaDriver::free(uintptr_t addr, size_t size_bytes) {
  const CudaContext::Scope scope(*context_);
  {
    // Forgotten first: once free, another thread may be given the same addresses.
    const std::lock_guard lock(mutex_);
    ledger_.remove_range(addr, size_bytes);
  }
  ScopeFail undo([&] {
    const std::lock_guard lock(mutex_);
    ledger_.add_range(addr, size_bytes);
  });
  api().check(api().cuMemAddressFree(addr, size_bytes), "cuMemAddressFree",
              [&] { return cuda_args("addr", addr, "size", size_bytes); });
  undo.dismiss();
}

CudaDriver::Allocation& CudaDriver::allocation(Handle handle) {
  return allocations_[offset_of(handle) / ledger_.chunk_bytes()];
}

const CudaDriver::Allocation& CudaDriver::allocation(Handle handle) const {
  return allocations_[offset_of(handle) / ledger_.chunk_bytes()];
}

void CudaDriver::give_place_back(Handle handle) {
  ledger_.begin_release(handle, ledger_.chunk_bytes());
  ledger_.finish_release(handle);
}

cuda::CUmemGenericAllocationHandle CudaDriver::allocate(
    size_t chunk_bytes, cuda::CUmemAllocationHandleType type) const {
  auto prop = prop_on(context_->device_index());
  prop.requestedHandleTypes = type;
  cuda::CUmemGenericAllocationHandle handle = 0;
  check_create(api().cuMemCreate(&handle, chunk_bytes, &prop, 0), "cuMemCreate", chunk_bytes);
  return handle;
}

void CudaDriver::fill_with_zeros(cuda::CUdeviceptr addr, size_t chunk_bytes) {
  check_create(api().cuMemsetD8Async(addr, 0, chunk_bytes, zero_stream_), "cuMemsetD8Async",
               chunk_bytes);
  num_zero_fills_.fetch_add(1);
}

Handle CudaDriver::create(size_t chunk_bytes) {
  const auto obtain = [&] { return allocate(chunk_bytes, cuda::CU_MEM_HANDLE_TYPE_NONE); };
  return add_chunk(chunk_bytes, obtain, /*is_new=*/true, /*can_be_sent=*/false);
}

// A place in the books and an address in the window, then the memory behind them. When the window
// cannot be unmapped again, the place is lost.
Handle CudaDriver::add_chunk(size_t chunk_bytes, const Obtain& obtain, bool is_new,
                             bool can_be_sent) {
  const CudaContext::Scope scope(*context_);
  const auto [place, slot] = claim_place(chunk_bytes);
  bool slot_is_clean = true;
  ScopeFail give_back([&] {
    const std::lock_guard lock(mutex_);
    if (slot_is_clean) give_place_back(place);
  });
  const auto handle = obtain();
  ScopeFail release([&] { (void)api().cuMemRelease(handle); });

  check_create(api().cuMemMap(slot, chunk_bytes, 0, handle, 0), "cuMemMap", chunk_bytes);
  ScopeFail unmap([&] { slot_is_clean = api().cuMemUnmap(slot, chunk_bytes) == CUDA_SUCCESS; });
  check_create(grant(slot, chunk_bytes, Access::kReadWrite), "cuMemSetAccess", chunk_bytes);
  if (is_new) fill_with_zeros(slot, chunk_bytes);
  unmap.dismiss();
  release.dismiss();
  give_back.dismiss();
  const std::lock_guard lock(mutex_);
  allocation(place) = {handle, /*exists=*/true, /*in_window=*/true, can_be_sent};
  return place;
}

std::pair<Handle, cuda::CUdeviceptr> CudaDriver::claim_place(size_t chunk_bytes) {
  const std::lock_guard lock(mutex_);
  const Handle place = ledger_.add_chunk(chunk_bytes);
  try {
    window_.cover(offset_of(place), chunk_bytes);
    const size_t num_places = offset_of(place) / chunk_bytes + 1;
    if (allocations_.size() < num_places) allocations_.resize(num_places);
  } catch (...) {
    give_place_back(place);
    throw;
  }
  return {place, window_.address(offset_of(place))};
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
  Allocation memory;
  uintptr_t window_addr = 0;
  {
    const std::lock_guard lock(mutex_);
    ledger_.begin_release(handle, chunk_bytes);
    memory = allocation(handle);
    window_addr = window_.address(offset_of(handle));
  }
  bool in_window = memory.in_window;
  ScopeFail undo([&] {
    const std::lock_guard lock(mutex_);
    ledger_.undo_release(handle);
    allocation(handle).in_window = in_window;
  });
  if (in_window) {
    api().check(api().cuMemUnmap(window_addr, chunk_bytes), "cuMemUnmap",
                [&] { return cuda_args("window_addr", window_addr, "size", chunk_bytes); });
  }
  const auto code = api().cuMemRelease(memory.handle);
  if (code != CUDA_SUCCESS) {
    std::string detail;
    const Mapping window{window_addr, memory.handle, chunk_bytes, Access::kReadWrite};
    if (in_window && map_again(window) != CUDA_SUCCESS) {
      in_window = false;
      detail = "and the rollback failed: the chunk's contents cannot be reached any more";
    }
    api().fail(code, "cuMemRelease", cuda_args("handle", memory.handle), detail);
  }
  undo.dismiss();
  const std::lock_guard lock(mutex_);
  allocation(handle) = {};
  ledger_.finish_release(handle);
}

cuda::CUdeviceptr CudaDriver::content_addr(Handle handle, size_t offset, size_t size_bytes) {
  const std::lock_guard lock(mutex_);
  ledger_.require_bytes(handle, offset, size_bytes);
  if (!allocation(handle).in_window) {
    throw std::invalid_argument("cuda: chunk " + std::to_string(offset_of(handle)) +
                                " cannot be reached: an earlier release of it failed half way");
  }
  return window_.address(offset_of(handle)) + offset;
}

void CudaDriver::copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
                      size_t size_bytes) {
  const uintptr_t dst_addr = content_addr(dst, dst_offset, size_bytes);
  const uintptr_t src_addr = content_addr(src, src_offset, size_bytes);
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
  const uintptr_t dst_addr = content_addr(dst, dst_offset, size_bytes);
  if (size_bytes == 0) return;
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  api().check(
      api().cuMemsetD8Async(dst_addr, static_cast<unsigned char>(value), size_bytes, stream_),
      "cuMemsetD8Async", [&] { return cuda_args("addr", dst_addr, "size", size_bytes); });
  finish(stream_);
}

void CudaDriver::read(Handle src, size_t src_offset, std::span<std::byte> out) {
  const uintptr_t src_addr = content_addr(src, src_offset, out.size());
  if (out.empty()) return;
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  api().check(api().cuMemcpyDtoHAsync(out.data(), src_addr, out.size(), stream_),
              "cuMemcpyDtoHAsync",
              [&] { return cuda_args("src_addr", src_addr, "size", out.size()); });
  finish(stream_);
}

void CudaDriver::write(Handle dst, size_t dst_offset, std::span<const std::byte> in) {
  const uintptr_t dst_addr = content_addr(dst, dst_offset, in.size());
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
