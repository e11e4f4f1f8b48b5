// The operations of a layer besides its products and its attention, each in one pass over its rows.
#pragma once

#include "kernels/calls/rows.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// As if stored and read again: where the model rounds between two steps, so does this.
template <class T>
VTENSOR_INLINE Vec rounded(Vec v) {
  if constexpr (sizeof(T) == sizeof(float)) return v;
  T stored[kLanes];
  store(stored, v);
  return load(stored);
}

// output = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019).
template <class T>
void rms_norm(const RowCall& call, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(call.second);
  const auto* wide_weight = static_cast<const float*>(call.second);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* out = static_cast<T*>(call.output) + row * call.width;
    Vec squares = {};
    for (int64_t j = 0; j < call.width; j += kLanes) {
      const Vec v = load(x + j);
      squares += v * v;
    }
    const float mean = sum_lanes(squares) / static_cast<float>(call.width);
    const float factor = 1 / __builtin_sqrtf(mean + call.eps);
    for (int64_t j = 0; j < call.width; j += kLanes) {
      const Vec normed = load(x + j) * factor;
      store(out + j, call.has_wide_weight ? normed * load(wide_weight + j)
                                          : rounded<T>(normed) * load(weight + j));
    }
    if (call.residual == nullptr) continue;
    const T* residual = static_cast<const T*>(call.residual) + row * call.width;
    for (int64_t j = 0; j < call.width; j += kLanes) {
      store(out + j, load(residual + j) + load(out + j));
    }
  }
}

// 1 + e^-x, without overflow: x / that is silu, y / that is y * sigmoid(x).
VTENSOR_INLINE Vec one_plus_exp_of_minus(Vec x) {
  constexpr float kLog2 = 1.4426950408889634F;
  constexpr float kBound = 87;  // e^87 is finite
  const Vec bounded = x < splat(-kBound) ? splat(-kBound) : x;
  return 1.0F + exp2(max(-bounded, splat(-kBound)) * kLog2);
}

VTENSOR_INLINE Vec silu(Vec x) { return x / one_plus_exp_of_minus(x); }

// output = silu(x) * second: the gate of a SwiGLU layer (Shazeer, 2020).
template <class T>
void silu_mul(const RowCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    const T* second = static_cast<const T*>(call.second) + row * call.second_stride;
    T* out = static_cast<T*>(call.output) + row * call.width;
    for (int64_t j = 0; j < call.width; j += kLanes) {
      store(out + j, rounded<T>(silu(load(x + j))) * load(second + j));
    }
  }
}

// gate = min(x, limit), output = gate * sigmoid(alpha * gate) * (1 + clamp(second, -limit, limit)),
// rounded once: the gate of gpt-oss's experts (OpenAI, 2025).
template <class T>
void clamped_swiglu(const RowCall& call, int64_t begin, int64_t end) {
  const Vec most = splat(call.limit), least = splat(-call.limit);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    const T* second = static_cast<const T*>(call.second) + row * call.second_stride;
    T* out = static_cast<T*>(call.output) + row * call.width;
    for (int64_t j = 0; j < call.width; j += kLanes) {
      Vec gate = load(x + j), factor = load(second + j);
      gate = gate > most ? most : gate;  // what is no number stays none
      factor = factor > most ? most : factor;
      factor = factor < least ? least : factor;
      store(out + j, gate / one_plus_exp_of_minus(gate * call.alpha) * (factor + 1.0F));
    }
  }
}

// x * (1 + tanh(u)) / 2 with u = sqrt(2 / pi) * (x + 0.044715 * x^3), as x / (1 + e^(-2 u)): gelu,
// as its authors approximate it (Hendrycks and Gimpel, 2016). Where e^(-2 u) has no float32 it is
// -0, as torch has it, and of minus infinity no number.
VTENSOR_INLINE Vec gelu_tanh(Vec x) {
  constexpr float kTwoRoots = 1.5957691216057308F;  // 2 * sqrt(2 / pi)
  constexpr float kCubes = 0.044715F;
  constexpr float kLeast = -10;  // -2 u is 87.3 here, and e^87.3 is finite
  const Vec twice = x * (x * x * kCubes + 1.0F) * kTwoRoots;
  return x < splat(kLeast) ? x * 0.0F : x / one_plus_exp_of_minus(twice);
}

// output = gelu_tanh(x) * second: the gate of a GEGLU layer (Shazeer, 2020), as Gemma has it.
template <class T>
void gelu_tanh_mul(const RowCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    const T* second = static_cast<const T*>(call.second) + row * call.second_stride;
    T* out = static_cast<T*>(call.output) + row * call.width;
    for (int64_t j = 0; j < call.width; j += kLanes) {
      store(out + j, rounded<T>(gelu_tanh(load(x + j))) * load(second + j));
    }
  }
}

// output = max(x, 0)^2 (So et al., Primer, 2021), rounded once; of what is no number none.
template <class T>
void relu2(const RowCall& call, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(call.x) + row * call.x_stride;
    T* out = static_cast<T*>(call.output) + row * call.width;
    for (int64_t j = 0; j < call.width; j += kLanes) {
      const Vec v = load(x + j);
      const Vec positive = v < Vec{} ? Vec{} : v;
      store(out + j, positive * positive);
    }
  }
}

template <class T>
void rotate(const RotaryCall& call, int64_t begin, int64_t end) {
  const int64_t half = call.width / 2;
  for (int64_t token = begin; token < end; ++token) {
    const T* cos = static_cast<const T*>(call.cos) + token * call.width;
    const T* sin = static_cast<const T*>(call.sin) + token * call.width;
    for (int64_t head = 0; head < call.num_heads; ++head) {
      const T* x =
          static_cast<const T*>(call.x) + head * call.head_stride + token * call.token_stride;
      T* out = static_cast<T*>(call.output) + head * call.output_head_stride +
               token * call.output_token_stride;
      for (int64_t j = 0; j < half; j += kLanes) {
        const Vec a = load(x + j), b = load(x + half + j);
        store(out + j, a * load(cos + j) - b * load(sin + j));
        store(out + half + j, b * load(cos + half + j) + a * load(sin + half + j));
      }
    }
  }
}

}  // namespace
}  // namespace vtensor::kernels
