#include "vtensor/driver/host/host_memory.h"

#include <gtest/gtest.h>

#include "tests/cpp/support/fake_system.h"
#include "vtensor/util/error.h"
#include "vtensor/util/units.h"

namespace vtensor {
namespace {

TEST(HostMemory, without_a_cgroup_the_machines_memory_counts) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  EXPECT_EQ(available_bytes(system.root()), 3 * kGiB);
  EXPECT_EQ(total_bytes(system.root()), 16 * kGiB);
}

TEST(HostMemory, a_cgroup_v2_limit_counts_less_its_usage) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  system.set("proc/self/cgroup", "0::/app");
  system.set("sys/fs/cgroup/app/memory.max", std::to_string(kGiB));
  system.set("sys/fs/cgroup/app/memory.current", std::to_string(300 * kMiB));
  EXPECT_EQ(available_bytes(system.root()), kGiB - 300 * kMiB);
  EXPECT_EQ(total_bytes(system.root()), kGiB);
}

TEST(HostMemory, a_cgroup_v1_limit_counts_less_its_usage) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  system.set("proc/self/cgroup", "9:pids:/\n5:cpu,memory:/app\n1:cpu:/");
  system.set("sys/fs/cgroup/memory/app/memory.limit_in_bytes", std::to_string(kGiB));
  system.set("sys/fs/cgroup/memory/app/memory.usage_in_bytes", std::to_string(kMiB));
  EXPECT_EQ(available_bytes(system.root()), kGiB - kMiB);
}

TEST(HostMemory, a_limit_further_up_counts_too) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  system.set("proc/self/cgroup", "0::/pod/app");
  system.set("sys/fs/cgroup/pod/app/memory.max", "max");
  system.set("sys/fs/cgroup/pod/app/memory.current", "1000");
  system.set("sys/fs/cgroup/pod/memory.max", std::to_string(kGiB));
  system.set("sys/fs/cgroup/pod/memory.current", std::to_string(kMiB));
  EXPECT_EQ(available_bytes(system.root()), kGiB - kMiB);
}

TEST(HostMemory, a_path_of_the_host_ends_at_the_containers_own_cgroup) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  system.set("proc/self/cgroup", "4:memory:/docker/0123abcd");
  system.set("sys/fs/cgroup/memory/memory.limit_in_bytes", std::to_string(kGiB));
  system.set("sys/fs/cgroup/memory/memory.usage_in_bytes", std::to_string(kMiB));
  EXPECT_EQ(available_bytes(system.root()), kGiB - kMiB);
}

TEST(HostMemory, inactive_file_cache_is_not_usage) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  system.set("proc/self/cgroup", "0::/");
  system.set("sys/fs/cgroup/memory.max", std::to_string(kGiB));
  system.set("sys/fs/cgroup/memory.current", std::to_string(kGiB));
  system.set("sys/fs/cgroup/memory.stat",
             "anon 1\ninactive_file " + std::to_string(800 * kMiB) + "\nactive_file 7");
  EXPECT_EQ(available_bytes(system.root()), 800 * kMiB);
}

TEST(HostMemory, usage_above_the_limit_leaves_nothing) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  system.set("proc/self/cgroup", "0::/");
  system.set("sys/fs/cgroup/memory.max", "1000");
  system.set("sys/fs/cgroup/memory.current", "2000");
  EXPECT_EQ(available_bytes(system.root()), 0u);
}

TEST(HostMemory, garbled_files_are_as_good_as_none) {
  FakeSystem system;
  system.set_available(3 * kGiB);
  system.set("proc/self/cgroup", "garbage\n\n:\n0::/\n4:memory:relative/path");
  system.set("sys/fs/cgroup/memory.max", "lots");
  system.set("proc/sys/vm/max_map_count", "");
  EXPECT_EQ(available_bytes(system.root()), 3 * kGiB);
  EXPECT_EQ(max_map_count(system.root()), 65530u);
}

TEST(HostMemory, a_system_without_meminfo_is_an_error_that_names_the_file) {
  FakeSystem system;
  try {
    available_bytes(system.root());
    FAIL();
  } catch (const DriverError& error) {
    EXPECT_NE(error.arguments().find(system.root() + "/proc/meminfo"), std::string::npos);
  }
}

TEST(HostMemory, mappings_are_read_from_proc) {
  FakeSystem system;
  system.set("proc/sys/vm/max_map_count", "262144");
  system.set("proc/self/maps", "a\nb\nc");
  EXPECT_EQ(max_map_count(system.root()), 262144u);
  EXPECT_EQ(current_map_count(system.root()), 3u);
}

TEST(HostMemory, this_machine_has_memory_and_mappings) {
  EXPECT_GT(available_bytes(), 0u);
  EXPECT_GE(total_bytes(), available_bytes());
  EXPECT_GT(current_map_count(), 10u);
  EXPECT_GT(max_map_count(), current_map_count());
}

}  // namespace
}  // namespace vtensor
