// CudaDriver: chunks that go to other processes, and come from them, as open files.
//
//   cuMemCreate, of a type that can be exported  ->  descriptor  ->  another process: cuMemMap
//
// A chunk is one allocation and one descriptor, which shows nothing else. The memory stays for as
// long as anybody has a handle, a mapping or a descriptor of it, and goes with the last one,
// however that process ends.
#include <fcntl.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "vtensor/driver/cuda/cuda_driver.h"
#include "vtensor/util/error.h"
#include "vtensor/util/scope_fail.h"

namespace vtensor {

using cuda::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

Handle CudaDriver::create_apart(size_t chunk_bytes, Apart) {
  if (!hands_over_) return Driver::create_apart(chunk_bytes, {});
  const auto obtain = [&] {
    return allocate(chunk_bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  };
  return add_chunk(chunk_bytes, obtain, /*is_new=*/true, /*can_be_sent=*/true);
}

// What was received is not: CUDA does not say that it may be exported again.
std::vector<bool> CudaDriver::sendable(std::span<const Handle> handles) const {
  const std::lock_guard lock(mutex_);
  std::vector<bool> sendable;
  sendable.reserve(handles.size());
  for (const Handle handle : handles) {
    ledger_.require_bytes(handle, 0, 0);
    sendable.push_back(allocation(handle).can_be_sent);
  }
  return sendable;
}

SentChunks CudaDriver::send(std::span<const Handle> handles) {
  const CudaContext::Scope scope(*context_);
  finish_zero_fills();
  SentChunks sent;
  for (const Handle handle : handles) {
    Allocation memory;
    {
      const std::lock_guard lock(mutex_);
      ledger_.require_bytes(handle, 0, 0);
      memory = allocation(handle);
    }
    if (!memory.can_be_sent) throw std::invalid_argument("a chunk of the pool cannot be sent");
    int fd = -1;
    api().check(api().cuMemExportToShareableHandle(&fd, memory.handle,
                                                   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
                "cuMemExportToShareableHandle", [&] { return cuda_args("handle", memory.handle); });
    sent.files.emplace_back(fd);
    (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
    sent.places.push_back({static_cast<uint32_t>(sent.files.size() - 1), 0});
  }
  return sent;
}

cuda::CUmemGenericAllocationHandle CudaDriver::import(int fd) const {
  cuda::CUmemGenericAllocationHandle handle = 0;
  // The descriptor itself stands in the place of the pointer, as CUDA wants it.
  auto* const os_handle = reinterpret_cast<void*>(static_cast<uintptr_t>(fd));
  const auto code = api().cuMemImportFromShareableHandle(&handle, os_handle,
                                                         CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  if (code == cuda::CUDA_ERROR_INVALID_VALUE || code == cuda::CUDA_ERROR_INVALID_HANDLE) {
    throw std::invalid_argument("a received file holds no chunk of a GPU's");
  }
  api().check(code, "cuMemImportFromShareableHandle", [&] { return cuda_args("fd", fd); });
  return handle;
}

// A file that holds another size, or another GPU's memory, is found when it is mapped.
std::vector<Handle> CudaDriver::receive(const SentChunks& sent, size_t chunk_bytes) {
  std::vector<Handle> handles;
  ScopeFail undo([&] {
    for (const Handle handle : handles) {
      try {
        release(handle, chunk_bytes);
      } catch (const DriverError&) {
        continue;  // the books show that it is there still
      }
    }
  });
  for (const ChunkPlace& place : sent.places) {
    if (place.file >= sent.files.size() || place.offset_bytes != 0) {
      throw std::invalid_argument("a chunk at " + std::to_string(place.offset_bytes) + " in file " +
                                  std::to_string(place.file) + ", where each of " +
                                  std::to_string(sent.files.size()) +
                                  " files is one chunk of a GPU's");
    }
    const int fd = sent.files[place.file].get();
    try {
      handles.push_back(add_chunk(
          chunk_bytes, [&] { return import(fd); }, /*is_new=*/false, /*can_be_sent=*/false));
    } catch (const DriverError& error) {
      if (error.code() != cuda::CUDA_ERROR_INVALID_VALUE) throw;
      throw std::invalid_argument("a received file cannot be mapped as a chunk of " +
                                  std::to_string(chunk_bytes) + " bytes: " + error.what());
    }
  }
  undo.dismiss();
  return handles;
}

}  // namespace vtensor
