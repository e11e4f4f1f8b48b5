// Driver: the one narrow door to a device's virtual memory. All above it works on any driver.
//
//   reserve   a virtual range, nothing behind it          free      give the range back
//   create    a physical chunk, committed and zero        release   give it back to the system
//   map       chunks behind a range (no access yet)       unmap     take them away
//   set_access  after map, once over a whole run          remap     other chunks, in one step
//   copy / fill / read / write  contents
//
// Thread-safety: every call may be made from any thread. Calls on overlapping addresses or on the
// same chunk must be ordered by the caller.
//
// Rules, checked by the conformance suite (tests/cpp/driver/driver_conformance_test.cpp) on every
// driver:
//  1. All-or-nothing: a call that throws has changed nothing.
//  2. create() commits: touching a mapped chunk never fails later. A fresh chunk reads as zeros.
//  3. The same chunk may be mapped at many addresses; all of them show the same bytes.
//  4. map() needs a range with nothing mapped in it; unmap() takes exactly whole mapped chunks.
//  5. A mapped range gives no access to its chunks until set_access(); one call may span any run of
//     mapped chunks. (Until then it faults, or still shows the unmapped rest: reads are zeros or
//     faults.)
//  6. release() of a chunk that is still mapped keeps its memory until the last unmap. (The pool
//     never does this; the rule is CUDA's, and the host driver refuses it.)
//  7. free() needs a range with nothing mapped in it.
//  8. After unmap() a range shows the unmapped policy again: kGuard faults, kZero reads as zeros.
//  9. Where remaps_in_place(): whoever reads a range during remap() or set_access() sees the old
//     bytes or the new ones, never a hole; and what is written to a range with kCopyOnWrite stays
//     in that range, a page at a time, until it is unmapped or has another access.
// 10. Where hands_over(): a chunk that was sent or received is released as any other, and its
//     memory goes back to the system with the last process that holds it, however that ends.
//
// Errors: std::invalid_argument for a caller mistake, OutOfMemoryError where create() finds no
// memory, DriverError (call, code, arguments) for everything else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "vtensor/driver/fence.h"
#include "vtensor/driver/sent_chunks.h"

namespace vtensor {

// One physical allocation, opaque: an offset for the host driver, a handle for CUDA.
enum class Handle : uint64_t {};

enum class Access { kNone, kRead, kReadWrite, kCopyOnWrite };

// What the unmapped part of a reserved range does when read.
enum class UnmappedPolicy { kGuard, kZero };

// Of host memory, unless somebody chooses. In sanitizer builds what reads where nothing is mapped,
// such as below a window, is to be found out.
#ifdef VTENSOR_SANITIZED
inline constexpr UnmappedPolicy kDefaultUnmapped = UnmappedPolicy::kGuard;
#else
inline constexpr UnmappedPolicy kDefaultUnmapped = UnmappedPolicy::kZero;
#endif

// Device of the memory, in DLPack's numbering.
struct Device {
  enum class Type : int { kCpu = 1, kCuda = 2 };
  Type type = Type::kCpu;
  int index = 0;
};

// Memory apart from other chunks', so that it can be sent without showing these. 0: none.
struct Apart {
  uint64_t number = 0;        // chunks of one number lie together
  size_t capacity_bytes = 0;  // of these chunks, at once
};

class Driver {
 public:
  virtual ~Driver() = default;

  virtual std::string_view name() const noexcept = 0;
  virtual Device device() const noexcept = 0;

  // True when chunks hold bytes that copy/read/write really move (false for sim).
  virtual bool has_memory() const noexcept = 0;

  // Chunk sizes and range sizes are multiples of this, in bytes.
  virtual size_t granularity() const noexcept = 0;

  // A range of `size_bytes` aligned to `alignment_bytes` (a power of two >= granularity).
  virtual uintptr_t reserve(size_t size_bytes, size_t alignment_bytes) = 0;
  virtual void free(uintptr_t addr, size_t size_bytes) noexcept(false) = 0;

  // A committed, zero-filled physical chunk. May refuse another size than that of
  // the first one.
  virtual Handle create(size_t chunk_bytes) = 0;
  virtual void release(Handle handle, size_t chunk_bytes) = 0;

  // Maps handles[i] at addr + i * chunk_bytes, all or none.
  virtual void map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) = 0;
  virtual void set_access(uintptr_t addr, size_t size_bytes, Access access) = 0;
  virtual void unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) = 0;

  // Whether remap() and Access::kCopyOnWrite are to be had; else set_access() refuses the latter.
  virtual bool remaps_in_place() const noexcept { return false; }
  // Puts handles[i] in the place of the whole chunks mapped at addr + i * chunk_bytes. Throws
  // std::logic_error unless remaps_in_place().
  virtual void remap(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes,
                     Access access);

  // What is mapped at `addr` as far as the driver knows: nothing, or a chunk. For
  // check_integrity().
  virtual std::optional<Handle> mapped_at(uintptr_t addr) const = 0;
  // Throws IntegrityError where the system shows another chunk at one of these addresses of chunks
  // than mapped_at() says. For check_integrity(); drivers that cannot ask the system pass.
  virtual void verify_mapped(std::span<const uintptr_t> addrs) const { static_cast<void>(addrs); }

  // Contents, by chunk and offset, whether or not the chunk is mapped anywhere. Synchronous with
  // respect to the calling thread: when they return, the bytes are there.
  virtual void copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
                    size_t size_bytes) = 0;
  virtual void fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte value) = 0;
  virtual void read(Handle src, size_t src_offset, std::span<std::byte> out) = 0;
  virtual void write(Handle dst, size_t dst_offset, std::span<const std::byte> in) = 0;

  // Whether chunks can be handed to other processes; else the four below throw std::logic_error.
  virtual bool hands_over() const noexcept { return false; }
  // As create(), where it can be sent.
  virtual Handle create_apart(size_t chunk_bytes, Apart apart);
  // Of each of these chunks: whether sending all of them shows no other chunk with it.
  virtual std::vector<bool> sendable(std::span<const Handle> handles) const;
  // Requires: each is sendable(). They may no longer share files with chunks created later.
  virtual SentChunks send(std::span<const Handle> handles);
  // The chunks behind these places. Throws std::invalid_argument for files that hold no chunks, or
  // could lose them while they are mapped here.
  virtual std::vector<Handle> receive(const SentChunks& sent, size_t chunk_bytes);

  // A fence after all kernels issued to `stream` so far; nullptr: they are over when they return.
  virtual std::unique_ptr<Fence> fence(uintptr_t stream) {
    static_cast<void>(stream);
    return nullptr;
  }
  // Sleeps until all kernels of the device are over, whoever issued them.
  virtual void synchronize() {}
};

inline void Driver::remap(uintptr_t, std::span<const Handle>, size_t, Access) {
  throw std::logic_error("this driver cannot remap in place");
}

inline Handle Driver::create_apart(size_t, Apart) {
  throw std::logic_error("this driver cannot hand chunks over");
}
inline std::vector<bool> Driver::sendable(std::span<const Handle>) const {
  throw std::logic_error("this driver cannot hand chunks over");
}
inline SentChunks Driver::send(std::span<const Handle>) {
  throw std::logic_error("this driver cannot hand chunks over");
}
inline std::vector<Handle> Driver::receive(const SentChunks&, size_t) {
  throw std::logic_error("this driver cannot hand chunks over");
}

}  // namespace vtensor
