#include "kernels/attention/attention.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>

namespace vtensor::kernels {
namespace {

// Less work than this, in Plan::cost() units, is not worth waking another thread.
constexpr double kCostPerThread = 4000;
// Keys of a token that are read in one go: shorter pieces, far apart, come at half of the memory's
// speed.
constexpr size_t kRunBytes = 1024;
constexpr size_t kUnitsPerThread = 4;

char* at(void* base, int64_t elements, size_t element_bytes) {
  return static_cast<char*>(base) + elements * static_cast<int64_t>(element_bytes);
}

const char* at(const void* base, int64_t elements, size_t element_bytes) {
  return static_cast<const char*>(base) + elements * static_cast<int64_t>(element_bytes);
}

}  // namespace

float* HostAttention::Buffer::reserve(size_t num_floats) {
  if (num_floats > size_) {
    data_.reset(
        static_cast<float*>(::operator new[](num_floats * sizeof(float), std::align_val_t{64})));
    size_ = num_floats;
  }
  return data_.get();
}

// One layer of one step. Threads draw units of work, a task and neighbouring head blocks each,
// until none is left.
class HostAttention::LayerRun {
 public:
  LayerRun(HostAttention& owner, const Plan& plan, const LayerArena& arena,
           const LayerInputs& inputs, int num_threads)
      : owner_(owner),
        plan_(plan),
        shape_(owner.shape_),
        arena_(arena),
        inputs_(inputs),
        bytes_(element_bytes(owner.shape_.dtype)),
        stored_bytes_(is_plain() ? bytes_ : 1),
        num_threads_(num_threads),
        num_alone_(plan.num_tasks_of_many_rows() * plan.head_blocks().size()),
        side_by_side_(blocks_side_by_side()),
        num_units_(num_alone_ + num_tasks_of_few_rows() * units_per_task()),
        scratch_floats_(scratch_floats(owner.shape_.key_dim, owner.shape_.value_dim)) {
    call_.query = inputs.query.data;
    call_.query_head_stride = inputs.query.head_stride;
    call_.query_token_stride = inputs.query.token_stride;
    call_.output = inputs.output;
    call_.num_heads = plan.options().group * plan.options().num_kv_heads;
    call_.key_dim = shape_.key_dim;
    call_.value_dim = shape_.value_dim;
    call_.scaling = inputs.scaling;
    call_.softcap = inputs.softcap;
    call_.sinks = inputs.sinks;
    call_.positions = plan.positions().data();
    call_.firsts = plan.firsts().data();
    scratch_ = owner.scratch_.reserve(scratch_floats_ * static_cast<size_t>(num_threads));
    partial_stride_ = static_cast<int64_t>(call_.num_heads) * (shape_.value_dim + kPartialTail);
    partials_ = owner.partials_.reserve(static_cast<size_t>(plan.num_partials() * partial_stride_));
    count_pending();
  }

  void store_first() {
    auto work = [this] {
      const std::vector<PlannedStore>& stores = plan_.stored_first();
      for (size_t i = next_++; i < stores.size(); i = next_++) {
        store(stores[i], 0, shape_.num_kv_heads);
      }
    };
    owner_.parallel_.run(num_threads_, work);
    next_ = 0;
  }

  void attend() {
    auto work = [this] {
      float* scratch = scratch_ + scratch_floats_ * next_thread_++;
      for (size_t unit = next_++; unit < num_units_;) {
        const size_t following = draw_ahead();
        compute(unit, following, scratch);
        unit = following < num_units_ ? following : next_++;
      }
    };
    owner_.parallel_.run(num_threads_, work);
  }

 private:
  size_t dtype() const { return static_cast<size_t>(shape_.dtype); }
  size_t format() const { return static_cast<size_t>(shape_.format); }
  bool is_plain() const { return shape_.format == KVFormat::kPlain; }

  size_t num_tasks_of_few_rows() const {
    return plan_.tasks().size() - plan_.num_tasks_of_many_rows();
  }

  // One where a head has several blocks, or threads would go short.
  size_t blocks_side_by_side() const {
    if (!plan_.has_one_block_a_head()) return 1;
    const size_t key_bytes = static_cast<size_t>(shape_.key_dim) * stored_bytes_;
    const size_t wanted = kUnitsPerThread * static_cast<size_t>(num_threads_);
    const size_t affordable = num_tasks_of_few_rows() * plan_.head_blocks().size() / wanted;
    return std::clamp<size_t>(std::min(kRunBytes / key_bytes, affordable), 1, kMaxSideBySide);
  }

  // Of few rows.
  size_t units_per_task() const {
    return (plan_.head_blocks().size() + side_by_side_ - 1) / side_by_side_;
  }

  void count_pending() {
    if (plan_.num_partials() == 0) return;
    const size_t blocks = plan_.head_blocks().size();
    owner_.pending_.resize(static_cast<size_t>(plan_.num_tokens()) * blocks);
    for (int64_t token = 0; token < plan_.num_tokens(); ++token) {
      const auto count = plan_.partials_of(static_cast<int32_t>(token)).size();
      std::fill_n(owner_.pending_.begin() + token * static_cast<int64_t>(blocks), blocks,
                  static_cast<int32_t>(count));
    }
  }

  // New keys and values, of KV heads [head, head + num_heads).
  void store(const PlannedStore& tokens, int head, int num_heads) {
    const Isa& isa = *owner_.isa_;
    store_rows(tokens, head, num_heads, inputs_.key, arena_.k, shape_.k, shape_.key_dim,
               isa.quantise_key[format()][dtype()]);
    store_rows(tokens, head, num_heads, inputs_.value, arena_.v, shape_.v, shape_.value_dim,
               isa.quantise_value[format()][dtype()]);
  }

  // Token by token, whose heads are neighbours in the arena.
  void store_rows(const PlannedStore& tokens, int head, int num_heads, const TokenRows& rows,
                  void* arena, const Strides& strides, int width, Isa::Quantise quantise) {
    if (rows.data == nullptr) return;
    const Segment& segment = plan_.segments()[static_cast<size_t>(tokens.segment)];
    const bool in_one = is_plain() && strides.head == width && rows.head_stride == width;
    const int step = in_one ? num_heads : 1;
    for (int64_t i = tokens.first; i < tokens.first + tokens.count; ++i) {
      const int64_t to = segment.slot * strides.slot + (segment.start + i) * strides.token;
      const int64_t from = (segment.row + i) * rows.token_stride;
      for (int h = head; h < head + num_heads; h += step) {
        const char* numbers = at(rows.data, from + h * rows.head_stride, bytes_);
        char* place = at(arena, to + h * strides.head, stored_bytes_);
        if (is_plain()) {
          std::memcpy(place, numbers, static_cast<size_t>(step * width) * bytes_);
        } else {
          quantise(numbers, place, width);
        }
      }
    }
  }

  // The unit that this thread will compute after the one that it has; none at the end, where other
  // threads may be free before.
  size_t draw_ahead() {
    return next_.load() + static_cast<size_t>(num_threads_) < num_units_ ? next_++ : num_units_;
  }

  // Head blocks [first_block, last_block) of a task: one, or as many as are read in one go.
  struct Unit {
    const PlannedTask& task;
    size_t first_block, last_block;
  };

  Unit unit_at(size_t index) const {
    const size_t blocks = plan_.head_blocks().size();
    if (index < num_alone_) {
      const size_t block = index % blocks;
      return {plan_.tasks()[index / blocks], block, block + 1};
    }
    const size_t of_few = index - num_alone_;
    const size_t first = of_few % units_per_task() * side_by_side_;
    return {plan_.tasks()[plan_.num_tasks_of_many_rows() + of_few / units_per_task()], first,
            std::min(first + side_by_side_, blocks)};
  }

  // `following` as in draw_ahead.
  void compute(size_t index, size_t following, float* scratch) {
    const Unit unit = unit_at(index);
    AttendTask tasks[kMaxSideBySide];
    for (size_t block = unit.first_block; block < unit.last_block; ++block) {
      const HeadBlock& heads = plan_.head_blocks()[block];
      if (unit.task.stores_segment >= 0) store({unit.task.stores_segment}, heads.kv_head, 1);
      tasks[block - unit.first_block] = task_of(unit.task, heads);
    }
    AttendTask later;
    if (following < num_units_) {
      const Unit next = unit_at(following);
      later = task_of(next.task, plan_.head_blocks()[next.first_block]);
    }
    const auto num_tasks = static_cast<int>(unit.last_block - unit.first_block);
    owner_.isa_->attend[format()][dtype()](call_, tasks, num_tasks,
                                           following < num_units_ ? &later : nullptr, scratch);
    if (unit.task.partial < 0) return;
    for (size_t block = unit.first_block; block < unit.last_block; ++block) {
      merge_complete(tasks[block - unit.first_block], block);
    }
  }

  AttendTask task_of(const PlannedTask& planned, const HeadBlock& heads) const {
    const auto base = [&](const Strides& strides) {
      return planned.slot * strides.slot + heads.kv_head * strides.head;
    };
    AttendTask task;
    task.tokens = plan_.task_tokens().data() + planned.first_token;
    task.num_tokens = planned.num_tokens;
    task.first_head = heads.first_head;
    task.num_heads = heads.num_heads;
    task.k = at(arena_.k, base(shape_.k), stored_bytes_);
    task.v = at(arena_.v, base(shape_.v), stored_bytes_);
    task.k_stride = shape_.k.token;
    task.v_stride = shape_.v.token;
    task.begin = planned.begin;
    task.end = planned.end;
    if (planned.partial >= 0) task.partial = partials_ + planned.partial * partial_stride_;
    return task;
  }

  // Merges the tokens of `task` whose last missing partial result this was.
  void merge_complete(const AttendTask& task, size_t block) {
    const size_t blocks = plan_.head_blocks().size();
    for (int i = 0; i < task.num_tokens; ++i) {
      const int32_t token = task.tokens[i];
      std::atomic_ref missing(owner_.pending_[static_cast<size_t>(token) * blocks + block]);
      if (missing.fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
      const std::span<const int32_t> rows = plan_.partials_of(token);
      const MergeTask merge = {partials_, rows.data(),     static_cast<int>(rows.size()),
                               token,     task.first_head, task.num_heads};
      owner_.isa_->merge[dtype()](call_, merge);
    }
  }

  HostAttention& owner_;
  const Plan& plan_;
  const ArenaShape& shape_;
  const LayerArena& arena_;
  const LayerInputs& inputs_;
  LayerCall call_;
  size_t bytes_;         // of a number that comes
  size_t stored_bytes_;  // of one in the arena
  int num_threads_;
  size_t num_alone_;     // units of one block, of tasks of many rows; the others follow
  size_t side_by_side_;  // blocks of a unit of theirs
  size_t num_units_;
  size_t scratch_floats_;
  float* scratch_;
  float* partials_;
  int64_t partial_stride_;
  std::atomic<size_t> next_{0};
  std::atomic<size_t> next_thread_{0};
};

HostAttention::HostAttention(const ArenaShape& shape, std::vector<LayerArena> layers,
                             Parallel parallel, const Isa& isa)
    : shape_(shape), layers_(std::move(layers)), parallel_(parallel), isa_(&isa) {
  for (const int width : {shape.key_dim, shape.value_dim}) {
    if (width >= 1 && width <= kMaxHeadDim && width % kHeadDimStep == 0) continue;
    throw std::invalid_argument("the host kernel takes head sizes that are multiples of " +
                                std::to_string(kHeadDimStep) + " up to " +
                                std::to_string(kMaxHeadDim) + ", got " + std::to_string(width));
  }
}

void HostAttention::forward(const Plan& plan, size_t layer, const LayerInputs& inputs) {
  check(plan, layer);
  if (!(inputs.scaling > 0)) {
    throw std::invalid_argument("scaling must be positive, got " + std::to_string(inputs.scaling));
  }
  const int num_threads = threads_for(plan);
  LayerRun run(*this, plan, layers_[layer], inputs, num_threads);
  const bool stores = inputs.key.data != nullptr || inputs.value.data != nullptr;
  if (stores && !plan.stored_first().empty()) run.store_first();
  run.attend();
}

void HostAttention::check(const Plan& plan, size_t layer) const {
  if (layer >= layers_.size()) {
    throw std::invalid_argument("layer " + std::to_string(layer) + " of " +
                                std::to_string(layers_.size()));
  }
  if (plan.options().num_kv_heads != shape_.num_kv_heads || plan.num_slots() > shape_.num_slots ||
      plan.max_seq_len() > shape_.max_seq_len) {
    throw std::invalid_argument(
        "the plan does not fit the arena: " + std::to_string(plan.options().num_kv_heads) +
        " KV heads, slot " + std::to_string(plan.num_slots() - 1) + ", " +
        std::to_string(plan.max_seq_len()) + " tokens");
  }
}

int HostAttention::threads_for(const Plan& plan) const {
  if (!parallel_.can_fork()) return 1;
  const double work = plan.cost() * static_cast<double>(plan.head_blocks().size());
  const auto worth = 1 + static_cast<int64_t>(std::min(work / kCostPerThread, 1e6));
  const auto units = static_cast<int64_t>(plan.tasks().size() * plan.head_blocks().size());
  const int64_t num_threads = std::min({worth, units, int64_t{plan.options().num_threads}});
  return static_cast<int>(std::max<int64_t>(num_threads, 1));
}

}  // namespace vtensor::kernels
