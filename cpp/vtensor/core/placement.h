// Placement: how a vTensor comes to life, in a fresh slot or in a parked one, with a recorded
// prefix or a sibling's chunks aliased.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <string>

#include "vtensor/core/shield.h"

namespace vtensor {

class Placement {
 public:
  Placement(CoreState& state, VTensorTable& vtensors, Retirement& retirement, Forgetter& forgetter,
            Extender& extender, Shield& shield)
      : state_(state),
        pool_(state.pool),
        vtensors_(vtensors),
        retirement_(retirement),
        forgetter_(forgetter),
        extender_(extender),
        shield_(shield) {}

  // A vTensor that aliases the longest recorded prefix of `tokens`, or nothing when no slot is
  // left. Its num_tokens is the length of that prefix. `expected_tokens`: how long it will become,
  // as far as known: the fitting parked slot is chosen by that.
  // `apart`: its chunks are created where they can be handed to another process.
  std::optional<VTensorId> create(std::span<const Token> tokens, const std::string& salt,
                                  size_t expected_tokens = 0, bool apart = false);
  // A vTensor with the same contents, or nothing when no slot is left. The last chunk is copied
  // when either of the two first writes to it.
  std::optional<VTensorId> fork(VTensorId id);
  // A vTensor whose rows are the match's chunks, behind a slot, or nothing when none is left. Takes
  // over the match's references.
  std::optional<VTensorId> create_alias(const RTree::Match& match, const std::string& salt,
                                        size_t wanted_rows);

 private:
  struct Fit {  // how well a parked slot suits a new vTensor
    SlotId slot = 0;
    size_t common_rows = 0;  // rows that show the wanted chunks already
    size_t keep_rows = 0;    // rows that stay mapped; none beyond the useful ones unless count_all
    size_t useful_rows = 0;
    size_t dropped_rows = 0;
  };

  Fit fit(SlotId slot, std::span<const ChunkId> table, size_t wanted_rows, bool count_all) const;
  std::optional<Fit> best_parked(std::span<const ChunkId> table, size_t wanted_rows) const;
  void scrub_rows(SlotId slot, size_t first_row, size_t end_row, uint64_t tenant);
  void adopt(const Fit& fit, std::span<const ChunkId> table, uint64_t tenant);
  std::optional<SlotId> place(std::span<const ChunkId> table, size_t wanted_rows, uint64_t tenant);
  VTensor& open(SlotId slot, const std::string& salt, size_t num_tokens, size_t aliased_rows);
  void keep_apart(VTensor& vtensor);
  std::optional<VTensorId> create_copy(const RTree::Match& match, const std::string& salt);

  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
  Retirement& retirement_;
  Forgetter& forgetter_;
  Extender& extender_;
  Shield& shield_;
};

}  // namespace vtensor
