// Quantised KV: the bytes that are stored, and attention over them written out in double precision.
// The arena is as large as what is read: an address sanitizer sees a read beyond it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/attention/attention.h"
#include "tests/cpp/kernels/slow_hadamard.h"
#include "tests/cpp/kernels/software_tiles/levels.h"

namespace vtensor::kernels {
namespace {

constexpr int64_t kTokens = 151;  // the last tile ends with half a pair of them

// Scores differ by so much that roundings of what is multiplied would be seen.
constexpr float kScaling = 1;

// One KV head, and as many of queries as are multiplied one by one, two or four at once.
struct Shape {
  DType dtype;
  int head_dim;
  int group;
  int64_t row() const { return head_dim + kScaleBytes; }
};

constexpr Shape kShapes[] = {
    {DType::kFloat32, 48, 3},   {DType::kFloat32, 64, 2},   {DType::kBFloat16, 64, 1},
    {DType::kBFloat16, 64, 2},  {DType::kBFloat16, 128, 4}, {DType::kBFloat16, 64, 7},
    {DType::kBFloat16, 64, 12}, {DType::kFloat16, 64, 1},   {DType::kFloat16, 128, 2},
    {DType::kFloat16, 64, 7},
};

std::vector<char> stored_as(DType dtype, const std::vector<float>& numbers) {
  std::vector<char> bytes(numbers.size() * element_bytes(dtype));
  for (size_t i = 0; i < numbers.size(); ++i) {
    const auto bits = std::bit_cast<uint32_t>(numbers[i]);
    const auto high = static_cast<uint16_t>(bits >> 16);
    if (dtype == DType::kFloat32) std::memcpy(bytes.data() + 4 * i, &bits, 4);
    if (dtype == DType::kBFloat16) std::memcpy(bytes.data() + 2 * i, &high, 2);
    const auto half = static_cast<_Float16>(numbers[i]);
    if (dtype == DType::kFloat16) std::memcpy(bytes.data() + 2 * i, &half, 2);
  }
  return bytes;
}

std::vector<float> read_as(DType dtype, const std::vector<char>& bytes) {
  std::vector<float> numbers(bytes.size() / element_bytes(dtype));
  for (size_t i = 0; i < numbers.size(); ++i) {
    uint32_t bits = 0;
    if (dtype == DType::kFloat32) std::memcpy(&bits, bytes.data() + 4 * i, 4);
    if (dtype == DType::kBFloat16)
      std::memcpy(reinterpret_cast<char*>(&bits) + 2, &bytes[2 * i], 2);
    numbers[i] = std::bit_cast<float>(bits);
    _Float16 half = 0;
    if (dtype == DType::kFloat16) std::memcpy(&half, &bytes[2 * i], 2);
    if (dtype == DType::kFloat16) numbers[i] = half;
  }
  return numbers;
}

double number_of(uint8_t byte, KVFormat format) {
  if (format == KVFormat::kInt8) return std::bit_cast<int8_t>(byte);
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (byte & 128) != 0 ? -magnitude : magnitude;
}

// Keys and queries as they are multiplied, rotated with int8: then both together divided by what
// the matrix twice is times, keys by the larger half.
struct Step {
  std::vector<uint8_t> k, v;
  std::vector<float> query, key, value, output;
};

// One request of kTokens tokens, the last `num_new` of them new.
Step run(const Isa& isa, const Shape& of, KVFormat format, int64_t num_new) {
  const int dim = of.head_dim, group = of.group;
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  const auto draw = [&](int64_t rows) {
    std::vector<float> values(static_cast<size_t>(rows * dim));
    for (float& value : values) value = normal(random);
    return read_as(of.dtype, stored_as(of.dtype, values));
  };
  Step step;
  step.k.assign(static_cast<size_t>(kTokens * of.row()), 255);
  step.v.assign(static_cast<size_t>(kTokens * of.row()), 255);
  const Strides strides{kTokens * of.row(), of.row(), of.row()};
  const ArenaShape shape{of.dtype, 1, kTokens, 1, dim, dim, strides, strides, format};
  HostAttention attention(shape, {{step.k.data(), step.v.data()}}, Parallel(), isa);
  for (const auto& [start, end] :
       {std::pair{int64_t{0}, kTokens - num_new}, {kTokens - num_new, kTokens}}) {
    const int64_t count = end - start;
    step.query = draw(count * group);
    step.key = draw(count);
    step.value = draw(count);
    const auto query = stored_as(of.dtype, step.query), key = stored_as(of.dtype, step.key);
    const auto value = stored_as(of.dtype, step.value);
    std::vector<char> output(query.size());
    const LayerInputs inputs{{query.data(), dim, group * dim},
                             {key.data(), 0, dim},
                             {value.data(), 0, dim},
                             output.data(),
                             kScaling,
                             0,
                             nullptr};
    attention.forward(Plan({{0, 0, start, end}}, {}, {kNoWindow, group, 1, 1}), 0, inputs);
    step.output = read_as(of.dtype, output);
  }
  if (format == KVFormat::kInt8) {
    const int halvings = std::countr_zero(static_cast<unsigned>(dim));
    step.key = slow_hadamard(step.key, dim & -dim, std::ldexp(1.0F, -(halvings + 1) / 2));
    step.query = slow_hadamard(step.query, dim & -dim, std::ldexp(1.0F, -(halvings / 2)));
  }
  return step;
}

class QuantisedKV : public testing::TestWithParam<const Isa*> {};

TEST_P(QuantisedKV, bytes_are_those_of_the_portable_level_and_near_the_numbers) {
  const Shape of = kShapes[0];
  for (const KVFormat format : {KVFormat::kInt8, KVFormat::kFloat8}) {
    const Step step = run(*GetParam(), of, format, 20);
    const Step portable = run(find_isa("portable"), of, format, 20);
    EXPECT_EQ(step.k, portable.k);
    EXPECT_EQ(step.v, portable.v);
    for (int64_t i = 0; i < 20 * of.head_dim; ++i) {
      const uint8_t* row = step.k.data() + (kTokens - 20 + i / of.head_dim) * of.row();
      float scale = 0;
      std::memcpy(&scale, row + of.head_dim, sizeof scale);
      const float number = step.key[static_cast<size_t>(i)];
      const double step_size = format == KVFormat::kInt8 ? scale
                                                         : std::max(std::abs(number) / 8.0,
                                                                    std::ldexp(double{scale}, -9));
      EXPECT_NEAR(number_of(row[i % of.head_dim], format) * scale, number, 0.5001 * step_size);
    }
  }
}

void expect_attention(const Step& step, const Shape& of, KVFormat format, int64_t num_new) {
  const auto dim = static_cast<size_t>(of.head_dim);
  // That of float16 is tight enough for a sum of bytes whose upper ones count a 256th less. By
  // bfloat16 products weights and values are rounded, too, but neither keys nor rotated queries.
  const double rounding = of.dtype == DType::kFloat32   ? 2e-5
                          : of.dtype == DType::kFloat16 ? 5e-4
                                                        : 8e-3;
  const auto stored = [&](const std::vector<uint8_t>& arena, int64_t token, size_t i) {
    const uint8_t* row = arena.data() + token * of.row();
    float scale = 0;
    std::memcpy(&scale, row + of.head_dim, sizeof scale);
    return number_of(row[i], format) * scale;
  };
  for (int64_t row = 0; row < num_new * of.group; ++row) {
    const size_t first = static_cast<size_t>(row) * dim;
    double sum = 0;
    std::vector<double> out(dim);
    for (int64_t token = 0; token <= kTokens - num_new + row / of.group; ++token) {
      double score = 0;
      for (size_t i = 0; i < dim; ++i) score += stored(step.k, token, i) * step.query[first + i];
      const double weight = std::exp(double{kScaling} * score);
      sum += weight;
      for (size_t i = 0; i < dim; ++i) out[i] += weight * stored(step.v, token, i);
    }
    for (size_t i = 0; i < dim; ++i) {
      const double expected = out[i] / sum;
      ASSERT_NEAR(step.output[first + i], expected, rounding * (1 + std::abs(expected)));
    }
  }
}

TEST_P(QuantisedKV, attention_equals_attention_over_the_stored_bytes_written_out) {
  for (const Shape& of : kShapes) {
    for (const KVFormat format : {KVFormat::kInt8, KVFormat::kFloat8}) {
      for (const int64_t num_new : {1, 2, 40}) {
        expect_attention(run(*GetParam(), of, format, num_new), of, format, num_new);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedKV, testing::ValuesIn(testable_isas()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace vtensor::kernels
