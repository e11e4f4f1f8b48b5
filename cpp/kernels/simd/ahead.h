// Ahead: what the tiles of a panel ask for from memory while they compute.
//
// One tile alone asks for the panel itself, as it comes from memory, and so does the first tile of
// a block; the tiles after it for a share of the next panel each, so that its tiles find it in the
// cache.
#pragma once

#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// What is asked for while a tile is computed: `bytes` of the panel from `address` on a step.
struct Prefetch {
  const char* address;
  int64_t bytes;

  VTENSOR_INLINE void step() {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(address + i, 0, 2);
    address += bytes;
  }
};

// A panel of so many steps, one after the other in memory, and the next panel after it.
struct PanelSteps {
  const void* begin;
  int64_t count;
  int64_t bytes;  // of each
};

class Ahead {
 public:
  // stream_bytes: how far ahead of its products a panel is asked for.
  Ahead(const PanelSteps& panel, int64_t num_tiles, bool is_first_panel, int64_t stream_bytes)
      : panel_(panel),
        share_(num_tiles < 4 ? panel.bytes / 2 : panel.bytes / 4),
        stream_bytes_(stream_bytes),
        is_stream_(num_tiles == 1 || is_first_panel) {}

  VTENSOR_INLINE Prefetch next_tile() {
    const auto* begin = static_cast<const char*>(panel_.begin);
    if (is_stream_) {
      is_stream_ = false;
      return {begin + stream_bytes_, panel_.bytes};
    }
    const char* share = begin + panel_.count * (panel_.bytes + asked_);
    if (asked_ >= panel_.bytes) return {share, 0};
    asked_ += share_;
    return {share, share_};
  }

 private:
  PanelSteps panel_;
  int64_t share_;
  int64_t stream_bytes_;
  bool is_stream_;
  int64_t asked_ = 0;  // bytes of each step of the next panel
};

}  // namespace
}  // namespace vtensor::kernels
