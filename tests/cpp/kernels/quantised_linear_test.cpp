// Products of inputs of 8 bits: with weights of 8 bits and a scale an output all levels give the
// same bits, AMX's on tiles in software among them; in groups, what the definition says. Arrays end
// where their numbers do: an address sanitizer sees a read beyond them. Python's tests compare with
// torch.
#include "kernels/linear/quantised_linear.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>

#include "tests/cpp/kernels/slow_hadamard.h"
#include "tests/cpp/kernels/software_tiles/levels.h"
#include "tests/cpp/kernels/software_tiles/software_tiles.h"

namespace vtensor::kernels {
namespace {

struct Shape {
  int64_t rows;
  int64_t depth;
  int64_t columns;
  DType dtype;
  bool has_bias;
  bool has_residual;
  int64_t group = 0;  // 0: one scale an output
  int bits = 8;
  bool has_minimums = false;
  Codebook codebook = Codebook();
  bool is_rotated = false;
};

std::ostream& operator<<(std::ostream& out, const Shape& s) {
  return out << s.rows << " rows, " << s.depth << " inputs, " << s.columns << " outputs"
             << (s.dtype == DType::kFloat32 ? ", float32" : ", bfloat16")
             << (s.has_bias ? ", bias" : "") << (s.has_residual ? ", residual" : "") << ", "
             << s.bits << " bits, groups of " << s.group << (s.has_minimums ? ", minimums" : "")
             << ", codebook of kind " << static_cast<int>(s.codebook.kind())
             << (s.is_rotated ? ", rotated" : "");
}

using Bytes = std::vector<uint8_t>;

class Problem {
 public:
  Problem(const Shape& shape, unsigned seed) : shape_(shape), random_(seed) {
    const int64_t padded = panels() * kQuantisedColumns;
    integers_.resize(static_cast<size_t>(padded * shape.depth));
    const int largest = (1 << (shape.bits - 1)) - 1;
    std::uniform_int_distribution<int> integer_of(-largest - 1, largest);
    for (int64_t i = 0; i < shape.columns * shape.depth; ++i) {
      integers_[static_cast<size_t>(i)] = static_cast<int8_t>(integer_of(random_));
    }
    const auto num_bytes = static_cast<size_t>(padded * shape.depth * shape.bits / 8);
    words_.reset(static_cast<uint8_t*>(::operator new[](num_bytes, std::align_val_t{64})));
    std::fill_n(words_.get(), num_bytes, uint8_t{0});
    scales_.resize(static_cast<size_t>(padded * num_groups()));
    if (shape.has_minimums) minimums_.resize(scales_.size());
    sums_.resize(static_cast<size_t>(padded));
    std::uniform_real_distribution<float> scale(0.001F, 0.02F);
    for (int64_t column = 0; column < padded; ++column) {
      for (int64_t k = 0; k < shape.depth; ++k) put(column, k, integer(column, k));
      for (int64_t group = 0; group < num_groups() && column < shape.columns; ++group) {
        scales_[of_group(column, group)] = scale(random_);
        if (shape.has_minimums) minimums_[of_group(column, group)] = scale(random_) - 0.01F;
      }
    }
    x_ = numbers(shape.rows * x_stride() - 8);
    bias_ = numbers(shape.columns);
    residual_ = numbers(shape.rows * shape.columns);
  }

  Bytes multiply(const QuantisedIsa& isa) const { return multiply(isa, 0, shape_.rows); }

  // Rows [first, first + num_rows) alone.
  Bytes multiply(const QuantisedIsa& isa, int64_t first, int64_t num_rows) const {
    return multiply(isa, first, num_rows, shape_.columns);
  }

  // Of columns that are gates and factors.
  Bytes multiply_gates(const QuantisedIsa& isa) const {
    return multiply(isa, 0, shape_.rows, shape_.columns / 2);
  }

  // The definition in layers/quantised.py, in double precision.
  double expected(int64_t row, int64_t column) const {
    const std::vector<float> x = inputs(row);
    const int64_t piece = shape_.group == 0 || shape_.is_rotated ? shape_.depth : shape_.group;
    float factor = 0, scale = 0;
    double output = 0;
    for (int64_t k = 0; k < shape_.depth; ++k) {
      if (k % piece == 0) {
        float largest = 0;
        for (int64_t i = k; i < k + piece; ++i) {
          largest = std::max(largest, std::abs(x[static_cast<size_t>(i)]));
        }
        factor = 127 / largest;
        scale = largest / 127;
      }
      const size_t i = of_group(column, shape_.group == 0 ? 0 : k / shape_.group);
      const double weight = static_cast<double>(weight_of(integer(column, k))) * scales_[i] +
                            (shape_.has_minimums ? minimums_[i] : 0);
      output += std::nearbyint(x[static_cast<size_t>(k)] * factor) * scale * weight;
    }
    if (shape_.has_bias) output += number(bias_, column);
    if (shape_.has_residual) output += number(residual_, row * shape_.columns + column);
    return output;
  }

  float number(const Bytes& bytes, int64_t i) const {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - element(), bytes.data() + i * element(),
                static_cast<size_t>(element()));
    return std::bit_cast<float>(bits);
  }

 private:
  struct FreeAligned {
    void operator()(uint8_t* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };

  // Of a row, rotated if they are.
  std::vector<float> inputs(int64_t row) const {
    std::vector<float> x;
    for (int64_t k = 0; k < shape_.depth; ++k) x.push_back(number(x_, row * x_stride() + k));
    if (!shape_.is_rotated) return x;
    const int64_t block = rotated_inputs(shape_.depth);
    return slow_hadamard(std::move(x), block, 1 / static_cast<float>(block));
  }
  int64_t element() const { return static_cast<int64_t>(element_bytes(shape_.dtype)); }
  int64_t panels() const { return (shape_.columns + kQuantisedColumns - 1) / kQuantisedColumns; }
  int64_t x_stride() const { return shape_.depth + 8; }
  int8_t integer(int64_t column, int64_t k) const {
    return integers_[static_cast<size_t>(column * shape_.depth + k)];
  }
  int weight_of(int8_t integer) const {
    if (shape_.bits != 4) return integer;
    return shape_.codebook.numbers()[static_cast<size_t>(integer + 8)];
  }
  int64_t num_groups() const { return shape_.group == 0 ? 1 : shape_.depth / shape_.group; }
  size_t of_group(int64_t column, int64_t group) const {
    const int64_t panel = column / kQuantisedColumns;
    return static_cast<size_t>((panel * num_groups() + group) * kQuantisedColumns +
                               column % kQuantisedColumns);
  }
  // An integer into its word, as kernels/calls/quantised.h says.
  void put(int64_t column, int64_t k, int value) {
    sums_[static_cast<size_t>(column)] += 128 * value;
    if (shape_.bits == 8) {
      put_bits(column, k / 4, k % 4 * 8, value + (shape_.group == 0 ? 0 : 128), 8);
      return;
    }
    const int shifted = value + (1 << (shape_.bits - 1));
    const int64_t bit = (k % 2 * 2 + k % 8 / 4) * 8;  // of the byte
    if (shape_.bits == 4) {
      put_bits(column, k / 8, bit + k % 4 / 2 * 4, shifted, 4);
      return;
    }
    const int64_t word = k / 16 * 3, four = k % 16 / 8 * 2 + k % 4 / 2;
    if (four < 3) {
      put_bits(column, word + four, bit, shifted, 6);
    } else {
      for (int i = 0; i < 3; ++i) put_bits(column, word + i, bit + 6, shifted >> (2 * i), 2);
    }
  }
  // The lowest `count` bits of a value, from a bit on of one of an output's words.
  void put_bits(int64_t column, int64_t word, int64_t bit, int value, int count) {
    const int64_t row = column / kQuantisedColumns * (shape_.depth * shape_.bits / 32) + word;
    uint8_t* bytes = words_.get() + (row * kQuantisedColumns + column % kQuantisedColumns) * 4;
    const int bits = (value & ((1 << count) - 1)) << (bit % 8);
    bytes[bit / 8] = static_cast<uint8_t>(bytes[bit / 8] | bits);
  }
  // output_columns: half of all with gates.
  Bytes multiply(const QuantisedIsa& isa, int64_t first, int64_t num_rows,
                 int64_t output_columns) const {
    Bytes output(static_cast<size_t>(num_rows * output_columns * element()), 0xab);
    LinearCall layer;
    layer.x = x_.data() + first * x_stride() * element();
    layer.x_stride = x_stride();
    layer.bias = shape_.has_bias ? bias_.data() : nullptr;
    const uint8_t* residual = residual_.data() + first * shape_.columns * element();
    layer.residual = shape_.has_residual ? residual : nullptr;
    layer.residual_stride = layer.columns = shape_.columns;
    layer.output = output.data();
    layer.output_stride = output_columns;
    layer.depth = shape_.depth;
    layer.gates = output_columns < shape_.columns;
    QuantisedWeight weight;
    weight.words = reinterpret_cast<const uint32_t*>(words_.get());
    weight.scales = scales_.data();
    weight.minimums = shape_.has_minimums ? minimums_.data() : nullptr;
    weight.sums = shape_.group == 0 ? sums_.data() : nullptr;
    weight.bits = shape_.bits;
    weight.group = shape_.group;
    weight.depth = shape_.depth;
    weight.columns = shape_.columns;
    weight.codebook = shape_.codebook;
    weight.rotates_inputs = shape_.is_rotated;
    QuantisedLinear(Parallel(), isa).forward(shape_.dtype, layer, weight, num_rows, 1);
    return output;
  }
  // The upper bytes of float32 numbers: float32, or bfloat16.
  Bytes numbers(int64_t count) {
    std::normal_distribution<float> normal;
    Bytes bytes(static_cast<size_t>(count * element()));
    for (int64_t i = 0; i < count; ++i) {
      const auto bits = std::bit_cast<uint32_t>(normal(random_));
      std::memcpy(bytes.data() + i * element(),
                  reinterpret_cast<const char*>(&bits) + 4 - element(),
                  static_cast<size_t>(element()));
    }
    return bytes;
  }

  Shape shape_;
  std::mt19937 random_;
  std::vector<int8_t> integers_;  // [columns, depth]
  std::unique_ptr<uint8_t[], FreeAligned> words_;
  std::vector<float> scales_, minimums_;
  std::vector<int32_t> sums_;
  Bytes x_, bias_, residual_;
};

class QuantisedLevels : public testing::TestWithParam<const QuantisedIsa*> {
 protected:
  void expect_portable_bits(const Shape& shape, unsigned seed) {
    const Problem problem(shape, seed);
    EXPECT_EQ(problem.multiply(*GetParam()), problem.multiply(find_quantised("portable"))) << shape;
  }

  static void expect_definition(const Problem& problem, const Shape& shape, const Bytes& output,
                                double bound) {
    for (int64_t row = 0; row < shape.rows; ++row) {
      for (int64_t column = 0; column < shape.columns; ++column) {
        const double expected = problem.expected(row, column);
        ASSERT_NEAR(problem.number(output, row * shape.columns + column), expected,
                    bound * (1 + std::abs(expected)))
            << shape << ": " << row << " " << column;
      }
    }
  }
};

// Around the heights of tiles and blocks; depths with and without a part of a tile.
TEST_P(QuantisedLevels, random_shapes_are_the_bits_of_the_portable_level) {
  std::mt19937 random(3);
  const auto one_of = [&](const std::vector<int64_t>& values) {
    return values[random() % values.size()];
  };
  for (unsigned i = 0; i < 60; ++i) {
    const int64_t rows =
        one_of({1, 3, 6, 7, 8, 11, 15, 16, 17, 18, 25, 31, 32, 33, 47, 63, 64, 70});
    const int64_t depth = one_of({4, 60, 64, 68, 100, 128, 192, 260, 320});
    const int64_t columns = one_of({16, 32, 48, 64, 80, 112, 144, 192});
    const DType dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    Shape shape = {rows, depth, columns, dtype, random() % 2 == 0, random() % 2 == 0};
    shape.is_rotated = i % 2 == 0;
    expect_portable_bits(shape, i);
  }
}

// Inputs are made ready 240 or 256 rows at once, and rows of great depth multiplied fewer at once.
TEST_P(QuantisedLevels, many_rows_and_deep_ones_are_the_bits_of_the_portable_level) {
  for (const int64_t rows : {239, 240, 255, 256, 257, 263, 300, 520}) {
    expect_portable_bits({rows, 68, 48, DType::kBFloat16, true, true}, 5);
  }
  for (const int64_t rows : {40, 64, 97}) {
    expect_portable_bits({rows, 17000, 16, DType::kFloat32, true, false}, 6);
  }
}

TEST_P(QuantisedLevels, outputs_are_those_of_the_definition) {
  for (const int64_t rows : {5, 12, 29, 45}) {
    Shape shape = {rows, rows == 12 ? 320 : 324, 80, DType::kFloat32, true, true};
    shape.is_rotated = rows < 29;
    const Problem problem(shape, 7);
    expect_definition(problem, shape, problem.multiply(*GetParam()), 1e-5);
  }
}

// 16 numbers, as far apart as those of the kind may be.
Codebook draw_codebook(CodebookKind kind, std::mt19937& random) {
  if (kind == CodebookKind::kEven) return Codebook();
  const int spread = kind == CodebookKind::kSmall ? kMaxSmallByte : 255;
  const int least = -128 + static_cast<int>(random() % static_cast<unsigned>(256 - spread));
  CodebookNumbers numbers;
  for (int8_t& number : numbers) {
    number = static_cast<int8_t>(least + static_cast<int>(random() % (spread + 1U)));
  }
  numbers[3] = static_cast<int8_t>(least);
  numbers[12] = static_cast<int8_t>(least + spread);
  const Codebook codebook(numbers);
  EXPECT_EQ(codebook.kind(), kind);
  return codebook;
}

// Groups of 16 are those of Q6_K, a group of all inputs that of a scale and a minimum an output.
TEST_P(QuantisedLevels, groups_are_those_of_the_definition_and_rows_the_same_bits_alone) {
  std::mt19937 random(4);
  const auto one_of = [&](const std::vector<int64_t>& values) {
    return values[random() % values.size()];
  };
  for (unsigned i = 0; i < 60; ++i) {
    const auto bits = static_cast<int>(one_of({4, 4, 6, 8}));
    const auto kind = static_cast<CodebookKind>(bits == 4 ? i % kNumCodebookKinds : 0);
    const Codebook codebook = draw_codebook(kind, random);
    const int64_t group = one_of({16, 32, 64, 192});
    const DType dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
    const Shape shape = {one_of({1, 2, 5, 6, 7, 11, 12, 13, 29, 70}),
                         192,
                         one_of({16, 48, 64, 80, 144}),
                         dtype,
                         random() % 2 == 0,
                         random() % 2 == 0,
                         group,
                         bits,
                         kind == CodebookKind::kEven && random() % 2 == 0,
                         codebook,
                         false};
    const Problem problem(shape, i);
    const Bytes output = problem.multiply(*GetParam());
    expect_definition(problem, shape, output, dtype == DType::kFloat32 ? 1e-5 : 1.0 / 128);
    Bytes apart;
    for (int64_t row = 0; row < shape.rows; ++row) {
      const Bytes alone = problem.multiply(*GetParam(), row, 1);
      apart.insert(apart.end(), alone.begin(), alone.end());
    }
    EXPECT_EQ(output, apart) << shape;
  }
}

TEST_P(QuantisedLevels, factors_take_the_place_of_their_gates) {
  std::mt19937 random(9);
  for (const int64_t rows : {1, 6, 7, 17, 33, 64, 70, 300}) {
    for (const int64_t group : {0, 64}) {
      const DType dtype = random() % 2 == 0 ? DType::kFloat32 : DType::kBFloat16;
      const bool has_bias = random() % 2 == 0;
      const int64_t width = 64 * static_cast<int64_t>(1 + random() % 3);
      const Shape shape = {rows, 192, 2 * width, dtype, has_bias, false, group};
      const Problem problem(shape, static_cast<unsigned>(rows));
      const Bytes plain = problem.multiply(*GetParam()),
                  gated = problem.multiply_gates(*GetParam());
      const double bound = dtype == DType::kFloat32 ? 2e-6 : 1.0 / 100;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < width; ++column) {
          const int64_t at = row * 2 * width + column;
          const double gate = problem.number(plain, at);
          const double expected = gate / (1 + std::exp(-gate)) * problem.number(plain, at + width);
          ASSERT_NEAR(problem.number(gated, row * width + column), expected,
                      bound * (1e-6 + std::abs(expected)))
              << shape << ": " << row << " " << column;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedLevels, testing::ValuesIn(testable_quantised()),
                         [](const auto& info) { return std::string(info.param->name); });

// Else the tests above would compare vectors with vectors.
TEST(SoftwareAmx, computes_on_tiles_from_seven_rows_on) {
  const auto levels = testable_quantised();
  if (std::string(levels.back()->name) != "software_amx") GTEST_SKIP() << "no AVX512_BF16";
  const auto& tiles = testing_tiles::SoftwareTiles::of_thread();
  for (const auto& [rows, products] : {std::pair{6, 0}, {7, 8}, {16, 8}, {17, 16}, {64, 32}}) {
    const int64_t before = tiles.num_products();
    Problem({rows, 128, 64, DType::kFloat32, false, false}, 1).multiply(*levels.back());
    EXPECT_EQ(tiles.num_products() - before, products) << rows;
  }
}

TEST(QuantisedIsa, names_find_them) {
  for (const QuantisedIsa* isa : available_quantised()) {
    EXPECT_EQ(&find_quantised(isa->name), isa);
  }
}

}  // namespace
}  // namespace vtensor::kernels
