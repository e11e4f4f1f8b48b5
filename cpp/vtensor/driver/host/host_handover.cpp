// HostDriver: chunks in files of their own, which go to other processes and come from them.
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>

#include "vtensor/driver/host/host_driver.h"
#include "vtensor/driver/host/host_handle.h"
#include "vtensor/util/error.h"

namespace vtensor {

HostDriver::Extent HostDriver::extent_of(uint64_t number) const {
  const Handle handle{number};
  if (!is_apart(handle)) return {memfd_, number};
  return {parcels_[parcel_idx(handle)]->memory(), parcel_offset(handle)};
}

// A parcel with mapped chunks stays where it is.
HostDriver::Extent HostDriver::extent_of_mapped(uint64_t number) const {
  if (!is_apart(Handle{number})) return {memfd_, number};
  const std::lock_guard lock(mutex_);
  return extent_of(number);
}

uint32_t HostDriver::add_parcel(std::unique_ptr<HostParcel> parcel) {
  if (free_parcels_.empty()) {
    free_parcels_.insert(static_cast<uint32_t>(parcels_.size()));
    parcels_.emplace_back();
  }
  const uint32_t idx = free_parcels_.pop_lowest();
  parcels_[idx] = std::move(parcel);
  return idx;
}

void HostDriver::drop_parcel_if_empty(uint32_t idx) {
  if (!parcels_[idx]->offsets().empty()) return;
  parcels_[idx].reset();
  free_parcels_.insert(idx);
  std::erase_if(unfilled_, [idx](const auto& entry) { return entry.second == idx; });
}

// As claim(), in the parcel of that number, or a new one where it is full or has been sent.
Handle HostDriver::claim_apart(size_t chunk_bytes, Apart apart) {
  const std::lock_guard lock(mutex_);
  ledger_.require_chunk_shape(chunk_bytes);
  require_capacity(chunk_bytes);
  std::optional<uint64_t> offset;
  auto unfilled = unfilled_.find(apart.number);
  if (unfilled != unfilled_.end()) offset = parcels_[unfilled->second]->take_place(chunk_bytes);
  if (!offset) {
    require_mappings_left(ledger_.num_mappings() + 1);
    const size_t capacity = std::clamp(apart.capacity_bytes, chunk_bytes, kMaxParcelBytes);
    auto parcel = std::make_unique<HostParcel>(capacity, page_bytes_);
    offset = parcel->take_place(chunk_bytes);
    unfilled = unfilled_.insert_or_assign(apart.number, add_parcel(std::move(parcel))).first;
  }
  const Handle handle = apart_handle(unfilled->second, *offset);
  ledger_.add_chunk_at(handle, chunk_bytes);
  created_bytes_ += chunk_bytes;
  memory_credit_bytes_ -= chunk_bytes;
  return handle;
}

Handle HostDriver::create_apart(size_t chunk_bytes, Apart apart) {
  const Handle handle = claim_apart(chunk_bytes, apart);
  HostMemfd* memory = nullptr;
  {
    const std::lock_guard lock(mutex_);
    memory = &parcels_[parcel_idx(handle)]->memory();
  }
  try {
    commit(*memory, parcel_offset(handle), chunk_bytes);
  } catch (...) {
    unclaim(handle, chunk_bytes);
    throw;
  }
  return handle;
}

std::vector<bool> HostDriver::sendable(std::span<const Handle> handles) const {
  const std::lock_guard lock(mutex_);
  std::unordered_map<uint32_t, size_t> num_sent;  // by parcel
  for (const Handle handle : handles) {
    if (is_apart(handle)) ++num_sent[parcel_idx(handle)];
  }
  std::vector<bool> sendable;
  sendable.reserve(handles.size());
  for (const Handle handle : handles) {
    const uint32_t idx = parcel_idx(handle);
    sendable.push_back(is_apart(handle) && num_sent[idx] == parcels_[idx]->offsets().size());
  }
  return sendable;
}

SentChunks HostDriver::send(std::span<const Handle> handles) {
  const std::lock_guard lock(mutex_);
  SentChunks sent;
  std::unordered_map<uint32_t, uint32_t> files;  // by parcel
  std::vector<std::vector<uint64_t>> offsets;    // by file
  std::vector<uint32_t> parcels;
  for (const Handle handle : handles) {
    if (!is_apart(handle)) throw std::invalid_argument("a chunk of the pool cannot be sent");
    ledger_.require_bytes(handle, 0, 0);
    const auto [file, is_new] =
        files.try_emplace(parcel_idx(handle), static_cast<uint32_t>(parcels.size()));
    if (is_new) {
      parcels.push_back(parcel_idx(handle));
      offsets.emplace_back();
    }
    offsets[file->second].push_back(parcel_offset(handle));
    sent.places.push_back({file->second, parcel_offset(handle)});
  }
  for (size_t i = 0; i < parcels.size(); ++i) {
    sent.files.push_back(parcels_[parcels[i]]->lend(offsets[i], ledger_.chunk_bytes()));
  }
  return sent;
}

std::vector<Handle> HostDriver::receive(const SentChunks& sent, size_t chunk_bytes) {
  std::vector<std::vector<uint64_t>> offsets(sent.files.size());
  for (const ChunkPlace& place : sent.places) {
    if (place.file >= offsets.size()) {
      throw std::invalid_argument("a chunk in file " + std::to_string(place.file) + ", but only " +
                                  std::to_string(offsets.size()) + " files were received");
    }
    offsets[place.file].push_back(place.offset_bytes);
  }
  {
    const std::lock_guard lock(mutex_);
    ledger_.require_chunk_shape(chunk_bytes);
  }
  std::vector<std::unique_ptr<HostParcel>> parcels;
  for (size_t i = 0; i < offsets.size(); ++i) {
    parcels.push_back(std::make_unique<HostParcel>(sent.files[i].get(), page_bytes_));
    if (parcels.back()->memory().space_bytes() > kMaxParcelBytes) {
      throw std::invalid_argument("a received file of " +
                                  std::to_string(parcels.back()->memory().space_bytes()) +
                                  " bytes is too large");
    }
    parcels.back()->hold(offsets[i], chunk_bytes);
  }
  std::vector<Handle> handles;
  add_received(parcels, sent, chunk_bytes, handles);
  return handles;
}

// Chunks that are there already, of which the memory is counted here too. Without the cap and the
// mappings for them nothing changes.
void HostDriver::add_received(std::vector<std::unique_ptr<HostParcel>>& parcels,
                              const SentChunks& sent, size_t chunk_bytes,
                              std::vector<Handle>& handles) {
  const std::lock_guard lock(mutex_);
  const size_t size_bytes = sent.places.size() * chunk_bytes;
  if (size_bytes > capacity_bytes_ - created_bytes_) {
    throw OutOfMemoryError(size_bytes, capacity_bytes_ - created_bytes_, capacity_bytes_,
                           "the host driver's capacity_bytes is reached");
  }
  require_mappings_left(ledger_.num_mappings() + parcels.size());
  std::vector<uint32_t> idx;
  for (auto& parcel : parcels) idx.push_back(add_parcel(std::move(parcel)));
  for (const ChunkPlace& place : sent.places) {
    handles.push_back(apart_handle(idx[place.file], place.offset_bytes));
    ledger_.add_chunk_at(handles.back(), chunk_bytes);
  }
  created_bytes_ += size_bytes;
}

size_t HostDriver::resident_bytes() const {
  const std::lock_guard lock(mutex_);
  size_t num_bytes = memfd_.resident_bytes();
  for (const auto& parcel : parcels_) {
    if (parcel != nullptr) num_bytes += parcel->memory().resident_bytes();
  }
  return num_bytes;
}

}  // namespace vtensor
