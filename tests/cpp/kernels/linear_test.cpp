// Linear layers against products in double precision, with every instruction set of this machine
// and with AMX's kernels on tiles in software. Arrays end where their numbers do: an address
// sanitizer sees a read beyond them. Python's tests compare with torch.
#include "kernels/linear/linear.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <random>

#include "tests/cpp/kernels/software_tiles/levels.h"

namespace vtensor::kernels {
namespace {

struct Shape {
  int64_t rows;
  int64_t depth;
  int64_t columns;
  DType dtype;
  bool has_residual;
  bool gates;
};

class Numbers {
 public:
  Numbers(DType dtype, int64_t count)
      : bytes_(static_cast<int64_t>(element_bytes(dtype))),
        data_(static_cast<char*>(
            ::operator new[](static_cast<size_t>(count * bytes_), std::align_val_t{64}))) {
    std::memset(data_.get(), 0, static_cast<size_t>(count * bytes_));
  }

  void* data() const { return data_.get(); }
  double operator[](int64_t i) const {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + 4 - bytes_, data_.get() + i * bytes_,
                static_cast<size_t>(bytes_));
    return std::bit_cast<float>(bits);
  }
  void set(int64_t i, double value) {
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(value));
    std::memcpy(data_.get() + i * bytes_, reinterpret_cast<const char*>(&bits) + 4 - bytes_,
                static_cast<size_t>(bytes_));
  }

 private:
  struct FreeAligned {
    void operator()(char* p) const { ::operator delete[](p, std::align_val_t{64}); }
  };
  int64_t bytes_;
  std::unique_ptr<char[], FreeAligned> data_;
};

class LinearIsas : public testing::TestWithParam<const Isa*> {
 protected:
  void expect_products(const Shape& s) {
    SCOPED_TRACE(testing::Message() << s.rows << " rows, " << s.depth << " inputs, " << s.columns
                                    << " outputs, " << element_bytes(s.dtype) << " bytes, residual "
                                    << s.has_residual << ", gates " << s.gates);
    const Linear linear(Parallel(), *GetParam());
    const int64_t width = linear.panel_columns(s.dtype), pair = s.dtype == DType::kFloat32 ? 1 : 2;
    const int64_t panels = (s.columns + width - 1) / width;
    const int64_t written = s.gates ? s.columns / 2 : s.columns;
    std::mt19937 random(1);
    std::normal_distribution<double> normal;
    const auto draw = [&](int64_t count) {
      Numbers numbers(s.dtype, count);
      for (int64_t i = 0; i < count; ++i) numbers.set(i, normal(random));
      return numbers;
    };
    const Numbers x = draw(s.rows * s.depth), weight = draw(s.columns * s.depth);
    const Numbers bias = draw(s.columns), residual = draw(s.rows * s.columns);
    Numbers packed(s.dtype, panels * width * s.depth), output(s.dtype, s.rows * written);
    for (int64_t column = 0; column < s.columns; ++column) {
      for (int64_t k = 0; k < s.depth; ++k) {
        const int64_t row = (column / width * s.depth + k / pair * pair) * width;
        packed.set(row + column % width * pair + k % pair, weight[column * s.depth + k]);
      }
    }
    LinearCall call;
    call.x = x.data();
    call.panels = packed.data();
    call.bias = bias.data();
    call.residual = s.has_residual ? residual.data() : nullptr;
    call.output = output.data();
    call.x_stride = call.depth = s.depth;
    call.residual_stride = call.columns = s.columns;
    call.output_stride = written;
    call.gates = s.gates;
    linear.forward(s.dtype, call, s.rows, 1);
    const auto sum = [&](int64_t row, int64_t column) {
      double value = bias[column] + (s.has_residual ? residual[row * s.columns + column] : 0);
      for (int64_t k = 0; k < s.depth; ++k)
        value += x[row * s.depth + k] * weight[column * s.depth + k];
      return value;
    };
    // A gate's error is multiplied by its factor.
    const double bound = s.dtype != DType::kFloat32 ? 2e-2 : s.gates ? 1e-4 : 2e-5;
    for (int64_t i = 0; i < s.rows * written; ++i) {
      const int64_t row = i / written, column = i % written;
      double expected = sum(row, column);
      if (s.gates) expected *= sum(row, written + column) / (1 + std::exp(-expected));
      ASSERT_NEAR(output[i], expected, bound * (1 + std::abs(expected))) << row << " " << column;
    }
  }
};

// Around the heights of tiles and blocks, and where the kernels for many rows begin.
TEST_P(LinearIsas, outputs_are_the_products) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t rows : {1, 7, 16, 17, 32, 45, 49, 65, 80}) {
      expect_products({rows, 96, 80, dtype, rows % 2 == 0, false});
    }
    expect_products({70, 1088, 48, dtype, true, false});
  }
}

TEST_P(LinearIsas, gates_are_multiplied_with_their_factors) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    if (!Linear(Parallel(), *GetParam()).has_gates(dtype, 96)) continue;
    for (const int64_t rows : {32, 50, 70}) {
      expect_products({rows, 96, 256, dtype, false, true});
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, LinearIsas, testing::ValuesIn(testable_isas()),
                         [](const auto& info) { return std::string(info.param->name); });

}  // namespace
}  // namespace vtensor::kernels
