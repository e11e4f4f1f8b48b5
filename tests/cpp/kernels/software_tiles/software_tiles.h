// SoftwareTiles: AMX's tiles and their instructions in software, for CPUs that have none.
//
// As Intel's manual (volume 2, LDTILECFG to TDPBUSD) describes them: tiles are zero after they are
// configured; a load or a store touches as many rows and bytes as its tile has, and no more, so
// that a sanitizer sees what is read beyond; what raises #UD or #GP throws TileFault. A kernel that
// is compiled after this header computes on these tiles: the intrinsics become calls of it.
//
// Thread-safety: tiles belong to the thread.
#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <cstdint>

namespace vtensor::testing_tiles {

struct TileFault {
  const char* what;
};

class SoftwareTiles {
 public:
  static SoftwareTiles& of_thread();

  void load_config(const void* config);  // 64 bytes
  void store_config(void* config) const;
  void zero(int tile);
  void load(int tile, const void* base, int64_t stride);
  void store(int tile, void* base, int64_t stride);
  void dpbssd(int sums, int a, int b);
  void dpbusd(int sums, int a, int b);
  void dpbf16ps(int sums, int a, int b);

  // Of matrices, since the thread began.
  int64_t num_products() const { return num_products_; }

 private:
  static constexpr int kTiles = 8, kMaxRows = 16, kMaxBytes = 64;

  struct Tile {
    int rows = 0;
    int row_bytes = 0;
    alignas(64) uint8_t bytes[kMaxRows][kMaxBytes] = {};
  };

  Tile& checked(int tile);
  template <class Multiply>
  void multiply(int sums, int a, int b, Multiply multiply);

  Tile tiles_[kTiles];
  bool is_configured_ = false;
  int64_t num_products_ = 0;
};

}  // namespace vtensor::testing_tiles

#undef _tile_loadconfig
#undef _tile_storeconfig
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbusd
#undef _tile_dpbf16ps
#define VTENSOR_TILES ::vtensor::testing_tiles::SoftwareTiles::of_thread()
#define _tile_loadconfig(config) VTENSOR_TILES.load_config(config)
#define _tile_storeconfig(config) VTENSOR_TILES.store_config(config)
#define _tile_zero(tile) VTENSOR_TILES.zero(tile)
#define _tile_loadd(tile, base, stride) VTENSOR_TILES.load(tile, base, stride)
#define _tile_stored(tile, base, stride) VTENSOR_TILES.store(tile, base, stride)
#define _tile_dpbusd(sums, a, b) VTENSOR_TILES.dpbusd(sums, a, b)
#define _tile_dpbf16ps(sums, a, b) VTENSOR_TILES.dpbf16ps(sums, a, b)
