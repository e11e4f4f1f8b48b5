// Streams, events, copies, fills, and kernels in flight.
//
//   stream queue:  [kernel 7 running][record event A][copy][wait for event B][fill] ...
//                   front
//
// drain() takes finished work from every front until nothing moves. A copy runs when it reaches the
// front, so that it is ordered after the kernels and waits before it, as on a device.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <utility>

#include "standin_cuda.h"
#include "state.h"

namespace {

using namespace standin;  // NOLINT

constexpr uint64_t kFirstHandle = 0x1000;

bool any_overlap(const std::vector<Range>& a, const std::vector<Range>& b) {
  for (const Range& range : a) {
    for (const Range& other : b) {
      if (range.overlaps(other.addr, other.size_bytes)) return true;
    }
  }
  return false;
}

// A kernel on another stream that nothing orders after this work, and that touches what it writes.
bool races_with_kernel(const Stream& own, const Op& op) {
  for (const auto& [handle, stream] : state().streams) {
    if (&stream == &own) continue;
    for (const Op& other : stream.queue) {
      if (other.kind == Op::Kind::kKernel && other.kernel != 0 &&
          any_overlap(op.written, other.physical)) {
        return true;
      }
    }
  }
  return false;
}

// Whether the front entry is finished; runs it when it is work.
bool finish_front(Stream& stream) {
  Op& op = stream.queue.front();
  switch (op.kind) {
    case Op::Kind::kKernel:
      return op.kernel == 0;
    case Op::Kind::kRecord:
      op.event->num_completed = std::max(op.event->num_completed, op.event_number);
      return true;
    case Op::Kind::kWork:
      break;
  }
  if (races_with_kernel(stream, op)) {
    (void)violation(CUDA_ERROR_ILLEGAL_ADDRESS, "copy or fill",
                    "writes memory that a kernel in flight on another stream touches");
  }
  op.work();
  return true;
}

CUresult push(Stream& stream, Op op) {
  stream.queue.push_back(std::move(op));
  drain();
  return CUDA_SUCCESS;
}

Stream* stream_or_violation(const char* function, CUstream stream) {
  Stream* found = find_stream(stream, current_device());
  if (found == nullptr) {
    (void)violation(CUDA_ERROR_INVALID_HANDLE, function, "stream does not exist");
  } else if (found->device != current_device()) {
    (void)violation(CUDA_ERROR_INVALID_HANDLE, function, "stream of another context");
    return nullptr;
  }
  return found;
}

std::shared_ptr<Event> event_or_violation(const char* function, CUevent event) {
  const auto it = state().events.find(reinterpret_cast<uint64_t>(event));
  if (it == state().events.end()) {
    (void)violation(CUDA_ERROR_INVALID_HANDLE, function, "event does not exist");
    return nullptr;
  }
  return it->second;
}

// Waits, giving up the lock, until `finished`. A test that forgot to end a kernel must not hang.
template <typename Finished>
CUresult wait_until(std::unique_lock<std::mutex>& lock, const char* function, Finished finished) {
  State& s = state();
  if (s.changed.wait_for(lock, std::chrono::milliseconds(s.sync_timeout_ms), finished)) {
    return CUDA_SUCCESS;
  }
  return violation(CUDA_ERROR_LAUNCH_TIMEOUT, function, "a kernel is never ended");
}

// A copy or fill: `reads` and `writes` are device ranges; size 0 where there is none.
CUresult enqueue_work(const char* function, CUstream stream, Range reads, Range writes,
                      std::function<void()> work) {
  Stream* queue = stream_or_violation(function, stream);
  if (queue == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  Op op{.kind = Op::Kind::kWork};
  if (writes.size_bytes != 0) {
    if (!translate(writes.addr, writes.size_bytes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
                   &op.written)) {
      return violation(CUDA_ERROR_INVALID_VALUE, function,
                       range_text(writes.addr, writes.size_bytes) + " is not writable");
    }
    op.touched.push_back(writes);
  }
  if (reads.size_bytes != 0) {
    if (!translate(reads.addr, reads.size_bytes, CU_MEM_ACCESS_FLAGS_PROT_READ, &op.physical)) {
      return violation(CUDA_ERROR_INVALID_VALUE, function,
                       range_text(reads.addr, reads.size_bytes) + " is not readable");
    }
    op.touched.push_back(reads);
  }
  if (any_overlap(op.physical, op.written)) {
    return violation(CUDA_ERROR_INVALID_VALUE, function, "source and destination overlap");
  }
  op.physical.insert(op.physical.end(), op.written.begin(), op.written.end());
  op.work = std::move(work);
  return push(*queue, std::move(op));
}

void* as_pointer(uint64_t addr) { return reinterpret_cast<void*>(addr); }

}  // namespace

namespace standin {

void drain() {
  for (bool moved = true; moved;) {
    moved = false;
    for (auto& [handle, stream] : state().streams) {
      while (!stream.queue.empty() && finish_front(stream)) {
        stream.queue.pop_front();
        moved = true;
      }
    }
  }
  state().changed.notify_all();
}

bool in_flight(uint64_t addr, size_t size_bytes) {
  for (const auto& [handle, stream] : state().streams) {
    for (const Op& op : stream.queue) {
      if (op.kind == Op::Kind::kKernel && op.kernel == 0) continue;
      for (const Range& range : op.touched) {
        if (range.overlaps(addr, size_bytes)) return true;
      }
    }
  }
  return false;
}

// 0, 1 and 2 name the default stream; this model has one a device.
Stream* find_stream(CUstream stream, int device) {
  auto& streams = state().streams;
  const auto handle = reinterpret_cast<uint64_t>(stream);
  if (handle <= 2) {
    Stream& found = streams[static_cast<uint64_t>(device)];
    found.device = device;
    return &found;
  }
  const auto it = streams.find(handle);
  return it == streams.end() || handle < kFirstHandle ? nullptr : &it->second;
}

}  // namespace standin

STANDIN_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned int flags) {
  STANDIN_ENTER("cuStreamCreate", Needs::kContext);
  if (flags > CU_STREAM_NON_BLOCKING) {
    return violation(CUDA_ERROR_INVALID_VALUE, "cuStreamCreate", "bad flags");
  }
  const uint64_t handle = state().next_id++;
  state().streams[handle].device = current_device();
  *stream = reinterpret_cast<CUstream>(handle);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuStreamDestroy_v2(CUstream stream) {
  STANDIN_ENTER("cuStreamDestroy", Needs::kContext);
  const auto handle = reinterpret_cast<uint64_t>(stream);
  const auto it = state().streams.find(handle);
  if (it == state().streams.end() || handle < kFirstHandle) {
    return violation(CUDA_ERROR_INVALID_HANDLE, "cuStreamDestroy", "stream does not exist");
  }
  if (!it->second.queue.empty()) {  // legal for CUDA, never meant by us
    return violation(CUDA_ERROR_INVALID_HANDLE, "cuStreamDestroy", "work is still in flight on it");
  }
  state().streams.erase(it);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuStreamSynchronize(CUstream stream) {
  std::unique_lock lock(state().mutex);
  if (const auto code = enter("cuStreamSynchronize", Needs::kContext); code != CUDA_SUCCESS) {
    return code;
  }
  Stream* queue = stream_or_violation("cuStreamSynchronize", stream);
  if (queue == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  // Only what was issued before this call: a marker, as an event would be.
  auto marker = std::make_shared<Event>();
  (void)push(*queue, {.kind = Op::Kind::kRecord, .event = marker, .event_number = 1});
  return wait_until(lock, "cuStreamSynchronize", [&] { return marker->num_completed == 1; });
}

// Work of every stream of this context that was issued before this call.
STANDIN_EXPORT CUresult cuCtxSynchronize() {
  std::unique_lock lock(state().mutex);
  if (const auto code = enter("cuCtxSynchronize", Needs::kContext); code != CUDA_SUCCESS) {
    return code;
  }
  const int device = current_device();
  std::vector<std::shared_ptr<Event>> markers;
  for (auto& [handle, stream] : state().streams) {
    if (stream.device != device) continue;
    markers.push_back(std::make_shared<Event>());
    stream.queue.push_back({.kind = Op::Kind::kRecord, .event = markers.back(), .event_number = 1});
  }
  drain();
  return wait_until(lock, "cuCtxSynchronize", [&] {
    return std::ranges::all_of(markers,
                               [](const auto& event) { return event->num_completed == 1; });
  });
}

STANDIN_EXPORT CUresult cuEventCreate(CUevent* event, unsigned int flags) {
  STANDIN_ENTER("cuEventCreate", Needs::kContext);
  if (flags > (CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING)) {
    return violation(CUDA_ERROR_INVALID_VALUE, "cuEventCreate", "bad flags");
  }
  const uint64_t handle = state().next_id++;
  state().events[handle] = std::make_shared<Event>();
  *event = reinterpret_cast<CUevent>(handle);
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuEventDestroy_v2(CUevent event) {
  STANDIN_ENTER("cuEventDestroy", Needs::kContext);
  if (event_or_violation("cuEventDestroy", event) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  state().events.erase(reinterpret_cast<uint64_t>(event));
  return CUDA_SUCCESS;
}

STANDIN_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream) {
  STANDIN_ENTER("cuEventRecord", Needs::kContext);
  const auto found = event_or_violation("cuEventRecord", event);
  Stream* queue = stream_or_violation("cuEventRecord", stream);
  if (queue == nullptr || found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const uint64_t number = ++found->num_recorded;
  return push(*queue, {.kind = Op::Kind::kRecord, .event = found, .event_number = number});
}

STANDIN_EXPORT CUresult cuEventQuery(CUevent event) {
  STANDIN_ENTER("cuEventQuery", Needs::kContext);
  const auto found = event_or_violation("cuEventQuery", event);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  return found->num_completed == found->num_recorded ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

STANDIN_EXPORT CUresult cuEventSynchronize(CUevent event) {
  std::unique_lock lock(state().mutex);
  if (const auto code = enter("cuEventSynchronize", Needs::kContext); code != CUDA_SUCCESS) {
    return code;
  }
  const auto found = event_or_violation("cuEventSynchronize", event);
  if (found == nullptr) return CUDA_ERROR_INVALID_HANDLE;
  const uint64_t number = found->num_recorded;
  return wait_until(lock, "cuEventSynchronize", [&] { return found->num_completed >= number; });
}

STANDIN_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr dst, CUdeviceptr src, size_t size,
                                             CUstream stream) {
  STANDIN_ENTER("cuMemcpyDtoDAsync", Needs::kContext);
  return enqueue_work("cuMemcpyDtoDAsync", stream, {src, size}, {dst, size},
                      [=] { std::memcpy(as_pointer(dst), as_pointer(src), size); });
}

STANDIN_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr dst, const void* src, size_t size,
                                             CUstream stream) {
  STANDIN_ENTER("cuMemcpyHtoDAsync", Needs::kContext);
  return enqueue_work("cuMemcpyHtoDAsync", stream, {0, 0}, {dst, size},
                      [=] { std::memcpy(as_pointer(dst), src, size); });
}

STANDIN_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* dst, CUdeviceptr src, size_t size,
                                             CUstream stream) {
  STANDIN_ENTER("cuMemcpyDtoHAsync", Needs::kContext);
  return enqueue_work("cuMemcpyDtoHAsync", stream, {src, size}, {0, 0},
                      [=] { std::memcpy(dst, as_pointer(src), size); });
}

STANDIN_EXPORT CUresult cuMemsetD8Async(CUdeviceptr dst, unsigned char value, size_t count,
                                        CUstream stream) {
  STANDIN_ENTER("cuMemsetD8Async", Needs::kContext);
  return enqueue_work("cuMemsetD8Async", stream, {0, 0}, {dst, count},
                      [=] { std::memset(as_pointer(dst), value, count); });
}

STANDIN_EXPORT CUresult cuMemsetD32Async(CUdeviceptr dst, unsigned int value, size_t count,
                                         CUstream stream) {
  STANDIN_ENTER("cuMemsetD32Async", Needs::kContext);
  if (dst % sizeof(value) != 0) {
    return violation(CUDA_ERROR_INVALID_VALUE, "cuMemsetD32Async", "address is not aligned");
  }
  return enqueue_work("cuMemsetD32Async", stream, {0, 0}, {dst, count * sizeof(value)}, [=] {
    auto* words = static_cast<unsigned int*>(as_pointer(dst));
    std::fill(words, words + count, value);
  });
}

STANDIN_EXPORT uint64_t standin_cuda_begin_kernel(uint64_t stream, uint64_t addr, uint64_t bytes) {
  const std::lock_guard lock(state().mutex);
  Stream* queue = find_stream(reinterpret_cast<CUstream>(stream), 0);
  if (queue == nullptr) {
    (void)violation(CUDA_ERROR_INVALID_HANDLE, "kernel", "stream does not exist");
    return 0;
  }
  Op op{.kind = Op::Kind::kKernel, .kernel = state().next_id++, .touched = {{addr, bytes}}};
  if (!translate(addr, bytes, CU_MEM_ACCESS_FLAGS_PROT_READ, &op.physical)) {
    (void)violation(CUDA_ERROR_ILLEGAL_ADDRESS, "kernel",
                    range_text(addr, bytes) + " is not readable");
    return 0;
  }
  const uint64_t id = op.kernel;
  (void)push(*queue, std::move(op));
  return id;
}

STANDIN_EXPORT void standin_cuda_end_kernel(uint64_t kernel) {
  const std::lock_guard lock(state().mutex);
  for (auto& [handle, stream] : state().streams) {
    for (Op& op : stream.queue) {
      if (op.kind == Op::Kind::kKernel && op.kernel == kernel && kernel != 0) {
        op.kernel = 0;
        drain();
        return;
      }
    }
  }
  (void)violation(CUDA_ERROR_INVALID_HANDLE, "end_kernel", "no such kernel in flight");
}

STANDIN_EXPORT uint64_t standin_cuda_running_kernels() {
  const std::lock_guard lock(state().mutex);
  uint64_t count = 0;
  for (const auto& [handle, stream] : state().streams) {
    for (const Op& op : stream.queue) {
      count += op.kind == Op::Kind::kKernel && op.kernel != 0 ? 1 : 0;
    }
  }
  return count;
}
