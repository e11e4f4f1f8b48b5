#include "vtensor/store/swap_store.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "tests/cpp/support/swap_world.h"

namespace vtensor {
namespace {

// The descriptor of the one file that lies, unlinked, in `directory`.
int find_open_file(const std::string& directory) {
  for (int file = 3; file < 1024; ++file) {
    char target[4096] = {};
    const std::string link = "/proc/self/fd/" + std::to_string(file);
    if (::readlink(link.c_str(), target, sizeof(target) - 1) <= 0) continue;
    if (std::string(target).starts_with(directory)) return file;
  }
  return -1;
}

std::vector<std::byte> bytes_of(size_t count, int first) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(first + static_cast<int>(i));
  return bytes;
}

class SwapStoreTest : public testing::TestWithParam<bool> {
 protected:
  SwapDirectory directory_;
  SwapStore store_{10000, kChunk, GetParam() ? directory_.path : ""};
};

TEST_P(SwapStoreTest, gives_back_what_was_put_and_reuses_dropped_tickets) {
  const auto first = store_.put(bytes_of(kChunk, 1));
  const auto second = store_.put(bytes_of(100, 2));
  const auto empty = store_.put({});
  EXPECT_EQ(store_.used_bytes(), kChunk + 100);
  store_.drop(first);
  EXPECT_EQ(store_.put(bytes_of(13, 3)), first);
  EXPECT_EQ(store_.get(first), bytes_of(13, 3));
  EXPECT_EQ(store_.get(second), bytes_of(100, 2));
  EXPECT_TRUE(store_.get(empty).empty());
  EXPECT_EQ(directory_.num_files(), 0U) << "the file is unlinked from the start";
}

TEST_P(SwapStoreTest, counts_bytes_and_tells_how_much_fits) {
  const auto ticket = store_.put(bytes_of(4000, 1));
  EXPECT_TRUE(store_.has_room(6000));
  EXPECT_FALSE(store_.has_room(6001));
  store_.drop(ticket);
  store_.drop(ticket);
  EXPECT_EQ(store_.used_bytes(), 0U);
}

INSTANTIATE_TEST_SUITE_P(Places, SwapStoreTest, testing::Bool(),
                         [](const auto& info) { return info.param ? "File" : "Memory"; });

TEST(SwapStoreFileTest, damaged_contents_are_an_integrity_error) {
  const SwapDirectory directory;
  SwapStore store(10000, kChunk, directory.path);
  const auto damaged = store.put(bytes_of(1000, 1));
  const auto intact = store.put(bytes_of(1000, 2));
  const int file = find_open_file(directory.path);
  ASSERT_GE(file, 0);
  const char other = 77;
  ASSERT_EQ(::pwrite(file, &other, 1, 500), 1);
  EXPECT_THROW(store.get(damaged), IntegrityError);
  EXPECT_EQ(store.get(intact), bytes_of(1000, 2));
}

TEST(SwapStoreFileTest, a_file_cut_short_is_a_driver_error) {
  const SwapDirectory directory;
  SwapStore store(10000, kChunk, directory.path);
  const auto ticket = store.put(bytes_of(1000, 1));
  ASSERT_EQ(::ftruncate(find_open_file(directory.path), 10), 0);
  EXPECT_THROW(store.get(ticket), DriverError);
}

TEST(SwapStoreFileTest, a_directory_that_does_not_exist_is_a_driver_error) {
  EXPECT_THROW(SwapStore(10000, kChunk, "/no/such/directory"), DriverError);
}

}  // namespace
}  // namespace vtensor
