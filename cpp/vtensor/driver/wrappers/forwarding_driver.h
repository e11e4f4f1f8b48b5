// ForwardingDriver: owns an inner driver and passes every call on; the base of all wrappers.
//
//   wrapper.create(n)  ->  before(call)  ->  inner.create(n)  ->  after(call)
//
// A wrapper overrides before() and after() and nothing else. Wrappers compose, in any order.
//
// Thread-safety: that of the inner driver; before() and after() are entered concurrently.
//
// Invariants:
//  1. before() that throws: the inner driver is not called and neither is after().
//  2. after() runs exactly once for every before() that returned; call.ok says whether the inner
//     driver returned, and then call.addr (reserve) and call.handle (create) hold its result.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "vtensor/driver/driver.h"
#include "vtensor/driver/driver_call.h"

namespace vtensor {

class ForwardingDriver : public Driver {
 public:
  explicit ForwardingDriver(std::unique_ptr<Driver> inner) : inner_(std::move(inner)) {
    if (inner_ == nullptr) throw std::invalid_argument("a wrapper needs an inner driver");
  }

  Driver& inner() noexcept { return *inner_; }

  std::string_view name() const noexcept override { return inner_->name(); }
  Device device() const noexcept override { return inner_->device(); }
  bool has_memory() const noexcept override { return inner_->has_memory(); }
  bool remaps_in_place() const noexcept override { return inner_->remaps_in_place(); }
  std::optional<Handle> mapped_at(uintptr_t addr) const override { return inner_->mapped_at(addr); }
  void verify_mapped(std::span<const uintptr_t> addrs) const override {
    inner_->verify_mapped(addrs);
  }
  size_t granularity() const noexcept override { return inner_->granularity(); }

  std::unique_ptr<Fence> fence(uintptr_t stream) override { return inner_->fence(stream); }
  void synchronize() override { inner_->synchronize(); }

  uintptr_t reserve(size_t size_bytes, size_t alignment_bytes) override {
    DriverCall call{
        .kind = CallKind::kReserve, .size_bytes = size_bytes, .alignment_bytes = alignment_bytes};
    around(call, [&] { call.addr = inner_->reserve(size_bytes, alignment_bytes); });
    return call.addr;
  }

  void free(uintptr_t addr, size_t size_bytes) override {
    around({.kind = CallKind::kFree, .addr = addr, .size_bytes = size_bytes},
           [&] { inner_->free(addr, size_bytes); });
  }

  Handle create(size_t chunk_bytes) override {
    DriverCall call{
        .kind = CallKind::kCreate, .size_bytes = chunk_bytes, .chunk_bytes = chunk_bytes};
    around(call, [&] { call.handle = inner_->create(chunk_bytes); });
    return call.handle;
  }

  void release(Handle handle, size_t chunk_bytes) override {
    around({.kind = CallKind::kRelease,
            .handle = handle,
            .size_bytes = chunk_bytes,
            .chunk_bytes = chunk_bytes},
           [&] { inner_->release(handle, chunk_bytes); });
  }

  void map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) override {
    around({.kind = CallKind::kMap,
            .addr = addr,
            .handles = handles,
            .size_bytes = handles.size() * chunk_bytes,
            .chunk_bytes = chunk_bytes},
           [&] { inner_->map(addr, handles, chunk_bytes); });
  }

  void set_access(uintptr_t addr, size_t size_bytes, Access access) override {
    around({.kind = CallKind::kSetAccess, .addr = addr, .size_bytes = size_bytes, .access = access},
           [&] { inner_->set_access(addr, size_bytes, access); });
  }

  void unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) override {
    around({.kind = CallKind::kUnmap,
            .addr = addr,
            .size_bytes = size_bytes,
            .chunk_bytes = chunk_bytes},
           [&] { inner_->unmap(addr, size_bytes, chunk_bytes); });
  }

  void remap(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes,
             Access access) override {
    around({.kind = CallKind::kRemap,
            .addr = addr,
            .handles = handles,
            .size_bytes = handles.size() * chunk_bytes,
            .chunk_bytes = chunk_bytes,
            .access = access},
           [&] { inner_->remap(addr, handles, chunk_bytes, access); });
  }

  bool hands_over() const noexcept override { return inner_->hands_over(); }
  std::vector<bool> sendable(std::span<const Handle> handles) const override {
    return inner_->sendable(handles);
  }

  Handle create_apart(size_t chunk_bytes, Apart apart) override {
    DriverCall call{
        .kind = CallKind::kCreate, .size_bytes = chunk_bytes, .chunk_bytes = chunk_bytes};
    around(call, [&] { call.handle = inner_->create_apart(chunk_bytes, apart); });
    return call.handle;
  }

  SentChunks send(std::span<const Handle> handles) override {
    SentChunks sent;
    around({.kind = CallKind::kSend, .handles = handles}, [&] { sent = inner_->send(handles); });
    return sent;
  }

  std::vector<Handle> receive(const SentChunks& sent, size_t chunk_bytes) override {
    std::vector<Handle> handles;
    around({.kind = CallKind::kReceive,
            .size_bytes = sent.places.size() * chunk_bytes,
            .chunk_bytes = chunk_bytes},
           [&] { handles = inner_->receive(sent, chunk_bytes); });
    return handles;
  }

  void copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
            size_t size_bytes) override {
    around({.kind = CallKind::kCopy,
            .handle = dst,
            .source = src,
            .offset_bytes = dst_offset,
            .source_offset_bytes = src_offset,
            .size_bytes = size_bytes},
           [&] { inner_->copy(dst, dst_offset, src, src_offset, size_bytes); });
  }

  void fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte value) override {
    around({.kind = CallKind::kFill,
            .handle = dst,
            .offset_bytes = dst_offset,
            .size_bytes = size_bytes},
           [&] { inner_->fill(dst, dst_offset, size_bytes, value); });
  }

  void read(Handle src, size_t src_offset, std::span<std::byte> out) override {
    around({.kind = CallKind::kRead,
            .handle = src,
            .offset_bytes = src_offset,
            .size_bytes = out.size()},
           [&] { inner_->read(src, src_offset, out); });
  }

  void write(Handle dst, size_t dst_offset, std::span<const std::byte> in) override {
    around({.kind = CallKind::kWrite,
            .handle = dst,
            .offset_bytes = dst_offset,
            .size_bytes = in.size()},
           [&] { inner_->write(dst, dst_offset, in); });
  }

 protected:
  // May throw to keep the call from happening. May fill in call.start_ns.
  virtual void before(DriverCall& call) = 0;
  virtual void after(DriverCall& call) noexcept = 0;

 private:
  template <class Forward>
  void around(DriverCall& call, Forward&& forward) {
    before(call);
    struct After {
      ForwardingDriver& driver;
      DriverCall& call;
      ~After() { driver.after(call); }
    } guard{*this, call};
    forward();
    call.ok = true;
  }

  template <class Forward>
  void around(DriverCall&& call, Forward&& forward) {
    around(call, std::forward<Forward>(forward));
  }

  std::unique_ptr<Driver> inner_;
};

}  // namespace vtensor
