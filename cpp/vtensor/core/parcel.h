// Parcel: the KV of a vTensor on its way to another process: chunks as files and places in them,
// and what their new owner must know.
#pragma once

#include <cstddef>
#include <vector>

#include "vtensor/driver/sent_chunks.h"

namespace vtensor {

struct Parcel {
  SentChunks chunks;           // those that are there, in the order of the page table
  std::vector<bool> is_there;  // by entry of the page table, [row * row_chunks + column]; false: a
                               // window has left it behind
  size_t num_tokens = 0;
  bool continues = false;  // the receiver may write on in the last row: nobody else will
  size_t num_copied = 0;   // chunks that had to be copied to be sent
};

}  // namespace vtensor
