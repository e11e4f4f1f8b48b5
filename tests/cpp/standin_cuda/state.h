// The stand-in driver's state, behind one mutex: it is a model to be right, not fast.
//
// Invariants:
//  1. Everything here is read and written with State::mutex held, but for the context stack, which
//     is each thread's own.
//  2. Physical memory is a slice of one memfd, never used twice, and punched out when it is freed;
//     what can be exported is a memfd of its own, named for its device.
//  3. A stream is a queue; drain() takes from its front whatever is finished, and nothing else
//  does.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "vtensor/driver/cuda/cuda_abi.h"
#include "vtensor/util/file_descriptor.h"

namespace standin {

using namespace vtensor::cuda;  // NOLINT: the whole library speaks these types

inline constexpr size_t kDefaultGranularity = size_t{2} << 20;
inline constexpr int kMaxDevices = 2;
inline constexpr int kDriverVersion = 12080;
inline constexpr size_t kPageBytes = 4096;

struct Allocation {
  uint64_t handle = 0;
  int device = 0;
  size_t size_bytes = 0;
  int64_t file_offset = 0;           // in the one file; of shared memory a number that no other has
  vtensor::FileDescriptor shared{};  // its own file, which other processes may have too
  bool is_imported = false;
  bool released = false;
  size_t num_mappings = 0;
};

struct Mapping {
  size_t size_bytes;
  std::shared_ptr<Allocation> allocation;
  int access = CU_MEM_ACCESS_FLAGS_PROT_NONE;
};

// A virtual range, and the same bytes as physical memory.
struct Range {
  uint64_t addr;
  size_t size_bytes;
  bool overlaps(uint64_t other, size_t other_bytes) const {
    return addr < other + other_bytes && other < addr + size_bytes;
  }
};

struct Event {
  uint64_t num_recorded = 0;
  uint64_t num_completed = 0;
};

// One entry of a stream's queue. kWork runs when it reaches the front.
struct Op {
  enum class Kind { kKernel, kRecord, kWork } kind;
  uint64_t kernel = 0;  // kKernel: 0 once ended
  std::shared_ptr<Event> event{};
  uint64_t event_number = 0;  // kRecord: this record
  std::function<void()> work{};
  std::vector<Range> touched{};   // virtual
  std::vector<Range> physical{};  // offsets in the memfd
  std::vector<Range> written{};   // kWork: the part of `physical` that it writes
};

struct Stream {
  int device = 0;
  std::deque<Op> queue;
};

struct Injection {
  uint64_t at_call;  // 0: every call
  CUresult code;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;

  // control
  std::map<std::string, uint64_t> calls;
  std::multimap<std::string, Injection> injections;
  uint64_t num_violations = 0;
  std::string last_violation;
  bool quiet = false;
  bool single_unmap = false;
  int sync_timeout_ms = 20000;
  uint64_t capacity_bytes = 0;
  size_t granularity = kDefaultGranularity;
  int num_devices = kMaxDevices;
  std::map<int, int> attributes;

  // driver
  bool initialised = false;
  int num_retains[kMaxDevices] = {};
  uint64_t used_bytes[kMaxDevices] = {};
  int memfd = -1;
  int64_t file_end = 0;
  uint64_t next_id = 0x1000;
  std::map<uint64_t, size_t> reservations;
  std::map<uint64_t, std::shared_ptr<Allocation>> handles;
  std::map<uint64_t, Mapping> mappings;
  std::map<uint64_t, Stream> streams;  // by handle; default streams by device number
  std::map<uint64_t, std::shared_ptr<Event>> events;
  size_t num_allocations = 0;

  void read_environment();
};

State& state();

// The device whose context is current on this thread, or -1.
int current_device();
std::vector<int>& context_stack();

enum class Needs { kNothing, kInit, kContext };

// Counts the call, then answers an injected failure or a missing cuInit or context.
CUresult enter(const char* function, Needs needs);

// Records a broken rule and returns `code`.
CUresult violation(CUresult code, const char* function, const std::string& text);

std::string hex(uint64_t value);
std::string range_text(uint64_t addr, size_t size_bytes);

// memory.cpp: the physical bytes behind [addr, addr + size_bytes); false unless all of it is mapped
// with at least `access`.
bool translate(uint64_t addr, size_t size_bytes, int access, std::vector<Range>* physical);
// More room for physical bytes; false: there is none.
bool extend_file(size_t size_bytes);
// In the books, at physical bytes of its own, which extend_file() has made. Returns its handle.
uint64_t add_allocation(Allocation allocation);

// share.cpp: a file for memory that can be exported; none where the system refuses.
vtensor::FileDescriptor shared_file(int device, size_t size_bytes);

// stream.cpp
void drain();
bool in_flight(uint64_t addr, size_t size_bytes);
Stream* find_stream(CUstream stream, int device);

// Opens every driver function: the lock, then `enter`.
#define STANDIN_ENTER(function, needs)                \
  const std::lock_guard lock(standin::state().mutex); \
  if (const auto entered = standin::enter(function, needs); entered != CUDA_SUCCESS) return entered

#define STANDIN_EXPORT extern "C" __attribute__((visibility("default")))

}  // namespace standin
