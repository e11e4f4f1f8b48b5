// Extender: backs the first n tokens of vTensors with memory, now or ahead of need.
//
// plan_extend() or plan_pre_extend() and commit() or abandon() enclose an Extension, which may run
// without the manager's mutex in between; its vTensors are `busy` for so long. Expected shortage is
// a value; nothing has changed then. Other failures throw, rolled back.
//
// Thread-safety: none; the manager's mutex guards it.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "vtensor/core/extension.h"
#include "vtensor/core/reclaimer.h"

namespace vtensor {

class Extender {
 public:
  Extender(CoreState& state, VTensorTable& vtensors, Retirement& retirement, Reclaimer& reclaimer)
      : state_(state),
        pool_(state.pool),
        vtensors_(vtensors),
        retirement_(retirement),
        reclaimer_(reclaimer) {}

  // The fast path of a decode step: true, and the lengths declared, if every vTensor may already
  // be written up to its length. False: nothing changed.
  bool extend_in_place(std::span<const VTensorId> ids, std::span<const size_t> num_tokens);
  // All or nothing; false: memory is short. `run` runs the extension, and may let others at the
  // manager's mutex meanwhile. Requires: none is busy.
  using Runner = std::function<void(Extension&)>;
  bool extend(std::span<const VTensorId> ids, std::span<const size_t> num_tokens,
              const Runner& run);
  // What the driver said at the last extend() that it made fail; empty: the budget was short.
  const std::string& last_shortage() const { return last_shortage_; }
  // Chunks that these vTensors lack to be that long.
  size_t num_missing(std::span<const VTensorId> ids, std::span<const size_t> num_tokens) const;

  // Claims what these vTensors need to be written up to these lengths; nothing when memory is
  // short. Reclaims from parked slots and recorded prefixes if it must. Requires: none is busy.
  std::optional<Extension> plan_extend(std::span<const VTensorId> ids,
                                       std::span<const size_t> num_tokens);
  // The same ahead of need: maps rows only, takes memory from nobody but the free set, the budget
  // and idle chunks. Empty for what is released, busy or in no need, and when short.
  Extension plan_pre_extend(VTensorId id, size_t num_tokens);
  void commit(Extension& extension);
  void abandon(Extension& extension);
  // Copies the row whose `last_row_shared` says that it is not this vTensor's own, so that it is.
  // False: memory is short, nothing changed. Requires: not busy.
  bool copy_shared_row(VTensor& vtensor);
  // Makes the vTensor the appender of that row again if nobody wrote on there. False: it is not.
  bool take_back_row(VTensor& vtensor);
  // Undoes claims of `tenant`.
  void unclaim(std::vector<Claim>& claims, uint64_t tenant);

  // Lowers the declared length. Rows that others see are given up, so that they are not rewritten.
  // Throws std::invalid_argument when such rows may be seen by living views. Requires: not busy.
  void truncate(VTensorId id, size_t num_tokens);

 private:
  void add_copies(ExtensionPart& part, const VTensor& vtensor) const;
  ExtensionPart outline(const VTensor& vtensor, size_t num_tokens) const;
  std::vector<ExtensionPart> outline_all(std::span<const VTensorId> ids,
                                         std::span<const size_t> num_tokens);
  void claim_for(ExtensionPart& part);
  void check_windows(const VTensor& vtensor, size_t num_tokens) const;
  void commit_copy(VTensor& vtensor, const ExtensionPart& part);

  CoreState& state_;
  Pool& pool_;
  VTensorTable& vtensors_;
  Retirement& retirement_;
  Reclaimer& reclaimer_;
  std::string last_shortage_;
  std::vector<VTensor*> found_;  // of one extend_in_place(), for the next one to reuse
};

}  // namespace vtensor
