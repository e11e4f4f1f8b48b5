#include "vtensor/core/epochs.h"

#include <stdexcept>

namespace vtensor {

void Epochs::end(std::unique_ptr<Fence> fence) {
  open_ = false;
  if (fence) in_flight_.emplace_back(current_, std::move(fence));
  ++current_;
}

uint64_t Epochs::completed() {
  while (!in_flight_.empty() && in_flight_.front().second->done()) in_flight_.pop_front();
  return in_flight_.empty() ? current_ - 1 : in_flight_.front().first - 1;
}

void Epochs::wait() {
  if (open_) {
    throw std::invalid_argument(
        "mapped memory would change while a step is open: call end_step() after its kernels");
  }
  while (!in_flight_.empty()) {
    in_flight_.front().second->wait();
    in_flight_.pop_front();
  }
}

}  // namespace vtensor
