// Scales in blocks: the bits of the same scales in float32, which the definition makes of them here
// in double precision, at all levels, AMX's on tiles in software among them. Arrays end where their
// numbers do: an address sanitizer sees a read beyond them.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>
#include <tuple>

#include "kernels/linear/quantised_linear.h"
#include "tests/cpp/kernels/software_tiles/levels.h"

namespace vtensor::kernels {
namespace {

constexpr int64_t kColumns = 144;  // two panels and a part
constexpr int64_t kPadded = 192;

struct Shape {
  int bits;
  int64_t group;
  int64_t depth;
  bool has_minimums;
  bool byte_inputs;
  DType dtype;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.bits << " bits, groups of " << s.group << ", " << s.depth << " inputs"
             << (s.has_minimums ? ", minimums" : "") << (s.byte_inputs ? ", bytes" : "")
             << (s.dtype == DType::kFloat32 ? ", float32" : ", bfloat16");
}

// A finite float16 number of at most 2; subnormal ones among them.
double number_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

// Numbers of groups in blocks, and what they are.
struct Numbers {
  std::vector<uint16_t> stored;
  std::vector<double> values;  // [panels, groups, 64]

  Numbers(const Shape& shape, std::mt19937& random) {
    const int64_t groups = shape.depth / shape.group, blocks = shape.depth / kScaleBlock;
    for (int64_t panel = 0; panel < kPadded / kQuantisedColumns; ++panel) {
      std::vector<uint16_t> factors(static_cast<size_t>(blocks * kQuantisedColumns));
      std::vector<int8_t> bytes(static_cast<size_t>(groups * kQuantisedColumns));
      for (uint16_t& factor : factors) factor = static_cast<uint16_t>(random() & 0xbfff);
      for (int8_t& byte : bytes) byte = static_cast<int8_t>(random());
      for (int64_t i = 0; i < groups * kQuantisedColumns; ++i) {
        const int64_t block = i / kQuantisedColumns * shape.group / kScaleBlock;
        const auto place = static_cast<size_t>(block * kQuantisedColumns + i % kQuantisedColumns);
        values.push_back(number_of_half(factors[place]) * bytes[static_cast<size_t>(i)]);
      }
      const size_t begin = stored.size();
      stored.insert(stored.end(), factors.begin(), factors.end());
      stored.resize(stored.size() + bytes.size() / 2);
      std::memcpy(stored.data() + begin + factors.size(), bytes.data(), bytes.size());
    }
  }
};

// One weight, with scales in blocks and in float32.
class Problem {
 public:
  Problem(const Shape& shape, std::mt19937& random)
      : words_(static_cast<size_t>(kPadded * shape.depth * shape.bits / 32 + 16)),
        scales_(shape, random),
        minimums_(shape, random) {
    for (uint32_t& word : words_) word = static_cast<uint32_t>(random());
    blocks_.bits = shape.bits;
    blocks_.group = shape.group;
    blocks_.depth = shape.depth;
    blocks_.columns = kColumns;
    blocks_.byte_inputs = shape.byte_inputs;
    const auto address = reinterpret_cast<uintptr_t>(words_.data());
    blocks_.words = words_.data() + (64 - address % 64) % 64 / 4;
    floats_ = blocks_;
    blocks_.scale_format = ScaleFormat::kBlocks;
    blocks_.scales = scales_.stored.data();
    for (size_t i = 0; i < scales_.values.size(); ++i) {
      const double scale = scales_.values[i];
      float_scales_.push_back(static_cast<float>(scale));
      EXPECT_EQ(float_scales_.back(), scale);
      float_minimums_.push_back(static_cast<float>(blocks_.zero() * scale - minimums_.values[i]));
    }
    floats_.scales = float_scales_.data();
    if (!shape.has_minimums) return;
    blocks_.minimums = minimums_.stored.data();
    floats_.minimums = float_minimums_.data();
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;

  const QuantisedWeight& blocks() const { return blocks_; }
  const QuantisedWeight& floats() const { return floats_; }

 private:
  std::vector<uint32_t> words_;
  Numbers scales_, minimums_;
  std::vector<float> float_scales_, float_minimums_;
  QuantisedWeight blocks_, floats_;
};

class ScaleBlocks : public testing::TestWithParam<const QuantisedIsa*> {
 protected:
  std::vector<char> inputs(const Shape& shape, int64_t rows) {
    std::normal_distribution<float> normal;
    const size_t width = element_bytes(shape.dtype);
    std::vector<char> x(static_cast<size_t>(rows * shape.depth) * width);
    for (size_t i = 0; i < x.size(); i += width) {
      const auto bits = std::bit_cast<uint32_t>(normal(random_));
      std::memcpy(x.data() + i, reinterpret_cast<const char*>(&bits) + 4 - width, width);
    }
    return x;
  }

  static LinearCall layer(const Shape& shape, const std::vector<char>& x, std::vector<char>& out) {
    out.assign(x.size() / static_cast<size_t>(shape.depth) * kColumns, 0);
    LinearCall call;
    call.x = x.data();
    call.x_stride = call.depth = shape.depth;
    call.output = out.data();
    call.output_stride = call.columns = kColumns;
    return call;
  }

  std::mt19937 random_{5};
};

// Groups as those of Q4_K and Q6_K among them; rows around the heights of tiles.
TEST_P(ScaleBlocks, are_the_bits_of_the_same_scales_in_float32) {
  const QuantisedLinear linear(Parallel(), *GetParam());
  for (unsigned i = 0; i < 128; ++i) {
    const Shape shape = {std::vector<int>{4, 6, 8}[i % 3],
                         int64_t{16} << (random_() % 5),
                         kScaleBlock * (1 + static_cast<int64_t>(random_() % 3)),
                         (i & 2) != 0,
                         (i & 4) != 0,
                         (i & 8) != 0 ? DType::kFloat32 : DType::kBFloat16};
    const int64_t rows = std::vector<int64_t>{1, 2, 6, 7, 12, 17, 32, 70}[i / 16];
    const Problem problem(shape, random_);
    const std::vector<char> x = inputs(shape, rows);
    std::vector<char> output, expected;
    linear.forward(shape.dtype, layer(shape, x, output), problem.blocks(), rows, 1);
    linear.forward(shape.dtype, layer(shape, x, expected), problem.floats(), rows, 1);
    ASSERT_EQ(output, expected) << rows << " rows, " << shape;
  }
}

TEST_P(ScaleBlocks, of_rows_in_groups_are_those_of_each_ones_weight) {
  const QuantisedLinear linear(Parallel(), *GetParam());
  const RowGroups groups{{5, 5, 29}};
  for (const bool byte_inputs : {false, true}) {
    const Shape shape = {4, 32, 512, true, byte_inputs, DType::kBFloat16};
    const Problem first(shape, random_), second(shape, random_), third(shape, random_);
    const std::vector<char> x = inputs(shape, groups.num_rows());
    std::vector<char> output, expected;
    linear.forward_groups(shape.dtype, layer(shape, x, output),
                          {first.blocks(), second.blocks(), third.blocks()}, {}, groups, 1);
    linear.forward_groups(shape.dtype, layer(shape, x, expected),
                          {first.floats(), second.floats(), third.floats()}, {}, groups, 1);
    EXPECT_EQ(output, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ScaleBlocks, testing::ValuesIn(testable_quantised()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(ScaleFormat, blocks_go_with_groups_and_depths_that_are_whole) {
  QuantisedWeight weight;
  weight.scale_format = ScaleFormat::kBlocks;
  for (const auto& [group, depth, is_whole] : {std::tuple{16, 512, true},
                                               {256, 256, true},
                                               {32, 384, false},
                                               {512, 512, false},
                                               {48, 768, false},
                                               {0, 512, false}}) {
    weight.group = group;
    weight.depth = depth;
    EXPECT_EQ(weight.has_whole_blocks(), is_whole) << group << " " << depth;
  }
}

}  // namespace
}  // namespace vtensor::kernels
