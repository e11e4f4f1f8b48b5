// make_quantised: the table of what simd/quantised.h compiles to here. Included by each
// isa/quantised_<name>.cpp alone.
#pragma once

#include "kernels/isa/quantised.h"
#include "kernels/simd/hadamard.h"
#include "kernels/simd/inputs.h"
#include "kernels/simd/quantised.h"

namespace vtensor::kernels {
namespace {

template <class X, class Words>
constexpr QuantisedIsa::Multiply pairs_of_inputs() {
  constexpr bool kHas = std::is_same_v<X, TwoBFloat16s> ? kMultipliesBFloat16s : kMultipliesInt16s;
  if constexpr (kHas) return multiply_quantised<GroupTile<X, Words>>;
  return nullptr;
}

template <class Words>
constexpr QuantisedIsa::ByInputs make_group_kernels() {
  return {multiply_quantised<GroupTile<FourBytes, Words>>,
          multiply_quantised<GroupTile<float, Words>>, pairs_of_inputs<TwoBFloat16s, Words>(),
          pairs_of_inputs<TwoInt16s, Words>()};
}

template <class T>
constexpr InputKernels<T> make_input_kernels() {
  return {to_bytes<T>, to_byte_groups<T>, to_int16s<T>, times_hadamard<T>};
}

constexpr QuantisedIsa make_quantised(const char* name) {
  return {name,
          240,
          make_input_kernels<float>(),
          make_input_kernels<BFloat16>(),
          multiply_quantised<ByteTile>,
          make_group_kernels<StepWords<8>>(),
          make_group_kernels<StepWords<6>>(),
          {make_group_kernels<StepWords<4, CodebookKind::kEven>>(),
           make_group_kernels<StepWords<4, CodebookKind::kSmall>>(),
           make_group_kernels<StepWords<4, CodebookKind::kLarge>>()}};
}

}  // namespace
}  // namespace vtensor::kernels
