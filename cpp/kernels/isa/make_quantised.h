// make_quantised: the table of what simd/quantised.h compiles to here. Included by each
// isa/quantised_<name>.cpp alone.
#pragma once

#include "kernels/isa/quantised.h"
#include "kernels/simd/quantised.h"

namespace vtensor::kernels {
namespace {

template <class X, int kBits>
constexpr QuantisedIsa::Multiply pairs_of_inputs() {
  constexpr bool kHas = std::is_same_v<X, TwoBFloat16s> ? kMultipliesBFloat16s : kMultipliesInt16s;
  if constexpr (kHas) return multiply_quantised<GroupTile<X, kBits>>;
  return nullptr;
}

template <int kBits>
constexpr QuantisedIsa::ByInputs make_group_kernels() {
  return {multiply_quantised<GroupTile<FourBytes, kBits>>,
          multiply_quantised<GroupTile<float, kBits>>, pairs_of_inputs<TwoBFloat16s, kBits>(),
          pairs_of_inputs<TwoInt16s, kBits>()};
}

constexpr QuantisedIsa make_quantised(const char* name) {
  return {name,
          240,
          multiply_quantised<ByteTile>,
          make_group_kernels<8>(),
          make_group_kernels<6>(),
          make_group_kernels<4>()};
}

}  // namespace
}  // namespace vtensor::kernels
