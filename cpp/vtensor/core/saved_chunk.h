// One chunk's contents into a store and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "vtensor/driver/driver.h"
#include "vtensor/store/swap_store.h"

namespace vtensor {

inline SwapStore::Ticket save(Driver& driver, SwapStore& store, Handle handle, size_t num_bytes) {
  std::vector<std::byte> bytes(num_bytes);
  driver.read(handle, 0, bytes);
  return store.put(bytes);
}

// No more than the first `max_bytes`: what follows may be somebody else's.
inline void restore(Driver& driver, const SwapStore& store, Handle handle, SwapStore::Ticket ticket,
                    size_t max_bytes = SIZE_MAX) {
  std::vector<std::byte> bytes = store.get(ticket);
  bytes.resize(std::min(bytes.size(), max_bytes));
  if (!bytes.empty()) driver.write(handle, 0, bytes);
}

}  // namespace vtensor
