// SentChunks: chunks on their way to another process: files that hold them, and the place of each.
//
// The files keep the memory alive: when nobody holds one of them any more, by whatever end, what is
// in it goes back to the system.
#pragma once

#include <cstdint>
#include <vector>

#include "vtensor/util/file_descriptor.h"

namespace vtensor {

struct ChunkPlace {
  uint32_t file = 0;  // index in SentChunks::files
  uint64_t offset_bytes = 0;

  friend bool operator==(const ChunkPlace&, const ChunkPlace&) = default;
};

struct SentChunks {
  SentChunks() = default;
  SentChunks(SentChunks&&) = default;
  SentChunks& operator=(SentChunks&&) = default;
  SentChunks(const SentChunks&) = delete;  // else std::vector says that it can be copied
  SentChunks& operator=(const SentChunks&) = delete;
  ~SentChunks() = default;

  std::vector<FileDescriptor> files;
  std::vector<ChunkPlace> places;
};

}  // namespace vtensor
