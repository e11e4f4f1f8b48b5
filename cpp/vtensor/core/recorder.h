// Recorder: puts prefixes into the rTree, and remaps onto one set of chunks what was computed
// twice.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <span>

#include "vtensor/core/shield.h"

namespace vtensor {

class Recorder {
 public:
  Recorder(CoreState& state, VTensorTable& vtensors, Shield& shield)
      : state_(state), pool_(state.pool), vtensors_(vtensors), shield_(shield) {}

  // Records tokens [0, tokens.size()) of the vTensor, or what shield.h lets be shared while views
  // of it are alive. Returns how many were new.
  size_t record_prefix(VTensorId id, std::span<const Token> tokens);

  // Remaps full rows of `tokens` that the rTree holds in other chunks onto those. Returns the
  // number of chunks given up: 0, with nothing remapped, between begin() and end() of a step, while
  // views of the vTensor are alive and when the driver fails. Waits for steps in flight. Throws
  // BrokenMapping when the driver fails and fails again; the vTensor is lost then.
  size_t dedup(VTensorId id, std::span<const Token> tokens);

 private:
  void replace_rows(VTensor& vtensor, size_t begin, size_t end, std::span<const ChunkId> table);

  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
  Shield& shield_;
};

}  // namespace vtensor
