// Upkeep: small pieces of work ahead of need, so that a step finds clean chunks ready.
//
// A task is planned and finished under the manager's mutex, and run without it; its chunk is
// claimed meanwhile. Thread-safety: none but for that.
#pragma once

#include <cstddef>
#include <optional>
#include <string_view>

#include "vtensor/core/reclaimer.h"

namespace vtensor {

struct UpkeepTask {
  enum class Kind { kCreate, kScrub, kRelease };

  Kind kind = Kind::kCreate;
  Claim claim;

  // Makes the driver call. On failure nothing has changed.
  void run(Driver& driver, size_t chunk_bytes);
};

std::string_view to_string(UpkeepTask::Kind kind);

class Upkeep {
 public:
  Upkeep(CoreState& state, Reclaimer& reclaimer) : state_(state), reclaimer_(reclaimer) {}

  // While steps run a quarter of the chunks is kept ready: creating one takes a core from them, for
  // milliseconds where the system must find the memory first. The rest follows when they are over,
  // within the bound on what nobody uses, and nothing that is cached goes for it.
  void set_busy(bool busy) { busy_ = busy; }
  // What is most urgent, or nothing.
  std::optional<UpkeepTask::Kind> next() const;
  // The most urgent task, or nothing: to be run one at a time.
  std::optional<UpkeepTask> plan();
  // After the task has run, or failed to.
  void finish(const UpkeepTask& task);

 private:
  size_t num_kept_ready() const;
  bool may_create() const;

  CoreState& state_;
  Reclaimer& reclaimer_;
  std::optional<bool> busy_;  // nothing until somebody says
};

}  // namespace vtensor
