// make_quantised: the table of what simd/quantised.h compiles to here. Included by each
// isa/quantised_<name>.cpp alone.
#pragma once

#include "kernels/isa/quantised.h"
#include "kernels/simd/quantised.h"

namespace vtensor::kernels {
namespace {

constexpr QuantisedIsa make_quantised(const char* name) {
#if defined(__AVX512BF16__)
  constexpr QuantisedIsa::Multiply kByPairs[] = {multiply_quantised<GroupTile<TwoBFloat16s, 8>>,
                                                 multiply_quantised<GroupTile<TwoBFloat16s, 6>>,
                                                 multiply_quantised<GroupTile<TwoBFloat16s, 4>>};
#else
  constexpr QuantisedIsa::Multiply kByPairs[] = {nullptr, nullptr, nullptr};
#endif
  return {name,
          240,
          multiply_quantised<ByteTile>,
          {multiply_quantised<GroupTile<FourBytes, 8>>, multiply_quantised<GroupTile<float, 8>>,
           kByPairs[0]},
          {multiply_quantised<GroupTile<FourBytes, 6>>, multiply_quantised<GroupTile<float, 6>>,
           kByPairs[1]},
          {multiply_quantised<GroupTile<FourBytes, 4>>, multiply_quantised<GroupTile<float, 4>>,
           kByPairs[2]}};
}

}  // namespace
}  // namespace vtensor::kernels
