// Memory of several processes: an allocation that can be exported is a memfd, named for its device.
// Sources of the rules: cuMemCreate, cuMemExportToShareableHandle, cuMemImportFromShareableHandle.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <string>
#include <utility>

#include "state.h"

namespace {

using namespace standin;  // NOLINT

constexpr char kName[] = "standin_cuda_of_device_";

// The device of such a file; -1: it is another one.
int device_of_file(int fd) {
  std::error_code error;
  const auto link = std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(fd), error);
  const std::string start = std::string("/memfd:") + kName;
  const std::string name = link.string();
  if (error || !name.starts_with(start)) return -1;
  return std::atoi(name.c_str() + start.size());
}

}  // namespace

vtensor::FileDescriptor standin::shared_file(int device, size_t size_bytes) {
  vtensor::FileDescriptor file(memfd_create((kName + std::to_string(device)).c_str(), MFD_CLOEXEC));
  if (file.get() >= 0 && ftruncate(file.get(), static_cast<off_t>(size_bytes)) != 0) return {};
  return file;
}

STANDIN_EXPORT CUresult cuMemExportToShareableHandle(void* shareable,
                                                     CUmemGenericAllocationHandle handle,
                                                     CUmemAllocationHandleType type,
                                                     unsigned long long flags) {
  constexpr char kFunction[] = "cuMemExportToShareableHandle";
  STANDIN_ENTER(kFunction, Needs::kContext);
  const auto it = state().handles.find(handle);
  if (it == state().handles.end()) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     "handle " + hex(handle) + " does not exist");
  }
  if (flags != 0 || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "flags, or no file descriptor");
  }
  const Allocation& allocation = *it->second;
  if (allocation.shared.get() < 0 || allocation.is_imported) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction,
                     "handle " + hex(handle) + " was not created to be exported");
  }
  const int fd = dup(allocation.shared.get());
  if (fd < 0) return CUDA_ERROR_UNKNOWN;
  *static_cast<int*>(shareable) = fd;
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle,
                                                       void* os_handle,
                                                       CUmemAllocationHandleType type) {
  constexpr char kFunction[] = "cuMemImportFromShareableHandle";
  STANDIN_ENTER(kFunction, Needs::kContext);
  if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
    return violation(CUDA_ERROR_INVALID_VALUE, kFunction, "no file descriptor");
  }
  const int fd = static_cast<int>(reinterpret_cast<uintptr_t>(os_handle));
  const int device = device_of_file(fd);  // what others send is no rule that the caller breaks
  if (device < 0 || device >= state().num_devices) return CUDA_ERROR_INVALID_VALUE;
  vtensor::FileDescriptor own(fcntl(fd, F_DUPFD_CLOEXEC, 0));
  struct stat of_file{};
  if (own.get() < 0 || fstat(own.get(), &of_file) != 0) return CUDA_ERROR_UNKNOWN;
  const auto size = static_cast<size_t>(of_file.st_size);
  if (!extend_file(size)) return CUDA_ERROR_OUT_OF_MEMORY;
  *handle = add_allocation(Allocation{
      .device = device, .size_bytes = size, .shared = std::move(own), .is_imported = true});
  return CUDA_SUCCESS;
}
