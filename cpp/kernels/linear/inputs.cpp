#include "kernels/linear/inputs.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

#include "kernels/linear/words.h"

namespace vtensor::kernels {
namespace {

// Fewer numbers are read sooner than another thread wakes.
constexpr int64_t kNumbersPerThread = 64 << 10;
constexpr auto kCacheLine = std::align_val_t{64};

float widen(float x) { return x; }
float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

// Magnitudes are compared as integers, where a NaN is more than all else.
template <class T>
float quantise_piece(const T* x, int64_t depth, uint8_t zero, uint8_t* output) {
  int32_t largest_bits = 0;
  for (int64_t k = 0; k < depth; ++k) {
    const auto magnitude = static_cast<int32_t>(bits_of(widen(x[k])) & 0x7fffffff);
    largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof largest);
  // Of a piece with no finite scale nothing can be told: 0 times infinity is NaN below.
  const float factor = 127 / largest, scale = largest / 127;
  if (!(factor > 0) || factor > 0x1p126F) {  // NaN, infinity; zero, or next to it
    std::fill_n(output, depth, zero);
    if (largest < 1) return 0;
    return std::isfinite(largest) ? scale : std::numeric_limits<float>::quiet_NaN();
  }
  const float magic =
      0x1.8p23F + static_cast<float>(zero);  // adding it rounds to an integer, in the low bits
  for (int64_t k = 0; k < depth; ++k) {
    const float scaled = widen(x[k]) * factor;  // apart: never one instruction with the sum
    output[k] = static_cast<uint8_t>(bits_of(scaled + magic));
  }
  return scale;
}

void order_eights(uint8_t* bytes, int64_t depth) {
  for (int64_t k = 0; k < depth; k += 8) {
    uint64_t eight;
    std::memcpy(&eight, bytes + k, sizeof eight);
    eight = order_bytes(eight);
    std::memcpy(bytes + k, &eight, sizeof eight);
  }
}

// A power of two, and what takes numbers to multiples of it.
struct Unit {
  float factor;
  float unit;

  // From the bits of the largest magnitude, which it takes to 2^14 and more.
  explicit Unit(int32_t largest_bits) {
    constexpr int32_t kBias = 127, kLargest = 14, kSmallest = kBias - 100, kOdd = 255;
    const int32_t exponent = largest_bits >> 23;
    const bool counts = exponent >= kSmallest && exponent < kOdd;
    const int32_t factor_bits = counts ? (2 * kBias + kLargest - exponent) << 23 : 0;
    const int32_t unit_bits = exponent == kOdd ? 0x7fc00000
                              : counts         ? (exponent - kLargest) << 23
                                               : 0;
    std::memcpy(&factor, &factor_bits, sizeof factor);
    std::memcpy(&unit, &unit_bits, sizeof unit);
  }
};

template <class T>
float round_to_int16s(const T* x, int64_t count, int16_t* output) {
  int32_t largest_bits = 0;
  for (int64_t k = 0; k < count; ++k) {
    const auto magnitude = static_cast<int32_t>(bits_of(widen(x[k])) & 0x7fffffff);
    largest_bits = magnitude > largest_bits ? magnitude : largest_bits;
  }
  const Unit of(largest_bits);
  if (of.factor == 0) {
    std::fill_n(output, count, int16_t{0});
    return of.unit;
  }
  for (int64_t k = 0; k < count; ++k) {
    // Exact, so that it may be one instruction with the sum, which rounds to an integer.
    const uint32_t rounded = bits_of(widen(x[k]) * of.factor + 0x1.8p23F);
    output[k] = static_cast<int16_t>(rounded);
  }
  return of.unit;
}

template <class T>
void widen_row(const T* x, int64_t depth, float* output, float factor = 1) {
  for (int64_t k = 0; k < depth; ++k) output[k] = widen(x[k]) * factor;
}

// Eight sums side by side, so that a vector does them.
template <class T>
void sum_groups(const T* x, int64_t depth, int64_t group, float* sums) {
  for (int64_t k = 0; k < depth; k += group) {
    float parts[4] = {};
    for (int64_t i = 0; i < group; i += 4) {
      for (int64_t j = 0; j < 4; ++j) parts[j] += widen(x[k + i + j]);
    }
    *sums++ = (parts[0] + parts[1]) + (parts[2] + parts[3]);
  }
}

}  // namespace

void PreparedInputs::FreeAligned::operator()(uint32_t* p) const {
  ::operator delete[](p, kCacheLine);
}

PreparedInputs::PreparedInputs(Inputs kind, DType dtype, const QuantisedWeight& weight,
                               int64_t num_rows, Rotate rotate)
    : kind_(kind),
      dtype_(dtype),
      weight_(weight),
      rotate_(rotate),
      piece_(kind == Inputs::kInt16s ? piece_of(weight.group, weight.bits)
             : weight.group > 0      ? weight.group
                                     : weight.depth),
      num_pieces_(weight.depth / piece_),
      row_bytes_(weight.depth * (kind == Inputs::kBytes    ? 1
                                 : kind == Inputs::kInt16s ? 2
                                                           : 4)),
      is_copied_(kind == Inputs::kBytes || kind == Inputs::kInt16s ||
                 (kind == Inputs::kFloats && dtype != DType::kFloat32)) {
  const auto rows = static_cast<size_t>(num_rows);
  if (is_copied_) {
    rows_.reset(new (kCacheLine) uint32_t[rows * static_cast<size_t>(row_bytes_ / 4)]);
  }
  const auto pieces = rows * static_cast<size_t>(num_pieces_);
  if (kind == Inputs::kBytes || kind == Inputs::kInt16s) scales_.reset(new float[pieces]);
  const bool in_groups = kind == Inputs::kBytes && weight.group > 0;
  if (in_groups || (kind == Inputs::kInt16s && weight.bits < 8)) {
    offsets_.reset(new int32_t[pieces]);
  }
  if (weight.minimums != nullptr) {
    sums_.reset(new float[rows * static_cast<size_t>(weight.num_groups())]);
  }
}

void PreparedInputs::prepare(const Parallel& parallel, int num_threads, int64_t first,
                             int64_t num_rows, QuantisedCall& call) {
  const auto bytes = static_cast<int64_t>(element_bytes(dtype_));
  const char* x = static_cast<const char*>(call.layer.x) + first * call.layer.x_stride * bytes;
  call.inputs = is_copied_ ? static_cast<const void*>(rows_.get()) : x;
  call.input_stride = is_copied_ ? row_bytes_ : call.layer.x_stride * bytes;
  call.x_scales = scales_.get();
  call.x_sums = sums_.get();
  call.x_offsets = offsets_.get();
  call.num_pieces = num_pieces_;
  call.piece = piece_;
  if (!is_copied_ && sums_ == nullptr) return;
  const int64_t worth = 1 + num_rows * weight_.depth / kNumbersPerThread;
  const int64_t parts = parallel.can_fork() ? std::min({worth, int64_t{num_threads}, num_rows}) : 1;
  // A row for each part.
  std::vector<float> rotated(
      static_cast<size_t>(weight_.rotates_inputs ? parts * weight_.depth : 0));
  std::atomic<int64_t> next{0};
  auto work = [&] {
    for (int64_t part = next++; part < parts; part = next++) {
      const int64_t end = num_rows * (part + 1) / parts;
      float* scratch = rotated.empty() ? nullptr : rotated.data() + part * weight_.depth;
      for (int64_t row = num_rows * part / parts; row < end; ++row) {
        prepare_row(call.layer, first + row, row, scratch);
      }
    }
  };
  parallel.run(static_cast<int>(parts), work);
}

void PreparedInputs::prepare_row(const LinearCall& layer, int64_t from, int64_t row,
                                 float* rotated) {
  const auto each = [&](const auto* x) {
    if (rotated != nullptr) {
      const auto block = static_cast<float>(rotated_inputs(weight_.depth));
      widen_row(x, weight_.depth, rotated, 1 / block);
      rotate_(rotated, weight_.depth);
      prepare_bytes(rotated, row);
      return;
    }
    if (kind_ == Inputs::kBytes) {
      prepare_bytes(x, row);
      return;
    }
    if (kind_ == Inputs::kInt16s) {
      prepare_int16s(x, row);
    } else if (is_copied_) {
      widen_row(x, weight_.depth, reinterpret_cast<float*>(rows_.get()) + row * weight_.depth);
    }
    if (sums_ == nullptr) return;
    sum_groups(x, weight_.depth, weight_.group, sums_.get() + row * weight_.num_groups());
  };
  if (dtype_ == DType::kFloat32) {
    each(static_cast<const float*>(layer.x) + from * layer.x_stride);
  } else {
    each(static_cast<const BFloat16*>(layer.x) + from * layer.x_stride);
  }
}

template <class T>
void PreparedInputs::prepare_bytes(const T* x, int64_t row) {
  const bool in_groups = weight_.group > 0;
  auto* bytes = reinterpret_cast<uint8_t*>(rows_.get()) + row * row_bytes_;
  for (int64_t i = 0; i < num_pieces_; ++i, x += piece_, bytes += piece_) {
    const int64_t place = row * num_pieces_ + i;
    const float scale = quantise_piece(x, piece_, in_groups ? 0 : 128, bytes);
    scales_[static_cast<size_t>(place)] = scale;
    if (!in_groups) continue;
    if (weight_.bits < 8) order_eights(bytes, piece_);
    const auto* integers = reinterpret_cast<const int8_t*>(bytes);
    const int32_t sum = std::accumulate(integers, integers + piece_, int32_t{0});
    set_offset(place, sum);
    if (sums_ != nullptr) {
      sums_[static_cast<size_t>(place)] = scale * static_cast<float>(sum);
    }
  }
}

template <class T>
void PreparedInputs::prepare_int16s(const T* x, int64_t row) {
  auto* int16s = reinterpret_cast<int16_t*>(rows_.get()) + row * weight_.depth;
  for (int64_t i = 0; i < num_pieces_; ++i, x += piece_, int16s += piece_) {
    const int64_t place = row * num_pieces_ + i;
    scales_[static_cast<size_t>(place)] = round_to_int16s(x, piece_, int16s);
    if (offsets_ != nullptr) {
      set_offset(place, std::accumulate(int16s, int16s + piece_, int32_t{0}));
    } else {
      for (int64_t k = 0; k < piece_; k += 4) std::swap(int16s[k + 1], int16s[k + 2]);
    }
  }
}

void PreparedInputs::set_offset(int64_t place, int32_t sum) {
  offsets_[static_cast<size_t>(place)] = -weight_.zero() * sum;
}

}  // namespace vtensor::kernels
