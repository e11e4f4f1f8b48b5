#include "vtensor/driver/host/host_memory.h"

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

constexpr size_t kNoLimit = std::numeric_limits<size_t>::max();
constexpr size_t kDefaultMaxMapCount = 65530;

// First number in a file that holds one ("max" and a missing file are nothing).
std::optional<size_t> read_number(const std::string& path) {
  std::ifstream file(path);
  size_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `key` in a file of "key number" or "key: number" lines.
std::optional<size_t> read_field(const std::string& path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const size_t digits = line.find_first_of("0123456789", key.size());
    if (digits != std::string::npos) return std::stoull(line.substr(digits));
  }
  return std::nullopt;
}

size_t meminfo_bytes(const std::string& root, std::string_view key) {
  const std::string path = root + "/proc/meminfo";
  if (const auto kib = read_field(path, key)) return *kib * kKiB;
  throw DriverError("read", ENOENT, "ENOENT", "path=" + path, "no " + std::string(key));
}

// Names of the files that a cgroup version keeps its numbers in.
struct CgroupFiles {
  const char* limit;
  const char* usage;
  const char* inactive;  // key in memory.stat
};
constexpr CgroupFiles kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes",
                             "total_inactive_file "};
constexpr CgroupFiles kV2 = {"memory.max", "memory.current", "inactive_file "};

struct Cgroup {
  std::string folder;
  const CgroupFiles* files;
};

bool names_controller(std::string_view controllers, std::string_view name) {
  while (!controllers.empty()) {
    const size_t comma = std::min(controllers.find(','), controllers.size());
    if (controllers.substr(0, comma) == name) return true;
    controllers.remove_prefix(std::min(comma + 1, controllers.size()));
  }
  return false;
}

// Our memory cgroup and all above it. A line of /proc/self/cgroup is "id:controllers:path"; v2 has
// no controllers. In a container the path may be the host's and not exist below the mount: the walk
// up then still ends at the mount itself, which is the container's own cgroup.
std::vector<Cgroup> memory_cgroups(const std::string& root) {
  std::vector<Cgroup> cgroups;
  const auto add = [&](const std::string& mount, std::string path, const CgroupFiles& files) {
    while (!path.empty() && path.back() == '/') path.pop_back();
    for (;; path.resize(path.rfind('/'))) {
      cgroups.push_back({root + mount + path, &files});
      if (path.find('/') == std::string::npos) return;
    }
  };
  std::ifstream file(root + "/proc/self/cgroup");
  for (std::string line; std::getline(file, line);) {
    const size_t first = line.find(':');
    const size_t second = first == std::string::npos ? first : line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const std::string path = line.substr(second + 1);
    if (controllers.empty()) {
      add("/sys/fs/cgroup", path, kV2);
      add("/sys/fs/cgroup/unified", path, kV2);  // where systemd mounts v2 beside v1
    } else if (names_controller(controllers, "memory")) {
      add("/sys/fs/cgroup/memory", path, kV1);
    }
  }
  return cgroups;
}

size_t cgroup_limit(const Cgroup& cgroup) {
  return read_number(cgroup.folder + "/" + cgroup.files->limit).value_or(kNoLimit);
}

size_t cgroup_available(const Cgroup& cgroup) {
  const size_t limit = cgroup_limit(cgroup);
  const auto usage = read_number(cgroup.folder + "/" + cgroup.files->usage);
  if (limit == kNoLimit || !usage) return kNoLimit;
  const size_t cache =
      read_field(cgroup.folder + "/memory.stat", cgroup.files->inactive).value_or(0);
  const size_t used = *usage - std::min(*usage, cache);
  return limit - std::min(limit, used);
}

}  // namespace

size_t available_bytes(const std::string& root) {
  size_t bytes = meminfo_bytes(root, "MemAvailable:");
  for (const Cgroup& cgroup : memory_cgroups(root)) {
    bytes = std::min(bytes, cgroup_available(cgroup));
  }
  return bytes;
}

size_t total_bytes(const std::string& root) {
  size_t bytes = meminfo_bytes(root, "MemTotal:");
  for (const Cgroup& cgroup : memory_cgroups(root)) bytes = std::min(bytes, cgroup_limit(cgroup));
  return bytes;
}

size_t max_map_count(const std::string& root) {
  return read_number(root + "/proc/sys/vm/max_map_count").value_or(kDefaultMaxMapCount);
}

size_t current_map_count(const std::string& root) {
  std::ifstream file(root + "/proc/self/maps");
  size_t count = 0;
  for (std::string line; std::getline(file, line);) ++count;
  return count;
}

}  // namespace vtensor
