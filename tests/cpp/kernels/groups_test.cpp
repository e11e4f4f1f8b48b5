// Rows in groups, each with a weight and a bias of its own: the bits of a call for each group, at
// all levels, AMX's on tiles in software among them, and with threads that draw the panels in any
// order.
#include "kernels/linear/groups.h"

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <thread>

#include "kernels/linear/linear.h"
#include "kernels/linear/quantised_linear.h"
#include "tests/cpp/kernels/software_tiles/levels.h"

namespace vtensor::kernels {
namespace {

constexpr int64_t kDepth = 128;
constexpr int64_t kColumns = 144;  // two panels and a part
constexpr int64_t kPadded = 192;

using Bytes = std::vector<uint8_t>;

struct FreeAligned {
  void operator()(char* p) const { ::operator delete[](p, std::align_val_t{64}); }
};

// bfloat16 or float32 numbers around 1, in cache lines of their own.
class Numbers {
 public:
  Numbers(DType dtype, int64_t count, std::mt19937& random)
      : bytes_(static_cast<char*>(::operator new[](
            static_cast<size_t>(count) * element_bytes(dtype), std::align_val_t{64}))) {
    std::uniform_real_distribution<float> number(-1, 1);
    for (int64_t i = 0; i < count; ++i) {
      const float x = number(random);
      const size_t width = element_bytes(dtype);
      std::memcpy(bytes_.get() + static_cast<size_t>(i) * width,
                  reinterpret_cast<const char*>(&x) + 4 - width, width);
    }
  }

  const void* data() const { return bytes_.get(); }

 private:
  std::unique_ptr<char[], FreeAligned> bytes_;
};

// Threads as OpenMP would start them.
void start_threads(void (*work)(void*), void* data, unsigned count, unsigned) {
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < count; ++i) threads.emplace_back(work, data);
  work(data);
  for (std::thread& thread : threads) thread.join();
}

RowGroups groups_of(const std::vector<int64_t>& rows) {
  RowGroups groups;
  for (const int64_t count : rows) groups.ends.push_back(groups.num_rows() + count);
  return groups;
}

// Among them groups of no rows, of one, around the heights of tiles, and more than a block.
const std::vector<std::vector<int64_t>> kGroups = {{1, 1, 1},   {0, 5, 0, 1}, {6, 7, 16, 17, 0, 33},
                                                   {64, 3, 47}, {2, 300, 1},  {0, 0}};

LinearCall layer_of(const Numbers& x, void* output) {
  LinearCall layer;
  layer.x = x.data();
  layer.x_stride = layer.depth = kDepth;
  layer.output = output;
  layer.output_stride = kColumns + 16;
  layer.columns = kColumns;
  return layer;
}

LinearCall rows_from(LinearCall layer, int64_t row, DType dtype) {
  const auto bytes = static_cast<int64_t>(element_bytes(dtype));
  layer.x = static_cast<const char*>(layer.x) + row * layer.x_stride * bytes;
  layer.output = static_cast<char*>(layer.output) + row * layer.output_stride * bytes;
  return layer;
}

Bytes output_of(const RowGroups& groups, DType dtype) {
  const int64_t numbers = groups.num_rows() * (kColumns + 16);
  return Bytes(static_cast<size_t>(numbers) * element_bytes(dtype), 0xab);
}

class QuantisedGroups : public testing::TestWithParam<const QuantisedIsa*> {
 protected:
  // A weight's words are any bits; scales and minimums are of groups of 32, or of an output.
  QuantisedWeight draw(int bits, int64_t group, bool byte_inputs) {
    QuantisedWeight weight;
    weight.bits = bits;
    weight.group = group;
    weight.byte_inputs = byte_inputs;
    weight.depth = kDepth;
    weight.columns = kColumns;
    weight.words = static_cast<const uint32_t*>(draw(kPadded * kDepth * bits / 32));
    weight.scales = draw(kPadded * weight.num_groups());
    if (group > 0) {
      weight.minimums = draw(kPadded * weight.num_groups());
    } else {
      sums_.push_back(std::make_unique<int32_t[]>(static_cast<size_t>(kPadded)));
      for (int64_t i = 0; i < kPadded; ++i) sums_.back()[static_cast<size_t>(i)] = sum(weight, i);
      weight.sums = sums_.back().get();
    }
    return weight;
  }

  const void* draw(int64_t count, DType dtype = DType::kFloat32) {
    numbers_.push_back(std::make_unique<Numbers>(dtype, count, random_));
    return numbers_.back()->data();
  }

  // 128 times the sum of an output's bytes.
  static int32_t sum(const QuantisedWeight& weight, int64_t column) {
    const int64_t panel = column / kQuantisedColumns, at = column % kQuantisedColumns;
    int32_t total = 0;
    for (int64_t k = 0; k < kDepth / 4; ++k) {
      int8_t bytes[4];
      std::memcpy(bytes, weight.words + (panel * kDepth / 4 + k) * kQuantisedColumns + at, 4);
      for (const int8_t byte : bytes) total += 128 * byte;
    }
    return total;
  }

  void expect_bits_of_single_calls(int bits, int64_t group, bool byte_inputs, DType dtype) {
    for (size_t number = 0; number < kGroups.size(); ++number) {
      const bool has_biases = number % 2 == 0;
      const RowGroups groups = groups_of(kGroups[number]);
      std::vector<QuantisedWeight> weights;
      GroupBiases biases;
      for (size_t i = 0; i < groups.count(); ++i) {
        weights.push_back(draw(bits, group, byte_inputs));
        if (has_biases) biases.push_back(draw(kColumns, dtype));
      }
      const Numbers x(dtype, groups.num_rows() * kDepth, random_);
      Bytes expected = output_of(groups, dtype), output = expected;
      const QuantisedLinear alone(Parallel(), *GetParam());
      for (size_t i = 0; i < groups.count(); ++i) {
        LinearCall layer = rows_from(layer_of(x, expected.data()), groups.begin(i), dtype);
        layer.bias = has_biases ? biases[i] : nullptr;
        alone.forward(dtype, layer, weights[i], groups.rows(i), 1);
      }
      const QuantisedLinear threads(Parallel(&start_threads), *GetParam());
      threads.forward_groups(dtype, layer_of(x, output.data()), weights, biases, groups, 3);
      EXPECT_EQ(output, expected) << bits << " bits, " << groups.count() << " groups";
    }
  }

  std::mt19937 random_{11};
  std::vector<std::unique_ptr<Numbers>> numbers_;
  std::vector<std::unique_ptr<int32_t[]>> sums_;
};

TEST_P(QuantisedGroups, bytes_times_bytes) {
  expect_bits_of_single_calls(8, 0, true, DType::kFloat32);
  expect_bits_of_single_calls(8, 0, true, DType::kBFloat16);
}

TEST_P(QuantisedGroups, nibbles_times_numbers) {
  expect_bits_of_single_calls(4, 32, false, DType::kFloat32);
  expect_bits_of_single_calls(4, 32, false, DType::kBFloat16);
}

TEST_P(QuantisedGroups, nibbles_times_bytes) {
  expect_bits_of_single_calls(4, 32, true, DType::kBFloat16);
}

INSTANTIATE_TEST_SUITE_P(All, QuantisedGroups, testing::ValuesIn(testable_quantised()),
                         [](const auto& info) { return std::string(info.param->name); });

class PlainGroups : public testing::TestWithParam<const Isa*> {};

TEST_P(PlainGroups, are_the_bits_of_single_calls) {
  std::mt19937 random(12);
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& rows : kGroups) {
      const RowGroups groups = groups_of(rows);
      std::vector<std::unique_ptr<Numbers>> weights;
      std::vector<const void*> panels;
      GroupBiases biases;
      for (size_t i = 0; i < groups.count(); ++i) {
        weights.push_back(std::make_unique<Numbers>(dtype, kPadded * kDepth, random));
        panels.push_back(weights.back()->data());
        weights.push_back(std::make_unique<Numbers>(dtype, kColumns, random));
        biases.push_back(weights.back()->data());
      }
      const Numbers x(dtype, groups.num_rows() * kDepth, random);
      Bytes expected = output_of(groups, dtype), output = expected;
      for (size_t i = 0; i < groups.count(); ++i) {
        LinearCall call = rows_from(layer_of(x, expected.data()), groups.begin(i), dtype);
        call.panels = panels[i];
        call.bias = biases[i];
        Linear(Parallel(), *GetParam()).forward(dtype, call, groups.rows(i), 1);
      }
      Linear(Parallel(&start_threads), *GetParam())
          .forward_groups(dtype, layer_of(x, output.data()), panels, biases, groups, 3);
      EXPECT_EQ(output, expected) << groups.count() << " groups";
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, PlainGroups, testing::ValuesIn(testable_isas()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace vtensor::kernels
