#include "tests/cpp/kernels/software_tiles/software_tiles.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>

namespace vtensor::testing_tiles {
namespace {

struct Config {
  uint8_t palette;
  uint8_t start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};
static_assert(sizeof(Config) == 64);

void fault_if(bool is_wrong, const char* what) {
  if (is_wrong) throw TileFault{what};
}

template <class T>
T read(const uint8_t* bytes) {
  T value;
  std::memcpy(&value, bytes, sizeof value);
  return value;
}

// Numbers below the normal ones count as 0, as inputs and as results.
float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.0F, x) : x; }

float number_of(uint16_t bfloat16) {
  const uint32_t bits = uint32_t{bfloat16} << 16;
  return flushed(read<float>(reinterpret_cast<const uint8_t*>(&bits)));
}

}  // namespace

SoftwareTiles& SoftwareTiles::of_thread() {
  static thread_local SoftwareTiles tiles;
  return tiles;
}

void SoftwareTiles::load_config(const void* bytes) {
  const auto config = read<Config>(static_cast<const uint8_t*>(bytes));
  fault_if(config.palette > 1, "#GP: no such palette");
  if (config.palette == 1) {
    fault_if(config.start_row != 0, "a start row: of no use but to what was interrupted");
    const auto is_set = [](auto value) { return value != 0; };
    fault_if(std::any_of(config.reserved, std::end(config.reserved), is_set) ||
                 std::any_of(config.row_bytes + kTiles, std::end(config.row_bytes), is_set) ||
                 std::any_of(config.rows + kTiles, std::end(config.rows), is_set),
             "#GP: reserved bytes are set");
    for (int i = 0; i < kTiles; ++i) {
      fault_if(config.rows[i] > kMaxRows || config.row_bytes[i] > kMaxBytes, "#GP: too large");
      fault_if((config.rows[i] == 0) != (config.row_bytes[i] == 0), "#GP: half of a shape");
    }
  }
  is_configured_ = config.palette == 1;
  for (int i = 0; i < kTiles; ++i) {
    tiles_[i] = Tile();
    if (!is_configured_) continue;
    tiles_[i].rows = config.rows[i];
    tiles_[i].row_bytes = config.row_bytes[i];
  }
}

void SoftwareTiles::store_config(void* bytes) const {
  Config config = {};
  config.palette = is_configured_ ? 1 : 0;
  for (int i = 0; i < kTiles; ++i) {
    config.rows[i] = static_cast<uint8_t>(tiles_[i].rows);
    config.row_bytes[i] = static_cast<uint16_t>(tiles_[i].row_bytes);
  }
  std::memcpy(bytes, &config, sizeof config);
}

SoftwareTiles::Tile& SoftwareTiles::checked(int tile) {
  fault_if(!is_configured_, "#UD: tiles are not configured");
  fault_if(tile < 0 || tile >= kTiles || tiles_[tile].rows == 0, "#UD: no such tile");
  fault_if(tiles_[tile].row_bytes % 4 != 0, "#UD: part of a word");
  return tiles_[tile];
}

void SoftwareTiles::zero(int tile) {
  Tile& cleared = checked(tile);
  std::memset(cleared.bytes, 0, sizeof cleared.bytes);
}

void SoftwareTiles::load(int tile, const void* base, int64_t stride) {
  Tile& loaded = checked(tile);
  std::memset(loaded.bytes, 0, sizeof loaded.bytes);
  for (int row = 0; row < loaded.rows; ++row) {
    std::memcpy(loaded.bytes[row], static_cast<const char*>(base) + row * stride,
                static_cast<size_t>(loaded.row_bytes));
  }
}

void SoftwareTiles::store(int tile, void* base, int64_t stride) {
  const Tile& stored = checked(tile);
  for (int row = 0; row < stored.rows; ++row) {
    std::memcpy(static_cast<char*>(base) + row * stride, stored.bytes[row],
                static_cast<size_t>(stored.row_bytes));
  }
}

// Of each row of `sums` [m, n] the words of a's [m, k] and all of b [k, n].
template <class Multiply>
void SoftwareTiles::multiply(int sums, int a, int b, Multiply multiply) {
  fault_if(sums == a || sums == b || a == b, "#UD: a tile twice");
  Tile& output = checked(sums);
  const Tile& left = checked(a);
  const Tile& right = checked(b);
  fault_if(output.rows != left.rows || output.row_bytes != right.row_bytes ||
               left.row_bytes != right.rows * 4,
           "#UD: shapes that do not fit");
  for (int m = 0; m < output.rows; ++m) {
    multiply(output.bytes[m], left.bytes[m], right, output.row_bytes / 4);
  }
  ++num_products_;
}

namespace {

template <class A>
void add_bytes(uint8_t* sums, const uint8_t* left, const uint8_t (*right)[64], int k, int n) {
  for (int i = 0; i < k; ++i) {
    for (int j = 0; j < n; ++j) {
      auto sum = read<uint32_t>(sums + j * 4);
      for (int byte = 0; byte < 4; ++byte) {
        const int x = static_cast<A>(left[i * 4 + byte]);
        sum += static_cast<uint32_t>(x * static_cast<int8_t>(right[i][j * 4 + byte]));
      }
      std::memcpy(sums + j * 4, &sum, sizeof sum);
    }
  }
}

}  // namespace

void SoftwareTiles::dpbssd(int sums, int a, int b) {
  multiply(sums, a, b, [](uint8_t* row, const uint8_t* left, const Tile& right, int n) {
    add_bytes<int8_t>(row, left, right.bytes, right.rows, n);
  });
}

void SoftwareTiles::dpbusd(int sums, int a, int b) {
  multiply(sums, a, b, [](uint8_t* row, const uint8_t* left, const Tile& right, int n) {
    add_bytes<uint8_t>(row, left, right.bytes, right.rows, n);
  });
}

// Even and odd products are summed apart and from 0, then added to each other, then to the sum. A
// product of two bfloat16 numbers is exact in float32, but where it is below the normal ones.
void SoftwareTiles::dpbf16ps(int sums, int a, int b) {
  multiply(sums, a, b, [](uint8_t* row, const uint8_t* left, const Tile& right, int n) {
    float parts[kMaxBytes / 4][2] = {};
    for (int k = 0; k < right.rows; ++k) {
      for (int i = 0; i < 2; ++i) {
        const float x = number_of(read<uint16_t>(left + k * 4 + i * 2));
        for (int j = 0; j < n; ++j) {
          const float w = number_of(read<uint16_t>(right.bytes[k] + j * 4 + i * 2));
          parts[j][i] = flushed(parts[j][i] + x * w);
        }
      }
    }
    for (int j = 0; j < n; ++j) {
      const float sum =
          flushed(flushed(read<float>(row + j * 4)) + flushed(parts[j][0] + parts[j][1]));
      std::memcpy(row + j * 4, &sum, sizeof sum);
    }
  });
}

}  // namespace vtensor::testing_tiles
