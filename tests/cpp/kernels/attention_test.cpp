// The whole kernel against attention written out in double precision, with every instruction set of
// this machine and on several threads. Python's tests compare with torch; these also run under the
// sanitizers.
#include "kernels/attention/attention.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <iterator>
#include <limits>
#include <random>
#include <stdexcept>
#include <thread>

#include "tests/cpp/kernels/software_tiles/levels.h"

namespace vtensor::kernels {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// What GOMP_parallel does, with fresh threads.
void start_threads(void (*fn)(void*), void* data, unsigned num_threads, unsigned /*flags*/) {
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < num_threads; ++i) threads.emplace_back(fn, data);
  fn(data);
  for (std::thread& thread : threads) thread.join();
}

// Runtimes may give fewer threads than asked for: under a thread limit, or inside another region.
void start_half(void (*fn)(void*), void* data, unsigned num_threads, unsigned flags) {
  start_threads(fn, data, (num_threads + 1) / 2, flags);
}

void start_none(void (*fn)(void*), void* data, unsigned /*num_threads*/, unsigned /*flags*/) {
  fn(data);
}

struct Model {
  int num_kv_heads;
  int group;
  int key_dim;
  int value_dim;
  int num_heads() const { return num_kv_heads * group; }
};

// Two interleaved layers, of which the second is used; all tokens NaN until written.
class Arena {
 public:
  Arena(const Model& model, int64_t num_slots, int64_t max_seq_len) {
    const int64_t keys = int64_t{model.num_kv_heads} * model.key_dim;
    const int64_t both = keys + int64_t{model.num_kv_heads} * model.value_dim;
    shape_ = {DType::kFloat32,
              num_slots,
              max_seq_len,
              model.num_kv_heads,
              model.key_dim,
              model.value_dim,
              {2 * both * max_seq_len, 2 * both, model.key_dim},
              {2 * both * max_seq_len, 2 * both, model.value_dim}};
    data_.assign(static_cast<size_t>(num_slots * shape_.k.slot), kNan);
    float* data = data_.data();
    layers_ = {{data, data + keys}, {data + both, data + both + keys}};
  }
  const ArenaShape& shape() const { return shape_; }
  const std::vector<LayerArena>& layers() const { return layers_; }
  float* k(int64_t slot, int64_t token, int head) {
    return at(layers_[1].k, shape_.k, slot, token, head);
  }
  float* v(int64_t slot, int64_t token, int head) {
    return at(layers_[1].v, shape_.v, slot, token, head);
  }

 private:
  static float* at(void* base, const Strides& strides, int64_t slot, int64_t token, int head) {
    return static_cast<float*>(base) + slot * strides.slot + token * strides.token +
           head * strides.head;
  }
  ArenaShape shape_;
  std::vector<float> data_;
  std::vector<LayerArena> layers_;
};

struct Inputs {
  Inputs(const Model& model, int64_t num_tokens, std::mt19937& random) : model(model) {
    std::normal_distribution<float> normal;
    const auto fill = [&](std::vector<float>& values, int heads, int width) {
      values.resize(static_cast<size_t>(num_tokens * heads * width));
      for (float& value : values) value = normal(random);
    };
    fill(query, model.num_heads(), model.key_dim);
    fill(key, model.num_kv_heads, model.key_dim);
    fill(value, model.num_kv_heads, model.value_dim);
    output.resize(static_cast<size_t>(num_tokens * model.num_heads() * model.value_dim));
  }
  // Token-major, as projections make them.
  LayerInputs of() {
    const auto rows = [&](const std::vector<float>& values, int heads, int width) {
      return TokenRows{values.data(), width, int64_t{heads} * width};
    };
    LayerInputs inputs;
    inputs.query = rows(query, model.num_heads(), model.key_dim);
    inputs.key = rows(key, model.num_kv_heads, model.key_dim);
    inputs.value = rows(value, model.num_kv_heads, model.value_dim);
    inputs.output = output.data();
    inputs.scaling = 0.2F;
    return inputs;
  }
  Model model;
  std::vector<float> query, key, value, output;
};

// One row of the output, from the arena after the step.
std::vector<double> slow_row(Arena& arena, const Inputs& inputs, const Segment& segment,
                             int64_t position, int head, const PlanOptions& options) {
  const Model& model = inputs.model;
  const int64_t token = segment.row + position - segment.start;
  const float* q = inputs.query.data() + (token * model.num_heads() + head) * model.key_dim;
  const int kv_head = head / model.group;
  std::vector<double> out(static_cast<size_t>(model.value_dim));
  double sum = 0;
  const int64_t first = std::max<int64_t>(position - position % options.chunk, 0);
  for (int64_t key = std::max(first, position + 1 - options.window); key <= position; ++key) {
    const float* k = arena.k(segment.slot, key, kv_head);
    const float* v = arena.v(segment.slot, key, kv_head);
    double score = 0;
    for (int i = 0; i < model.key_dim; ++i) score += double{q[i]} * k[i];
    const double weight = std::exp(0.2 * score);
    sum += weight;
    for (double& value : out) value += weight * *v++;
  }
  for (double& value : out) value /= sum;
  return out;
}

// However many threads come, by each of `starts`, the outputs are those of attention written out.
void check(const Model& model, const std::vector<Segment>& segments,
           const std::vector<SharedRange>& shared, const PlanOptions& options, const Isa& isa,
           std::initializer_list<Parallel::Start> starts = {start_threads}) {
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  Arena arena(model, 4, 900);
  for (const Segment& segment : segments) {
    for (int64_t token = 0; token < segment.start; ++token) {
      for (int i = 0; i < model.num_kv_heads * model.key_dim; ++i) {
        arena.k(segment.slot, token, 0)[i] = normal(random);
      }
      for (int i = 0; i < model.num_kv_heads * model.value_dim; ++i) {
        arena.v(segment.slot, token, 0)[i] = normal(random);
      }
    }
  }
  for (const SharedRange& range : shared) {
    for (const int64_t member : range.members) {
      const int64_t slot = segments[static_cast<size_t>(member)].slot;
      for (int64_t token = range.start; token < range.end; ++token) {
        const int heads = model.num_kv_heads;
        std::copy_n(arena.k(range.slot, token, 0), heads * model.key_dim, arena.k(slot, token, 0));
        std::copy_n(arena.v(range.slot, token, 0), heads * model.value_dim,
                    arena.v(slot, token, 0));
      }
    }
  }
  const Plan plan(segments, shared, options);
  Inputs inputs(model, plan.num_tokens(), random);
  std::vector<std::vector<float>> outputs;
  for (const Parallel::Start start : starts) {
    HostAttention attention(arena.shape(), arena.layers(), Parallel(start), isa);
    std::fill(inputs.output.begin(), inputs.output.end(), kNan);
    for (const Segment& segment : segments) {
      for (int64_t token = segment.start; token < segment.end; ++token) {
        std::fill_n(arena.k(segment.slot, token, 0), model.num_kv_heads * model.key_dim, kNan);
        std::fill_n(arena.v(segment.slot, token, 0), model.num_kv_heads * model.value_dim, kNan);
      }
    }
    attention.forward(plan, 1, inputs.of());
    outputs.push_back(inputs.output);
  }
  for (const Segment& segment : segments) {
    for (int64_t position = segment.start; position < segment.end; ++position) {
      const int64_t token = segment.row + position - segment.start;
      for (int head = 0; head < model.num_heads(); ++head) {
        const auto expected = slow_row(arena, inputs, segment, position, head, options);
        const auto at = static_cast<size_t>((token * model.num_heads() + head) * model.value_dim);
        for (const std::vector<float>& output : outputs) {
          for (size_t i = 0; i < expected.size(); ++i) {
            ASSERT_NEAR(output[at + i], expected[i], 2e-5) << isa.name << " token " << token;
          }
        }
      }
    }
  }
}

class HostAttentionIsas : public testing::TestWithParam<const Isa*> {};

TEST_P(HostAttentionIsas, mixed_batch_on_threads_equals_attention_written_out) {
  const Model model{2, 3, 48, 48};
  const std::vector<Segment> segments = {
      {2, 0, 700, 701}, {0, 1, 0, 1}, {1, 2, 530, 531}, {3, 3, 130, 190}};
  for (const int num_threads : {1, 3}) {
    for (const int64_t window : {kNoWindow, int64_t{300}}) {
      check(model, segments, {}, {window, 3, 2, num_threads}, *GetParam());
    }
  }
}

TEST_P(HostAttentionIsas, nested_shared_ranges_equal_attention_written_out) {
  const Model model{1, 4, 64, 64};
  const std::vector<Segment> segments = {
      {0, 0, 600, 601}, {1, 1, 512, 513}, {2, 2, 700, 702}, {3, 4, 256, 257}};
  const std::vector<SharedRange> shared = {{3, 0, 256, {0, 1, 2, 3}}, {1, 256, 512, {0, 1, 2}}};
  for (const int num_threads : {1, 3}) {
    check(model, segments, shared, {kNoWindow, 4, 1, num_threads}, *GetParam());
    check(model, segments, shared, {400, 4, 1, num_threads}, *GetParam());
  }
}

TEST_P(HostAttentionIsas, random_batches_do_not_depend_on_how_many_threads_come) {
  std::mt19937 random(3);
  const auto pick = [&](std::initializer_list<int64_t> choices) {
    return choices.begin()[std::uniform_int_distribution<size_t>(0, choices.size() - 1)(random)];
  };
  for (int round = 0; round < 10; ++round) {
    const Model model{static_cast<int>(pick({1, 2})), static_cast<int>(pick({1, 3, 8})),
                      static_cast<int>(pick({16, 48, 64, 192})),
                      static_cast<int>(pick({16, 64, 128}))};
    std::vector<Segment> segments;
    SharedRange range{0, 0, pick({100, 256, 500}), {}};
    int64_t row = 0;
    for (const int64_t slot : {2, 0, 3, 1}) {
      const int64_t start = pick({0, 7, 300, 520, 780}), count = pick({1, 1, 3, 40});
      if (start >= range.end) range.members.push_back(std::ssize(segments));
      segments.push_back({slot, row, start, start + count});
      row += count;
    }
    std::vector<SharedRange> shared;
    if (range.members.size() > 1) {
      range.slot = segments[static_cast<size_t>(range.members.back())].slot;
      shared.push_back(range);
    }
    const PlanOptions options{pick({kNoWindow, 1, 290}), model.group, model.num_kv_heads,
                              static_cast<int>(pick({1, 2, 5})), pick({kNoWindow, 64, 300})};
    check(model, segments, shared, options, *GetParam(), {start_threads, start_half, start_none});
  }
}

// The arena ends with the last token of its last slot, and holds nothing else: an address sanitizer
// sees a read beyond it.
std::vector<float> bfloat16_output(const Isa& isa, int head_dim, int64_t num_new, int64_t window) {
  constexpr int64_t kTokens = 300, kGroup = 4;
  const int64_t past = kTokens - num_new;
  std::mt19937 random(11);
  const auto random_rows = [&](int64_t rows) {
    std::normal_distribution<float> normal;
    std::vector<uint16_t> values(static_cast<size_t>(rows * head_dim));
    for (uint16_t& value : values) {
      value = static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
    }
    return values;
  };
  std::vector<uint16_t> k = random_rows(kTokens), v = random_rows(kTokens);
  const std::vector<uint16_t> query = random_rows(num_new * kGroup);
  const std::vector<uint16_t> key = random_rows(num_new), value = random_rows(num_new);
  std::vector<uint16_t> output(query.size());
  const Strides strides{kTokens * head_dim, head_dim, head_dim};
  const ArenaShape shape{DType::kBFloat16, 1, kTokens, 1, head_dim, head_dim, strides, strides};
  HostAttention attention(shape, {{k.data(), v.data()}}, Parallel(start_threads), isa);
  const LayerInputs inputs{{query.data(), head_dim, kGroup * head_dim},
                           {key.data(), 0, head_dim},
                           {value.data(), 0, head_dim},
                           output.data(),
                           0.2F,
                           0,
                           nullptr};
  attention.forward(Plan({{0, 0, past, kTokens}}, {}, {window, kGroup, 1, 3}), 0, inputs);
  std::vector<float> wide;
  for (const uint16_t x : output) wide.push_back(std::bit_cast<float>(uint32_t{x} << 16));
  return wide;
}

TEST_P(HostAttentionIsas, bfloat16_equals_the_portable_level) {
  for (const int head_dim : {32, 48, 128}) {
    for (const int64_t num_new : {1, 2, 33, 300}) {
      for (const int64_t window : {kNoWindow, int64_t{70}}) {
        const auto expected = bfloat16_output(find_isa("portable"), head_dim, num_new, window);
        const auto output = bfloat16_output(*GetParam(), head_dim, num_new, window);
        for (size_t i = 0; i < output.size(); ++i) {
          ASSERT_NEAR(output[i], expected[i], 2.5e-2 * (1 + std::abs(expected[i]))) << head_dim;
        }
      }
    }
  }
}

TEST(HostAttention, head_sizes_that_no_vector_fits_are_refused) {
  for (const auto& [key_dim, value_dim] : {std::pair{8, 16}, {16, 40}, {592, 64}}) {
    const Arena arena({1, 1, key_dim, value_dim}, 1, 4);
    EXPECT_THROW(HostAttention(arena.shape(), arena.layers(), Parallel(), find_isa("")),
                 std::invalid_argument);
  }
}

// A layer that reads another's KV stores none; values that are a part of the keys (a latent) are
// stored with them.
TEST_P(HostAttentionIsas, what_stands_in_the_arena_is_not_stored_again) {
  constexpr int kWide = 576, kLatent = 512, kTokens = 3;
  std::mt19937 random(5);
  const Model model{1, 2, kWide, kLatent};
  std::vector<float> arena(kTokens * kWide, kNan);
  const Strides strides{kTokens * kWide, kWide, kWide};
  const ArenaShape shape{DType::kFloat32, 1, kTokens, 1, kWide, kLatent, strides, strides};
  HostAttention attention(shape, {{arena.data(), arena.data()}}, Parallel(), *GetParam());
  const Plan plan({{0, 0, 0, kTokens}}, {}, {kNoWindow, 2, 1, 1});
  Inputs inputs(model, kTokens, random);
  LayerInputs latent = inputs.of();
  latent.value.data = nullptr;
  attention.forward(plan, 0, latent);
  EXPECT_EQ(arena, inputs.key);
  const std::vector<float> first = inputs.output;
  LayerInputs reader = inputs.of();
  reader.key.data = reader.value.data = nullptr;
  attention.forward(plan, 0, reader);
  EXPECT_EQ(inputs.output, first);
  for (int i = 0; i < kLatent; ++i) EXPECT_FLOAT_EQ(first[static_cast<size_t>(i)], inputs.key[i]);
}

INSTANTIATE_TEST_SUITE_P(All, HostAttentionIsas, testing::ValuesIn(testable_isas()),
                         [](const auto& info) { return std::string(info.param->name); });

TEST(HostAttention, a_plan_outside_of_the_arena_is_refused_before_anything_is_written) {
  const Model model{1, 1, 16, 32};
  Arena arena(model, 2, 8);
  std::mt19937 random(1);
  Inputs inputs(model, 1, random);
  HostAttention attention(arena.shape(), arena.layers(), Parallel(), find_isa(""));
  for (const Segment& outside : {Segment{2, 0, 3, 4}, Segment{0, 0, 8, 9}}) {
    EXPECT_THROW(attention.forward(Plan({outside}, {}, {}), 1, inputs.of()), std::invalid_argument);
  }
  EXPECT_THROW(attention.forward(Plan({{0, 0, 3, 4}}, {}, {}), 2, inputs.of()),
               std::invalid_argument);
  LayerInputs unscaled = inputs.of();
  unscaled.scaling = 0;
  EXPECT_THROW(attention.forward(Plan({{0, 0, 3, 4}}, {}, {}), 1, unscaled), std::invalid_argument);
  EXPECT_TRUE(std::isnan(*arena.k(0, 3, 0)));
}

TEST(Isa, names_find_them_and_wrong_ones_name_the_choices) {
  for (const Isa* isa : available_isas()) EXPECT_EQ(&find_isa(isa->name), isa);
  try {
    find_isa("mmx");
    FAIL();
  } catch (const std::invalid_argument& error) {
    EXPECT_NE(std::string(error.what()).find("portable"), std::string::npos);
  }
}

}  // namespace
}  // namespace vtensor::kernels
