// What Python sees of DecoderLayer.
#pragma once

#include <nanobind/nanobind.h>

namespace vtensor::kernels {

// REQUIRES: the other classes of the module are bound already.
void bind_decoder_layer(nanobind::module_& m);

}  // namespace vtensor::kernels
