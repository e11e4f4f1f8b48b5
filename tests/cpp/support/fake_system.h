// FakeSystem: a /proc and /sys tree of our own, for code that takes a system root.
#pragma once

#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <string>

namespace vtensor {

class FakeSystem {
 public:
  FakeSystem() {
    static std::atomic<int> count{0};
    root_ = std::filesystem::temp_directory_path() /
            ("vtensor_" + std::to_string(getpid()) + "_" + std::to_string(count++));
    std::filesystem::create_directories(root_);
  }
  ~FakeSystem() { std::filesystem::remove_all(root_); }

  FakeSystem(const FakeSystem&) = delete;
  FakeSystem& operator=(const FakeSystem&) = delete;

  void set(const std::string& path, const std::string& text) {
    const std::filesystem::path file = root_ / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }

  // 16 GiB in all, `bytes` of it available.
  void set_available(size_t bytes) {
    set("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:        123456 kB\nMemAvailable:   " +
                            std::to_string(bytes / 1024) + " kB");
  }

  std::string root() const { return root_.string(); }

 private:
  std::filesystem::path root_;
};

}  // namespace vtensor
