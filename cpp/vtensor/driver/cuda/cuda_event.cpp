#include "vtensor/driver/cuda/cuda_event.h"

#include <utility>

namespace vtensor {

CudaEvent::CudaEvent(std::shared_ptr<const CudaContext> context) : context_(std::move(context)) {
  const CudaContext::Scope scope(*context_);
  const auto& api = context_->api();
  const unsigned flags = cuda::CU_EVENT_BLOCKING_SYNC | cuda::CU_EVENT_DISABLE_TIMING;
  api.check(api.cuEventCreate(&event_, flags), "cuEventCreate",
            [&] { return cuda_args("flags", flags); });
}

CudaEvent::~CudaEvent() { destroy(); }

CudaEvent::CudaEvent(CudaEvent&& other) noexcept
    : context_(std::move(other.context_)), event_(std::exchange(other.event_, nullptr)) {}

CudaEvent& CudaEvent::operator=(CudaEvent&& other) noexcept {
  if (this != &other) {
    destroy();
    context_ = std::move(other.context_);
    event_ = std::exchange(other.event_, nullptr);
  }
  return *this;
}

void CudaEvent::destroy() noexcept {
  if (event_ == nullptr) return;
  try {
    const CudaContext::Scope scope(*context_);
    (void)context_->api().cuEventDestroy(event_);
  } catch (...) {
    // No context, no event: the driver is going down, and a destructor must not throw.
  }
  event_ = nullptr;
}

void CudaEvent::record(uintptr_t stream) {
  const CudaContext::Scope scope(*context_);
  const auto& api = context_->api();
  api.check(api.cuEventRecord(event_, reinterpret_cast<cuda::CUstream>(stream)), "cuEventRecord",
            [&] { return cuda_args("event", event_, "stream", stream); });
}

bool CudaEvent::done() const {
  const CudaContext::Scope scope(*context_);
  const auto& api = context_->api();
  const auto code = api.cuEventQuery(event_);
  if (code == cuda::CUDA_ERROR_NOT_READY) return false;
  api.check(code, "cuEventQuery", [&] { return cuda_args("event", event_); });
  return true;
}

void CudaEvent::synchronize() const {
  const CudaContext::Scope scope(*context_);
  const auto& api = context_->api();
  api.check(api.cuEventSynchronize(event_), "cuEventSynchronize",
            [&] { return cuda_args("event", event_); });
}

}  // namespace vtensor
