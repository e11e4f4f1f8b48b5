// VTensor: one request's contiguous virtual range, as the scheduler keeps book of it.
//
//   tokens   0 ........ first_owned_row ........ num_tokens ....... write_limit
//            |  aliased  |  appended by this vTensor | mapped, may be |
//            |  rows     |                           | written next   |
//
// Invariants:
//  1. it is the appender of every chunk in rows [first_owned_row, mapped rows), except the tail row
//  while
//     last_row_shared;
//  2. tokens below frozen_tokens are seen by others (recorded or forked): never written again;
//  3. write_limit is the length up to which extend() needs no driver call and no copy.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "vtensor/pool/vset.h"
#include "vtensor/store/swap_store.h"

namespace vtensor {

// First what a decode step looks at: one cache line per vTensor.
struct alignas(64) VTensor {
  VTensorId id = kNoVTensor;
  size_t num_tokens = 0;   // declared length: KV of these tokens is or is being written
  size_t peak_tokens = 0;  // the longest it ever was
  size_t write_limit = 0;
  uint64_t plan = 0;  // the last plan_extend() that named it
  SlotId slot = 0;
  bool is_swapped = false;       // nothing is mapped; its contents are in `kept` and the swap store
  bool busy = false;             // a growth of it is under way without the manager's mutex
  bool last_row_shared = false;  // the tail row is an alias; own it before writing
  size_t first_owned_row = 0;
  size_t forget_at = SIZE_MAX;  // computed tokens with which rows leave a window; see forgetter.h
  size_t frozen_tokens = 0;
  size_t num_cached_tokens = 0;  // found recorded at creation
  size_t num_cut_tokens = 0;     // recorded beyond these, but without rows of a window
  size_t cut_by_window = 0;      // its tokens; 0: nothing was cut
  std::vector<ChunkId> kept;     // swapped: its first rows, which others hold too; row-major
  std::vector<SwapStore::Ticket> swapped;  // the rows that follow: one per chunk
  size_t planned_tokens = 0;               // of its rows, `plan` spares those of so many tokens
  size_t past_tokens = 0;        // no query before this one follows, by the last that was said
  size_t forgotten_tokens = 0;   // noted: no query before this one follows; 0: nothing is due
  uint64_t forgotten_epoch = 0;  // the last one that may read what is due
  bool forget_posted = false;    // the worker has been told
  uint64_t apart = 0;            // its chunks are created apart, under this number; 0: the pool's
  uint64_t tenant = 0;
  std::string salt;
  size_t chunks_aliased = 0;
  size_t chunks_copied = 0;
};

}  // namespace vtensor
