// InputProduct: how inputs of a row are multiplied with the integers of a step of weights in
// groups, by what 32 bits hold of the row's inputs (X).
//
//   Factor   a vector of outputs' integers, those of one X of inputs
//   Input    an X, as it meets them
//   Sum      of products
#pragma once

#include "kernels/simd/dot.h"
#include "kernels/simd/pairs.h"
#include "kernels/simd/step_words.h"
#include "kernels/simd/vec.h"

namespace vtensor::kernels {
namespace {

// Beside a float: two bfloat16, two integers, or four.
enum class TwoBFloat16s : uint32_t {};
enum class TwoInt16s : uint32_t {};
enum class FourBytes : uint32_t {};

// By which pairs bfloat16 inputs are multiplied. With AVX-512 alone a product of integers of 16
// bits is two instructions, as are those of floats: few rows would be faster by a quarter, many
// slower by a sixth (measured on Zen 4).
#if defined(__AVX512BF16__) && VTENSOR_LANES == 16
constexpr bool kMultipliesBFloat16s = true;
#else
constexpr bool kMultipliesBFloat16s = false;
#endif
#if defined(__AVX512VNNI__) || (defined(__AVX2__) && VTENSOR_LANES == 8)
constexpr bool kMultipliesInt16s = !kMultipliesBFloat16s;
#else
constexpr bool kMultipliesInt16s = false;
#endif

template <class X>
VTENSOR_INLINE UVec in_all_lanes(X x) {
  return UVec{} + static_cast<uint32_t>(x);
}

template <class X, class Words>
struct InputProduct;

template <class Words>
struct InputProduct<float, Words> {
  static constexpr int kInputs = 1;
  using Factor = Vec;
  using Input = float;
  using Sum = Vec;

  VTENSOR_INLINE static Factor factor(const Words& step, const LookUp& look_up, int i) {
    return float_of(step, look_up, i);
  }
  VTENSOR_INLINE static Sum add(Sum sum, Input x, Factor w) { return sum + x * w; }
};

#if defined(__AVX512BF16__) && VTENSOR_LANES == 16
template <class Words>
struct InputProduct<TwoBFloat16s, Words> {
  static constexpr int kInputs = 2;
  using Factor = UVec;
  using Sum = Vec;
  struct Input {
    UVec of;
    VTENSOR_INLINE explicit Input(TwoBFloat16s x) : of(in_all_lanes(x)) {}
  };

  VTENSOR_INLINE static Factor factor(const Words& step, const LookUp& look_up, int i) {
    return pairs_of(step, look_up, i);
  }
  VTENSOR_INLINE static Sum add(Sum sum, const Input& x, Factor w) {
    return add_products(sum, x.of, w);
  }
};
#endif

template <class Words>
struct InputProduct<TwoInt16s, Words> {
  static constexpr int kInputs = 2;
  using Factor = SVec;
  using Sum = IVec;
  struct Input {
    SVec of;
    VTENSOR_INLINE explicit Input(TwoInt16s x) : of(reinterpret_cast<SVec>(in_all_lanes(x))) {}
  };

  VTENSOR_INLINE static Factor factor(const Words& step, const LookUp& look_up, int i) {
    return int16s_of(step, look_up, i);
  }
  VTENSOR_INLINE static Sum add(Sum sum, const Input& x, Factor w) {
    return add_int16s(sum, x.of, w);
  }
};

template <class Words>
struct InputProduct<FourBytes, Words> {
  static constexpr int kInputs = 4;
  using Factor = UVec;
  using Sum = IVec;
  struct Input {
    UVec of;
    VTENSOR_INLINE explicit Input(FourBytes x) : of(in_all_lanes(x)) {}
  };

  VTENSOR_INLINE static Factor factor(const Words& step, const LookUp& look_up, int i) {
    return bytes_of(step, look_up, i);
  }
  VTENSOR_INLINE static Sum add(Sum sum, const Input& x, Factor w) {
    return add_small_dot(sum, w, x.of);
  }
};

template <class Words>
  requires Words::kHasLargeBytes
struct InputProduct<FourBytes, Words> {
  static constexpr int kInputs = 4;
  using Factor = UnsignedBytes;
  using Sum = IVec;
  struct Input {
    SignedBytes of;
    VTENSOR_INLINE explicit Input(FourBytes x) : of(in_all_lanes(x)) {}
  };

  VTENSOR_INLINE static Factor factor(const Words& step, const LookUp& look_up, int i) {
    return Factor(bytes_of(step, look_up, i));
  }
  VTENSOR_INLINE static Sum add(Sum sum, const Input& x, const Factor& w) {
    return add_dot(sum, w, x.of);
  }
};

}  // namespace
}  // namespace vtensor::kernels
