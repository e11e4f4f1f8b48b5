// Quantised KV: the bytes that are stored, and attention over them written out in double precision.
// The arena is as large as what is read: an address sanitizer sees a read beyond it.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <random>

#include "kernels/attention/attention.h"
#include "tests/cpp/kernels/software_tiles/levels.h"

namespace vtensor::kernels {
namespace {

constexpr int kHeadDim = 48, kRow = kHeadDim + kScaleBytes, kGroup = 3;
constexpr int64_t kTokens = 150;

double number_of(uint8_t byte, KVFormat format) {
  if (format == KVFormat::kInt8) return std::bit_cast<int8_t>(byte);
  const int exponent = (byte >> 3) & 15, mantissa = byte & 7;
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (byte & 128) != 0 ? -magnitude : magnitude;
}

struct Step {
  std::vector<uint8_t> k, v;
  std::vector<float> query, key, value, output;
};

// One request of kTokens tokens, the last `num_new` of them new; one KV head.
Step run(const Isa& isa, KVFormat format, int64_t num_new) {
  std::mt19937 random(9);
  std::normal_distribution<float> normal;
  const auto draw = [&](int64_t rows) {
    std::vector<float> values(static_cast<size_t>(rows * kHeadDim));
    for (float& value : values) value = normal(random);
    return values;
  };
  Step step;
  step.k.assign(kTokens * kRow, 255);
  step.v.assign(kTokens * kRow, 255);
  const Strides strides{kTokens * kRow, kRow, kRow};
  const ArenaShape shape{DType::kFloat32, 1,       kTokens, 1,     kHeadDim,
                         kHeadDim,        strides, strides, format};
  HostAttention attention(shape, {{step.k.data(), step.v.data()}}, Parallel(), isa);
  for (const auto& [start, end] :
       {std::pair{int64_t{0}, kTokens - num_new}, {kTokens - num_new, kTokens}}) {
    const int64_t count = end - start;
    step.query = draw(count * kGroup);
    step.key = draw(count);
    step.value = draw(count);
    step.output.resize(step.query.size());
    const LayerInputs inputs{{step.query.data(), kHeadDim, kGroup * kHeadDim},
                             {step.key.data(), 0, kHeadDim},
                             {step.value.data(), 0, kHeadDim},
                             step.output.data(),
                             0.2F,
                             0,
                             nullptr};
    attention.forward(Plan({{0, 0, start, end}}, {}, {kNoWindow, kGroup, 1, 1}), 0, inputs);
  }
  return step;
}

class QuantisedKV : public testing::TestWithParam<const Isa*> {};

TEST_P(QuantisedKV, bytes_are_those_of_the_portable_level_and_near_the_numbers) {
  for (const KVFormat format : {KVFormat::kInt8, KVFormat::kFloat8}) {
    const Step step = run(*GetParam(), format, 20);
    const Step portable = run(find_isa("portable"), format, 20);
    EXPECT_EQ(step.k, portable.k);
    EXPECT_EQ(step.v, portable.v);
    for (int64_t i = 0; i < 20 * kHeadDim; ++i) {
      const uint8_t* row = step.k.data() + (kTokens - 20 + i / kHeadDim) * kRow;
      float scale = 0;
      std::memcpy(&scale, row + kHeadDim, sizeof scale);
      const float number = step.key[static_cast<size_t>(i)];
      const double step_size = format == KVFormat::kInt8 ? scale
                                                         : std::max(std::abs(number) / 8.0,
                                                                    std::ldexp(double{scale}, -9));
      EXPECT_NEAR(number_of(row[i % kHeadDim], format) * scale, number, 0.5001 * step_size);
    }
  }
}

TEST_P(QuantisedKV, attention_equals_attention_over_the_stored_bytes_written_out) {
  for (const KVFormat format : {KVFormat::kInt8, KVFormat::kFloat8}) {
    for (const int64_t num_new : {1, 2, 40}) {
      const Step step = run(*GetParam(), format, num_new);
      const auto stored = [&](const std::vector<uint8_t>& arena, int64_t token, int i) {
        float scale = 0;
        std::memcpy(&scale, arena.data() + token * kRow + kHeadDim, sizeof scale);
        return number_of(arena[static_cast<size_t>(token * kRow + i)], format) * scale;
      };
      for (int64_t row = 0; row < num_new * kGroup; ++row) {
        double sum = 0;
        std::vector<double> out(kHeadDim);
        for (int64_t token = 0; token <= kTokens - num_new + row / kGroup; ++token) {
          double score = 0;
          for (int i = 0; i < kHeadDim; ++i) {
            score += stored(step.k, token, i) * step.query[static_cast<size_t>(row * kHeadDim + i)];
          }
          const double weight = std::exp(0.2 * score);
          sum += weight;
          for (int i = 0; i < kHeadDim; ++i) {
            out[static_cast<size_t>(i)] += weight * stored(step.v, token, i);
          }
        }
        for (int i = 0; i < kHeadDim; ++i) {
          ASSERT_NEAR(step.output[static_cast<size_t>(row * kHeadDim + i)],
                      out[static_cast<size_t>(i)] / sum, 2e-5);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedKV, testing::ValuesIn(testable_isas()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace vtensor::kernels
