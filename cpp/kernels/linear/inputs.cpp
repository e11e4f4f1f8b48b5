#include "kernels/linear/inputs.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>
#include <vector>

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

template <class T>
void widen_row(const T* x, int64_t depth, float* output) {
  for (int64_t k = 0; k < depth; ++k) output[k] = widen(x[k]);
}

// Four sums side by side, so that a vector does them.
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
                               int64_t num_rows, const QuantisedIsa& isa)
    : kind_(kind),
      dtype_(dtype),
      weight_(weight),
      isa_(isa),
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
  if (dtype_ == DType::kFloat32) {
    const auto* x = static_cast<const float*>(layer.x) + from * layer.x_stride;
    prepare_numbers(isa_.float_inputs, x, row, rotated);
  } else {
    const auto* x = static_cast<const BFloat16*>(layer.x) + from * layer.x_stride;
    prepare_numbers(isa_.bfloat16_inputs, x, row, rotated);
  }
}

template <class T>
void PreparedInputs::prepare_numbers(const InputKernels<T>& kernels, const T* x, int64_t row,
                                     float* rotated) {
  if (rotated != nullptr) {
    const auto block = static_cast<float>(rotated_inputs(weight_.depth));
    kernels.times_hadamard(x, weight_.depth, 1 / block, rotated);
    prepare_bytes(isa_.float_inputs, rotated, row);
    return;
  }
  if (kind_ == Inputs::kBytes) {
    prepare_bytes(kernels, x, row);
    return;
  }
  if (kind_ == Inputs::kInt16s) {
    prepare_int16s(kernels, x, row);
  } else if (is_copied_) {
    widen_row(x, weight_.depth, reinterpret_cast<float*>(rows_.get()) + row * weight_.depth);
  }
  if (sums_ == nullptr) return;
  sum_groups(x, weight_.depth, weight_.group, sums_.get() + row * weight_.num_groups());
}

template <class T>
void PreparedInputs::prepare_bytes(const InputKernels<T>& kernels, const T* x, int64_t row) {
  auto* bytes = reinterpret_cast<uint8_t*>(rows_.get()) + row * row_bytes_;
  const bool has_one_scale = weight_.group == 0 || weight_.rotates_inputs;
  float* scales = scales_.get() + row * (has_one_scale ? 1 : num_pieces_);
  if (weight_.group == 0) {
    *scales = kernels.to_bytes(x, weight_.depth, 128, bytes);
    return;
  }
  int32_t* offsets = offsets_.get() + row * num_pieces_;
  kernels.to_byte_groups(x, weight_.depth, has_one_scale ? weight_.depth : piece_, piece_,
                         weight_.bits < 8, bytes, scales, offsets);
  if (sums_ != nullptr) {
    float* sums = sums_.get() + row * num_pieces_;
    for (int64_t i = 0; i < num_pieces_; ++i) {
      const auto sum = static_cast<float>(offsets[i]);
      sums[i] = has_one_scale ? sum : scales[i] * sum;
    }
  }
  for (int64_t i = 0; i < num_pieces_; ++i) offsets[i] *= -weight_.zero();
}

template <class T>
void PreparedInputs::prepare_int16s(const InputKernels<T>& kernels, const T* x, int64_t row) {
  auto* int16s = reinterpret_cast<int16_t*>(rows_.get()) + row * weight_.depth;
  for (int64_t i = 0; i < num_pieces_; ++i, x += piece_, int16s += piece_) {
    const int64_t place = row * num_pieces_ + i;
    scales_[static_cast<size_t>(place)] = kernels.to_int16s(x, piece_, int16s);
    if (offsets_ != nullptr) {
      const int32_t sum = std::accumulate(int16s, int16s + piece_, int32_t{0});
      offsets_[static_cast<size_t>(place)] = -weight_.zero() * sum;
    } else {
      for (int64_t k = 0; k < piece_; k += 4) std::swap(int16s[k + 1], int16s[k + 2]);
    }
  }
}

}  // namespace vtensor::kernels
