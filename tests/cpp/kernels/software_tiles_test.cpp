// The tiles in software: what Intel's manual says that they compute, touch and refuse.
#include "tests/cpp/kernels/software_tiles/software_tiles.h"

#include <gtest/gtest.h>

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <vector>

namespace vtensor::testing_tiles {
namespace {

using Config = std::array<uint8_t, 64>;

// Tiles of these rows and bytes a row.
Config config_of(const std::vector<std::pair<int, int>>& shapes) {
  Config config = {1};
  for (size_t i = 0; i < shapes.size(); ++i) {
    config[48 + i] = static_cast<uint8_t>(shapes[i].first);
    config[16 + 2 * i] = static_cast<uint8_t>(shapes[i].second);
  }
  return config;
}

template <class Fn>
std::string fault_of(Fn fn) {
  try {
    fn();
  } catch (const TileFault& fault) {
    return fault.what;
  }
  return "none";
}

TEST(SoftwareTiles, bytes_are_multiplied_with_the_signs_of_their_instruction) {
  SoftwareTiles tiles;
  tiles.load_config(config_of({{1, 4}, {1, 8}, {2, 4}}).data());
  const uint8_t a[] = {255, 2, 3, 4, 128, 0, 1, 255}, b[] = {255, 1, 1, 2, 128, 9, 3, 128};
  tiles.load(1, a, 8);
  tiles.load(2, b, 4);
  int32_t sum = 0;
  tiles.zero(0);
  tiles.dpbusd(0, 1, 2);
  tiles.store(0, &sum, 4);
  EXPECT_EQ(sum, -255 + 2 + 3 + 8 - 128 * 128 + 3 - 255 * 128);
  tiles.dpbssd(0, 1, 2);
  tiles.store(0, &sum, 4);
  EXPECT_EQ(sum, -255 + 13 - 128 * 128 + 3 - 255 * 128 + (1 + 2 + 3 + 8 + 128 * 128 + 3 + 128));
  EXPECT_EQ(tiles.num_products(), 2);
}

TEST(SoftwareTiles, pairs_of_bfloat16_are_added_in_the_order_of_the_manual) {
  const auto number = [](float x) { return std::bit_cast<uint32_t>(x) >> 16; };
  const auto pair = [&](float even, float odd) { return number(even) | number(odd) << 16; };
  SoftwareTiles tiles;
  tiles.load_config(config_of({{1, 4}, {1, 8}, {2, 4}}).data());
  // Even products: 2^24, then 1, which is lost; odd ones: 1 and 1; -2^24 is there before.
  const uint32_t a[] = {pair(0x1p24F, 1), pair(1, 1)}, b[] = {pair(1, 1), pair(1, 1)};
  float sum = -0x1p24F;
  tiles.load(0, &sum, 4);
  tiles.load(1, a, 8);
  tiles.load(2, b, 4);
  tiles.dpbf16ps(0, 1, 2);
  tiles.store(0, &sum, 4);
  EXPECT_EQ(sum, 2);
  // Numbers below the normal ones count as 0.
  const uint32_t tiny[] = {pair(0x1p-130F, 0x1p-70F), pair(0, 0)};
  const uint32_t factors[] = {pair(0x1p60F, 0x1p-70F), pair(0, 0)};
  tiles.load(1, tiny, 8);
  tiles.load(2, factors, 4);
  tiles.zero(0);
  tiles.dpbf16ps(0, 1, 2);
  tiles.store(0, &sum, 4);
  EXPECT_EQ(sum, 0);
}

TEST(SoftwareTiles, a_load_and_a_store_touch_what_their_tile_has) {
  SoftwareTiles tiles;
  tiles.load_config(config_of({{3, 8}}).data());
  std::vector<uint8_t> from(2 * 20 + 8), to(48, 7);  // no byte more: a sanitizer sees it
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint8_t>(i);
  tiles.load(0, from.data(), 20);
  tiles.store(0, to.data(), 16);
  for (size_t i = 0; i < to.size(); ++i) {
    const bool is_inside = i < 40 && i % 16 < 8;
    EXPECT_EQ(to[i], is_inside ? i / 16 * 20 + i % 16 : 7) << i;
  }
}

TEST(SoftwareTiles, a_configuration_zeroes_tiles_and_can_be_put_back) {
  SoftwareTiles tiles;
  Config before = {9}, found;
  tiles.store_config(before.data());
  EXPECT_EQ(before, Config{});
  const Config wanted = config_of({{16, 64}, {2, 12}});
  tiles.load_config(wanted.data());
  tiles.store_config(found.data());
  EXPECT_EQ(found, wanted);
  const uint32_t words[6] = {1, 2, 3, 4, 5, 6};
  tiles.load(1, words, 12);
  tiles.load_config(wanted.data());
  uint32_t after[6] = {9};
  tiles.store(1, after, 12);
  EXPECT_EQ(after[0] + after[5], 0);
  tiles.load_config(before.data());
  EXPECT_EQ(fault_of([&] { tiles.zero(0); }), "#UD: tiles are not configured");
}

TEST(SoftwareTiles, a_wrong_configuration_is_a_fault) {
  SoftwareTiles tiles;
  const auto fault = [&](Config config) {
    return fault_of([&] { tiles.load_config(config.data()); });
  };
  const auto with = [](size_t at, uint8_t value) {
    Config config = config_of({{16, 64}});
    config[at] = value;
    return config;
  };
  EXPECT_EQ(fault(with(0, 2)), "#GP: no such palette");
  for (const size_t reserved : {2, 15, 32, 47, 56, 63}) {
    EXPECT_EQ(fault(with(reserved, 1)), "#GP: reserved bytes are set") << reserved;
  }
  EXPECT_EQ(fault(with(48, 17)), "#GP: too large");
  EXPECT_EQ(fault(with(16, 68)), "#GP: too large");
  EXPECT_EQ(fault(with(48, 0)), "#GP: half of a shape");
  EXPECT_EQ(fault(with(17, 1)), "#GP: too large");
  EXPECT_EQ(fault(config_of({{16, 64}})), "none");
}

TEST(SoftwareTiles, a_product_whose_tiles_do_not_fit_is_a_fault) {
  const auto fault = [](const std::vector<std::pair<int, int>>& shapes, int c, int a, int b) {
    SoftwareTiles tiles;
    tiles.load_config(config_of(shapes).data());
    return fault_of([&] { tiles.dpbusd(c, a, b); });
  };
  EXPECT_EQ(fault({{5, 64}, {5, 32}, {8, 64}}, 0, 1, 2), "none");
  EXPECT_EQ(fault({{4, 64}, {5, 32}, {8, 64}}, 0, 1, 2), "#UD: shapes that do not fit");
  EXPECT_EQ(fault({{5, 60}, {5, 32}, {8, 64}}, 0, 1, 2), "#UD: shapes that do not fit");
  EXPECT_EQ(fault({{5, 64}, {5, 36}, {8, 64}}, 0, 1, 2), "#UD: shapes that do not fit");
  EXPECT_EQ(fault({{16, 64}, {16, 64}}, 0, 1, 1), "#UD: a tile twice");
  EXPECT_EQ(fault({{16, 64}, {16, 64}}, 0, 1, 2), "#UD: no such tile");
  EXPECT_EQ(fault({{16, 64}, {16, 62}, {16, 64}}, 0, 1, 2), "#UD: part of a word");
}

}  // namespace
}  // namespace vtensor::testing_tiles
