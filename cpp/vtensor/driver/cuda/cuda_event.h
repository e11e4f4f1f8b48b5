// CudaEvent: a point in a stream's work, to close the epoch of running kernels.
//
// The step loop records one after its last kernel; what that step used may be unmapped, remapped or
// given other access once done() is true.
//
//   kernels of step n | record(stream) | kernels of step n + 1 ...
//                      ^ done() turns true when all work to the left has finished on the device
//
// Thread-safety: done() and synchronize() may be called from any thread, also at the same time;
// record() and moves must be ordered by the caller against all other calls on the same event.
//
// Invariants:
//  1. An event that was never recorded is done.
//  2. synchronize() sleeps, it does not spin (blocking-sync flag), and takes no time stamps.
//  3. The event keeps its context alive, not its stream: a destroyed stream's work still completes
//  it.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "vtensor/driver/cuda/cuda_context.h"
#include "vtensor/driver/fence.h"

namespace vtensor {

class CudaEvent {
 public:
  explicit CudaEvent(std::shared_ptr<const CudaContext> context);
  ~CudaEvent();
  CudaEvent(CudaEvent&& other) noexcept;
  CudaEvent& operator=(CudaEvent&& other) noexcept;

  // Moves the event to after everything issued to `stream` (a CUstream of the same device; 0 is the
  // default stream). REQUIRES: the stream is not being captured into a graph.
  void record(uintptr_t stream);

  // Whether that work has finished. Never blocks. Throws DriverError also for a fault of the
  // kernels before it: CUDA reports those here.
  bool done() const;

  // Sleeps until done().
  void synchronize() const;

 private:
  void destroy() noexcept;

  std::shared_ptr<const CudaContext> context_;
  cuda::CUevent event_ = nullptr;
};

// An event that has been recorded, as a Fence.
class CudaFence final : public Fence {
 public:
  explicit CudaFence(CudaEvent event) : event_(std::move(event)) {}
  bool done() const override { return event_.done(); }
  void wait() const override { event_.synchronize(); }

 private:
  CudaEvent event_;
};

}  // namespace vtensor
