// What this machine and this container can still give: memory in bytes, and mappings.
//
// Pure functions of files under /proc and /sys. `root` is put before every path, so that a test can
// show them a tree of its own. Thread-safe: no state.
//
// A machine's free memory is not a container's: with a cgroup limit the kernel kills the process
// instead of failing the call, so every limit on the way from our cgroup to the root counts.
#pragma once

#include <cstddef>
#include <string>

namespace vtensor {

// min(MemAvailable, limit - usage of each memory cgroup, v1 or v2, that contains this process).
// Inactive file cache does not count as usage: the kernel drops it before it refuses memory, and
// loading a model fills it. Throws DriverError when /proc/meminfo cannot be read.
size_t available_bytes(const std::string& root = "");

// min(MemTotal, cgroup limits). Throws like available_bytes.
size_t total_bytes(const std::string& root = "");

// vm.max_map_count; the kernel's default of 65530 where it cannot be read.
size_t max_map_count(const std::string& root = "");

// Number of mappings that this process has now; 0 where it cannot be read. Slow (0.5 us a mapping).
size_t current_map_count(const std::string& root = "");

}  // namespace vtensor
