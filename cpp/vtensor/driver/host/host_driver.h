// HostDriver: real memory on any Linux machine, without a GPU and without root.
//
// All chunks are places in one sparse memfd, all of one size; a Handle is an offset in it. Mapping
// is mmap, sharing is mapping the same offset twice, and giving memory back is punching a hole:
// unmapping a memfd frees nothing.
//
//   memfd    [chunk 0][chunk 1][ hole ][chunk 3] ...    sparse, as large as the capacity
//   window   [ all of it, read-write, for good       ]  copy, fill, read, write, collapse;
//                                                       resident only while one of them runs
//   range A  [chunk 3][chunk 0][chunk 1][ rest       ]  reserve, map, set_access
//   range B  [chunk 3][ rest                         ]  the same chunk, shared
//
// Chunks that may go to another process are places in files of their own (host_parcel.h), each with
// a window; a Handle then names the file too.
//
// Thread-safety: as driver.h says. One mutex guards the bookkeeping; it is not held during system
// calls, except a reading of /proc once every 64 MiB created, and the opening of parcels.
//
// Fork: a child has neither the window nor the mapped chunks (touching them faults), so it can not
// write into its parent's cache by accident; it must not use the driver. Core dumps leave the
// chunks out: they hold users' text, once for every mapping.
//
// Invariants:
//  1. Memory is committed when a chunk is created, below the byte cap and what the system says it
//     has, never when it is touched: there, shortage is SIGBUS or the kernel's OOM killer.
//  2. A chunk that is a multiple of 2 MiB lies at a multiple of 2 MiB in the file, so that it can
//     be huge pages. It is *mapped* by huge pages where its address is such a multiple too.
//  3. No more than mapping_limit() mappings are held, well below vm.max_map_count: at the system's
//     limit malloc fails, and unmapping too.
//  4. An address of a reserved range is always mapped by this driver, to a chunk or to the
//     unmapped rest.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "vtensor/driver/driver.h"
#include "vtensor/driver/host/host_memfd.h"
#include "vtensor/driver/host/host_parcel.h"
#include "vtensor/driver/ledger.h"

namespace vtensor {

struct HostOptions {
  size_t capacity_bytes = 0;  // cap on created chunks; 0: three quarters of the available memory
  UnmappedPolicy unmapped = kDefaultUnmapped;
  bool huge_pages = true;    // use them where the kernel can
  size_t mapping_limit = 0;  // mappings held by this driver; 0: 75 % of vm.max_map_count, less the
                             // mappings that the process has already
  size_t reserve_headroom_bytes = size_t{256} << 20;  // of available memory that create() leaves
  // Put before the paths of /proc and /sys, so that tests can show other numbers.
  std::string system_root{};
};

class HostDriver final : public Driver {
 public:
  // Throws DriverError when the system refuses the memfd or the window.
  explicit HostDriver(const HostOptions& options = {});
  ~HostDriver() override;  // gives everything back, mapped or not

  HostDriver(const HostDriver&) = delete;
  HostDriver& operator=(const HostDriver&) = delete;

  std::string_view name() const noexcept override { return "host"; }
  Device device() const noexcept override { return {Device::Type::kCpu, 0}; }
  bool has_memory() const noexcept override { return true; }
  size_t granularity() const noexcept override { return page_bytes_; }

  // Alignment of 2 MiB or more lets huge pages be mapped as such.
  uintptr_t reserve(size_t size_bytes, size_t alignment_bytes) override;
  void free(uintptr_t addr, size_t size_bytes) override;

  // Throws OutOfMemoryError at the cap, and before the system or the container is short of memory.
  Handle create(size_t chunk_bytes) override;
  // Throws std::invalid_argument while the chunk is mapped. In a forked child it frees nothing.
  void release(Handle handle, size_t chunk_bytes) override;

  // map() throws MappingLimitError before the mapping limit is passed.
  void map(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes) override;
  void set_access(uintptr_t addr, size_t size_bytes, Access access) override;
  // At the system's own mapping limit unmap() leaves a range that faults under kZero too, until it
  // is mapped again.
  void unmap(uintptr_t addr, size_t size_bytes, size_t chunk_bytes) override;
  // One system call replaces a mapping, and page faults wait for it: rule 9.
  bool remaps_in_place() const noexcept override { return true; }
  void remap(uintptr_t addr, std::span<const Handle> handles, size_t chunk_bytes,
             Access access) override;

  bool hands_over() const noexcept override { return true; }
  Handle create_apart(size_t chunk_bytes, Apart apart) override;
  std::vector<bool> sendable(std::span<const Handle> handles) const override;
  SentChunks send(std::span<const Handle> handles) override;
  std::vector<Handle> receive(const SentChunks& sent, size_t chunk_bytes) override;

  std::optional<Handle> mapped_at(uintptr_t addr) const override {
    const std::lock_guard lock(mutex_);
    return ledger_.mapped_at(addr);
  }
  void verify_mapped(std::span<const uintptr_t> addrs) const override;
  void copy(Handle dst, size_t dst_offset, Handle src, size_t src_offset,
            size_t size_bytes) override;
  void fill(Handle dst, size_t dst_offset, size_t size_bytes, std::byte value) override;
  void read(Handle src, size_t src_offset, std::span<std::byte> out) override;
  void write(Handle dst, size_t dst_offset, std::span<const std::byte> in) override;

  size_t capacity_bytes() const noexcept { return capacity_bytes_; }
  size_t created_bytes() const;
  size_t resident_bytes() const;  // what the system holds
  size_t mapping_limit() const noexcept { return mapping_limit_; }
  size_t num_mappings() const;  // never less than the kernel's count for this driver
  // Chunks of whole 2 MiB really become huge pages: the kernel has been tried.
  bool huge_pages_active() const noexcept { return huge_pages_; }

 private:
  std::byte* bytes_at(Handle handle, size_t offset, size_t size_bytes) const;
  void forget(Handle handle) const noexcept;

  // Where a chunk's bytes are.
  struct Extent {
    const HostMemfd& memory;
    uint64_t offset;
  };
  Extent extent_of(uint64_t number) const;         // Requires: the mutex is held.
  Extent extent_of_mapped(uint64_t number) const;  // Takes it if it must.

  // Where the system shows each file, by the handle of its first byte.
  using Readings = std::map<uint64_t, std::optional<std::map<uintptr_t, HostMemfd::Extent>>>;
  std::optional<Handle> shown_handle(uintptr_t addr, Readings& read) const;

  void require_capacity(size_t size_bytes);
  Handle claim(size_t chunk_bytes);
  Handle claim_apart(size_t chunk_bytes, Apart apart);
  uint32_t add_parcel(std::unique_ptr<HostParcel> parcel);
  void drop_parcel_if_empty(uint32_t idx);
  void add_received(std::vector<std::unique_ptr<HostParcel>>& parcels, const SentChunks& sent,
                    size_t chunk_bytes, std::vector<Handle>& handles);
  void unclaim(Handle handle, size_t chunk_bytes);
  void finish_release(Handle handle, size_t chunk_bytes);
  size_t num_windows() const { return 1 + parcels_.size() - free_parcels_.size(); }
  void require_memory(size_t size_bytes);
  void commit(HostMemfd& memory, uint64_t offset, size_t size_bytes);
  bool probe_huge_pages();

  void require_mappings_left(size_t num_mappings) const;
  std::vector<Ledger::Run> record_remap(uintptr_t addr, std::span<const Handle> handles,
                                        size_t chunk_bytes, Access access,
                                        std::vector<Ledger::Run>& after);
  void apply(const Ledger::Run& run, Access access) const;
  void show(Ledger::Run run) const noexcept;
  void show_unmapped(uintptr_t addr, size_t size_bytes) const;

  const HostOptions options_;
  const size_t page_bytes_;
  const pid_t owner_pid_;
  const size_t capacity_bytes_;
  const size_t mapping_limit_;
  HostMemfd memfd_;
  const bool huge_pages_;

  mutable std::mutex mutex_;  // guards all below
  Ledger ledger_;
  size_t created_bytes_ = 0;
  size_t memory_credit_bytes_ = 0;  // may be created before /proc is read again
  std::vector<std::unique_ptr<HostParcel>> parcels_;
  IdSet free_parcels_;                               // places in parcels_ that are empty
  std::unordered_map<uint64_t, uint32_t> unfilled_;  // by Apart::number: where chunks go now
};

}  // namespace vtensor
