// ScopeFail: undoes the first half of some work when the second half throws.
#pragma once

#include <utility>

namespace vtensor {

// Runs `undo` when the scope is left before dismiss().
template <typename Undo>
class ScopeFail {
 public:
  explicit ScopeFail(Undo undo) : undo_(std::move(undo)) {}
  ~ScopeFail() {
    if (armed_) undo_();
  }
  ScopeFail(const ScopeFail&) = delete;
  ScopeFail& operator=(const ScopeFail&) = delete;
  void dismiss() noexcept { armed_ = false; }

 private:
  Undo undo_;
  bool armed_ = true;
};

}  // namespace vtensor
