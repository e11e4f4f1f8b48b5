// Forks: a child has a copy of every object, but not the threads that these need, and maps the same
// memory as its parent. Who keeps the generation of its birth can tell.
//
// Thread-safe; costs one load.
#pragma once

#include <cstdint>

namespace vtensor {

// How many forks lie between this process and the one that loaded the library.
uint32_t process_generation() noexcept;

}  // namespace vtensor
