// Launches: kernels that read and write through mappings, held against CUDA's rule of virtual
// aliasing (CUDA C++ Programming Guide, "Virtual Aliasing Support").
//
//   bytes   | chunk 7, at 0x1000 for request A, at 0x9000 for request B
//   legal     A writes 0x1100, B reads 0x9000..0x90ff      other bytes of one chunk
//   broken    A writes 0x1100, B reads 0x9000..0x91ff      one byte through two addresses
#include <map>
#include <vector>

#include "standin_cuda.h"
#include "state.h"

namespace {

using namespace standin;  // NOLINT

// Physical bytes, and the address that they are reached through.
struct Piece {
  Range physical;
  uint64_t addr;
};

bool pieces_of(const uint64_t* ranges, uint64_t count, int access, std::vector<Piece>* out) {
  for (uint64_t i = 0; i < count; ++i) {
    uint64_t addr = ranges[2 * i];
    std::vector<Range> physical;
    if (!translate(addr, ranges[2 * i + 1], access, &physical)) {
      (void)violation(CUDA_ERROR_ILLEGAL_ADDRESS, "launch",
                      range_text(addr, ranges[2 * i + 1]) + " is not mapped for this access");
      return false;
    }
    for (const Range& range : physical) {
      out->push_back({range, addr});
      addr += range.size_bytes;
    }
  }
  return true;
}

bool share_a_byte_through_two_addresses(const Piece& a, const Piece& b) {
  return a.physical.overlaps(b.physical.addr, b.physical.size_bytes) &&
         a.addr - a.physical.addr != b.addr - b.physical.addr;
}

bool is_touched_by_a_kernel(const Range& range) {
  for (const auto& [handle, stream] : state().streams) {
    for (const Op& op : stream.queue) {
      if (op.kind != Op::Kind::kKernel || op.kernel == 0) continue;
      for (const Range& touched : op.physical) {
        if (touched.overlaps(range.addr, range.size_bytes)) return true;
      }
    }
  }
  return false;
}

}  // namespace

STANDIN_EXPORT int standin_cuda_launch(const uint64_t* reads, uint64_t num_reads,
                                       const uint64_t* writes, uint64_t num_writes) {
  const std::lock_guard lock(state().mutex);
  std::vector<Piece> written;
  if (!pieces_of(writes, num_writes, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, &written)) return 0;
  std::vector<Piece> touched = written;
  if (!pieces_of(reads, num_reads, CU_MEM_ACCESS_FLAGS_PROT_READ, &touched)) return 0;
  for (const Piece& piece : written) {
    for (const Piece& other : touched) {
      if (!share_a_byte_through_two_addresses(piece, other)) continue;
      (void)violation(CUDA_ERROR_ILLEGAL_ADDRESS, "launch",
                      "writes bytes through " + hex(piece.addr) + " and touches them through " +
                          hex(other.addr));
      return 0;
    }
    if (is_touched_by_a_kernel(piece.physical)) {
      (void)violation(CUDA_ERROR_ILLEGAL_ADDRESS, "launch",
                      "writes at " + hex(piece.addr) + " what a kernel in flight touches");
      return 0;
    }
  }
  return 1;
}
