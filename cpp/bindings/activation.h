// activation_kind_of: an activation by the name that Python calls it by (layers/activation.py).
#pragma once

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include "kernels/layer/activation.h"

namespace vtensor::kernels {

// Throws std::invalid_argument for a name that there is not.
inline Activation::Kind activation_kind_of(const std::string& name) {
  using Kind = Activation::Kind;
  static const std::array<std::pair<std::string, Kind>, 4> kKinds = {
      {{"silu", Kind::kSilu},
       {"gelu_tanh", Kind::kGeluTanh},
       {"clamped_swiglu", Kind::kClampedSwiglu},
       {"relu2", Kind::kRelu2}}};
  for (const auto& [own, kind] : kKinds) {
    if (own == name) return kind;
  }
  throw std::invalid_argument("no activation is called '" + name + "'");
}

}  // namespace vtensor::kernels
