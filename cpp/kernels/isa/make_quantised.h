// make_quantised: the table of what simd/quantised.h compiles to here. Included by each
// isa/quantised_<name>.cpp alone.
#pragma once

#include "kernels/isa/quantised.h"
#include "kernels/simd/quantised.h"

namespace vtensor::kernels {
namespace {

constexpr QuantisedIsa make_quantised(const char* name) {
#if defined(__AVX512BF16__)
  constexpr QuantisedIsa::Multiply by_pairs[] = {multiply_quantised<GroupTile<TwoBFloat16s, 8>>,
                                                 multiply_quantised<GroupTile<TwoBFloat16s, 6>>,
                                                 multiply_quantised<GroupTile<TwoBFloat16s, 4>>};
#else
  constexpr QuantisedIsa::Multiply by_pairs[] = {nullptr, nullptr, nullptr};
#endif
  constexpr auto bytes_by_bytes = multiply_quantised<GroupTile<FourBytes, 8>>;
  constexpr auto bytes_by_floats = multiply_quantised<GroupTile<float, 8>>;
  return {name,
          240,
          multiply_quantised<ByteTile>,
          {bytes_by_bytes, bytes_by_floats, by_pairs[0]},
          {bytes_by_bytes, bytes_by_floats, by_pairs[1]},
          {multiply_quantised<GroupTile<FourBytes, 4>>, multiply_quantised<GroupTile<float, 4>>,
           by_pairs[2]}};
}

}  // namespace
}  // namespace vtensor::kernels
