// CudaContext: a device's primary context, the one that torch and the CUDA runtime use too.
//
// Thread-safety: immutable after construction; may be used from any thread. A Scope belongs to the
// thread that made it.
//
// Invariants:
//  1. The context is retained from construction to destruction; a CudaEvent or CudaDriver that
//  shares
//     it keeps it alive.
//  2. A Scope leaves the thread as it found it. It pushes and pops instead of remembering "already
//     current" in a thread_local, because torch changes the current device behind our back.
//  3. Inside a Scope the thread's capture mode is relaxed: otherwise a CUDA graph that another
//  thread
//     captures would make our calls fail, and be made invalid by them.
#pragma once

#include <memory>
#include <string>

#include "vtensor/driver/cuda/cuda_api.h"

namespace vtensor {

class CudaContext {
 public:
  // Retains the primary context of device `device_index`.
  // Throws std::invalid_argument for an index out of range, DriverError for a device or driver
  // without virtual memory management and for every failed call.
  CudaContext(std::shared_ptr<const CudaApi> api, int device_index);
  ~CudaContext();
  CudaContext(const CudaContext&) = delete;
  CudaContext& operator=(const CudaContext&) = delete;

  const CudaApi& api() const noexcept { return *api_; }
  int device_index() const noexcept { return device_index_; }
  cuda::CUdevice device() const noexcept { return device_; }

  // Whether the device has what drivers with virtual memory management know. Throws DriverError.
  bool has(cuda::CUdevice_attribute attribute) const;
  // "NVIDIA H100 80GB HBM3"
  std::string device_name() const;

  // Makes the context current on this thread while it lives.
  class Scope {
   public:
    explicit Scope(const CudaContext& context);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    const CudaApi& api_;
    cuda::CUstreamCaptureMode capture_mode_ = cuda::CU_STREAM_CAPTURE_MODE_RELAXED;
  };

 private:
  void require_vmm() const;

  std::shared_ptr<const CudaApi> api_;
  int device_index_;
  cuda::CUdevice device_ = 0;
  cuda::CUcontext context_ = nullptr;
};

}  // namespace vtensor
