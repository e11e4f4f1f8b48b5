// All levels that a test can run: what this CPU has, and AMX's on tiles in software where the CPU
// has what is beside them.
#pragma once

#include <algorithm>
#include <vector>

#include "kernels/isa/choice.h"
#include "tests/cpp/kernels/software_tiles/software_amx.h"

namespace vtensor::kernels {

template <class Level>
std::vector<const Level*> with_software(std::vector<const Level*> levels, const Level* needed,
                                        const Level* software) {
  const bool is_here = std::find(levels.begin(), levels.end(), needed) != levels.end();
  if (needed != nullptr && software != nullptr && is_here) levels.push_back(software);
  return levels;
}

inline std::vector<const Isa*> testable_isas() {
  return with_software(available_isas(), avx512_bf16_isa(), software_amx_isa());
}

inline std::vector<const QuantisedIsa*> testable_quantised() {
  return with_software(available_quantised(), avx512_bf16_quantised(), software_amx_quantised());
}

}  // namespace vtensor::kernels
