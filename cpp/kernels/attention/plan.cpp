#include "kernels/attention/plan.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "kernels/calls/attention.h"

namespace vtensor::kernels {
namespace {

// A segment with more new tokens than this reads shared keys by itself: its own query rows make a
// block that is large enough.
constexpr int64_t kMaxSharingTokens = 16;
// Tasks are not cut below this: each cut writes and merges partial results.
constexpr int64_t kMinKeys = 256;
// What a key costs besides the arithmetic of its query rows.
constexpr double kKeyCost = 6;
constexpr double kTasksPerThread = 4;
// Tokens of a prefill that a thread stores at once.
constexpr int64_t kStoreTokens = 64;
// Slots, positions and rows of a batch are below this; no sum of two of them overflows.
constexpr int64_t kMaxIndex = INT32_MAX;

void require(bool ok, const char* what) {
  if (!ok) throw std::invalid_argument(std::string("attention plan: ") + what);
}

std::vector<HeadBlock> make_head_blocks(const PlanOptions& options) {
  std::vector<HeadBlock> blocks;
  for (int kv_head = 0; kv_head < options.num_kv_heads; ++kv_head) {
    for (int head = 0; head < options.group; head += kMaxBlockHeads) {
      blocks.push_back({kv_head, kv_head * options.group + head,
                        std::min(kMaxBlockHeads, options.group - head)});
    }
  }
  return blocks;
}

}  // namespace

// For each segment the ranges that are computed for it in the chunk-first phase, in order.
struct Plan::Pieces {
  std::vector<std::vector<std::pair<int64_t, int64_t>>> shared;
};

Plan::Plan(std::vector<Segment> segments, const std::vector<SharedRange>& shared,
           const PlanOptions& options, const std::optional<std::vector<int64_t>>& rows)
    : segments_(std::move(segments)), options_(options) {
  require(options.group > 0 && options.num_kv_heads > 0, "no heads");
  require(options.window > 0, "the sliding window must be at least 1");
  require(options.chunk > 0, "a chunk must be at least 1 token");
  head_blocks_ = make_head_blocks(options_);
  block_tokens_ = kMaxRows / std::min(options_.group, kMaxBlockHeads);
  add_positions();
  choose_rows(rows);
  Pieces pieces{std::vector<std::vector<std::pair<int64_t, int64_t>>>(segments_.size())};
  add_shared(shared, pieces);
  add_own(pieces);
  cut_long_tasks();
  sort_tasks();
  number_partials();
  choose_stores();
}

std::span<const int32_t> Plan::partials_of(int32_t token) const {
  const auto begin = static_cast<size_t>(partial_begins_[static_cast<size_t>(token)]);
  const auto end = static_cast<size_t>(partial_begins_[static_cast<size_t>(token) + 1]);
  return std::span(partial_ids_).subspan(begin, end - begin);
}

int64_t Plan::first_visible(int64_t position) const {
  const int64_t in_window = position < options_.window ? 0 : position + 1 - options_.window;
  return std::max(in_window, position / options_.chunk * options_.chunk);
}

double Plan::cost_of(const PlannedTask& task) const {
  const double rows = static_cast<double>(task.num_tokens) * options_.group;
  return static_cast<double>(task.end - task.begin) * (kKeyCost + rows);
}

bool Plan::has_few_rows(const PlannedTask& task) const {
  return task.num_tokens * int64_t{options_.group} <= kMaxFewRows;
}

bool Plan::has_one_block_a_head() const {
  return head_blocks_.size() == static_cast<size_t>(options_.num_kv_heads);
}

void Plan::add_positions() {
  for (const Segment& segment : segments_) {
    require(segment.slot >= 0 && segment.start >= 0 && segment.end > segment.start,
            "a segment has no tokens, or a negative slot or start");
    require(segment.slot < kMaxIndex && segment.end < kMaxIndex &&
                segment.num_tokens() < kMaxIndex - num_tokens(),
            "a slot, a length or the number of tokens is too large");
    require(segment.row == num_tokens(), "the segments are not in the order of the flat batch");
    for (int64_t position = segment.start; position < segment.end; ++position) {
      positions_.push_back(position);
      firsts_.push_back(first_visible(position));
    }
    num_slots_ = std::max(num_slots_, segment.slot + 1);
    max_seq_len_ = std::max(max_seq_len_, segment.end);
  }
}

void Plan::choose_rows(const std::optional<std::vector<int64_t>>& rows) {
  is_wanted_.assign(positions_.size(), rows ? 0 : 1);
  if (!rows) return;
  for (const int64_t row : *rows) {
    require(row >= 0 && row < num_tokens(), "a wanted row is not in the batch");
    is_wanted_[static_cast<size_t>(row)] = 1;
  }
}

std::vector<int32_t> Plan::wanted_tokens(const Segment& segment) const {
  std::vector<int32_t> tokens;
  for (int64_t row = segment.row; row < segment.row + segment.num_tokens(); ++row) {
    if (is_wanted_[static_cast<size_t>(row)] != 0) tokens.push_back(static_cast<int32_t>(row));
  }
  return tokens;
}

void Plan::add_shared(const std::vector<SharedRange>& shared, Pieces& pieces) {
  std::vector<int32_t> tokens;
  for (const SharedRange& range : shared) {
    require(
        range.slot >= 0 && range.slot < kMaxIndex && range.start >= 0 && range.start < range.end,
        "a shared range is empty, negative or of a slot that is too large");
    num_slots_ = std::max(num_slots_, range.slot + 1);
    int64_t begin = range.end;
    std::vector<size_t> members;
    for (const int64_t member : range.members) {
      require(member >= 0 && member < static_cast<int64_t>(segments_.size()),
              "a shared range names a segment that does not exist");
      const Segment& segment = segments_[static_cast<size_t>(member)];
      require(range.end <= segment.start, "a shared range reaches into a member's new tokens");
      const int64_t visible = first_visible(segment.start);
      if (segment.num_tokens() > kMaxSharingTokens || visible >= range.end) continue;
      members.push_back(static_cast<size_t>(member));
      begin = std::min(begin, std::max(range.start, visible));
    }
    if (members.size() < 2) continue;
    tokens.clear();
    for (const size_t member : members) {
      const Segment& segment = segments_[member];
      auto& taken = pieces.shared[member];
      require(taken.empty() || taken.back().second <= range.start,
              "the shared ranges of a segment overlap or are not in order");
      taken.emplace_back(range.start, range.end);
      const std::vector<int32_t> wanted = wanted_tokens(segment);
      tokens.insert(tokens.end(), wanted.begin(), wanted.end());
    }
    add_task(range.slot, begin, range.end, tokens);
  }
}

// What the shared ranges leave of each segment, in blocks of query tokens.
void Plan::add_own(Pieces& pieces) {
  const auto most = static_cast<size_t>(block_tokens_);
  for (size_t i = 0; i < segments_.size(); ++i) {
    const Segment& segment = segments_[i];
    const std::vector<int32_t> wanted = wanted_tokens(segment);
    pieces.shared[i].emplace_back(segment.end, segment.end);
    int64_t begin = 0;
    for (const auto& [taken_begin, taken_end] : pieces.shared[i]) {
      for (size_t first = 0; first < wanted.size(); first += most) {
        const auto tokens = std::span(wanted).subspan(first, std::min(most, wanted.size() - first));
        const int64_t visible = firsts_[static_cast<size_t>(tokens.front())];
        const int64_t last = positions_[static_cast<size_t>(tokens.back())] + 1;
        add_task(segment.slot, std::max(begin, visible), std::min(taken_begin, last), tokens);
      }
      begin = taken_end;
    }
  }
}

// As tasks of at most block_tokens_ tokens. Nothing for an empty range, or no tokens.
void Plan::add_task(int64_t slot, int64_t begin, int64_t end, std::span<const int32_t> tokens) {
  if (begin >= end) return;
  const int64_t count = static_cast<int64_t>(tokens.size());
  for (int64_t first = 0; first < count; first += block_tokens_) {
    PlannedTask task;
    task.slot = slot;
    task.begin = begin;
    task.end = end;
    task.first_token = static_cast<int32_t>(task_tokens_.size());
    task.num_tokens = static_cast<int32_t>(std::min(block_tokens_, count - first));
    const auto block =
        tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(task.num_tokens));
    task_tokens_.insert(task_tokens_.end(), block.begin(), block.end());
    tasks_.push_back(task);
  }
}

// Flash decoding: with few requests, or one that dwarfs the others, threads share a task's keys.
void Plan::cut_long_tasks() {
  for (const PlannedTask& task : tasks_) cost_ += cost_of(task);
  if (options_.num_threads <= 1) return;
  // Each task is done once for each head block, so there are that many times more to share out.
  const double fair = cost_ * static_cast<double>(head_blocks_.size()) /
                      (kTasksPerThread * static_cast<double>(options_.num_threads));
  const double side_by_side =
      has_one_block_a_head() ? std::min(options_.num_kv_heads, kMaxSideBySide) : 1;
  std::vector<PlannedTask> cut;
  for (const PlannedTask& task : tasks_) {
    const int64_t keys = task.end - task.begin;
    const double blocks = has_few_rows(task) ? side_by_side : 1;
    const auto wanted = std::max<int64_t>(std::llround(cost_of(task) * blocks / fair), 1);
    const int64_t parts = std::clamp<int64_t>(keys / kMinKeys, 1, wanted);
    const int64_t step = (keys / parts + kTileTokens - 1) / kTileTokens * kTileTokens;
    for (int64_t begin = task.begin; begin < task.end; begin += parts == 1 ? keys : step) {
      PlannedTask part = task;
      part.begin = begin;
      part.end = parts == 1 ? task.end : std::min(begin + step, task.end);
      cut.push_back(part);
    }
  }
  tasks_ = std::move(cut);
}

void Plan::sort_tasks() {
  std::stable_sort(tasks_.begin(), tasks_.end(),
                   [this](const auto& a, const auto& b) { return cost_of(a) > cost_of(b); });
  const auto few = std::stable_partition(tasks_.begin(), tasks_.end(),
                                         [this](const auto& task) { return !has_few_rows(task); });
  num_many_ = static_cast<size_t>(few - tasks_.begin());
}

void Plan::number_partials() {
  const auto tokens_of = [this](const PlannedTask& task) {
    return std::span(task_tokens_)
        .subspan(static_cast<size_t>(task.first_token), static_cast<size_t>(task.num_tokens));
  };
  std::vector<int32_t> pieces(positions_.size(), 0);
  for (const PlannedTask& task : tasks_) {
    for (const int32_t token : tokens_of(task)) ++pieces[static_cast<size_t>(token)];
  }
  // A task writes either only outputs or only partial results: one partial token makes all so.
  for (PlannedTask& task : tasks_) {
    const auto tokens = tokens_of(task);
    const bool direct = std::all_of(tokens.begin(), tokens.end(), [&](int32_t token) {
      return pieces[static_cast<size_t>(token)] == 1;
    });
    if (direct) continue;
    task.partial = static_cast<int32_t>(num_partials_);
    num_partials_ += task.num_tokens;
  }
  partial_begins_.assign(positions_.size() + 1, 0);
  for (const PlannedTask& task : tasks_) {
    if (task.partial < 0) continue;
    for (const int32_t token : tokens_of(task)) ++partial_begins_[static_cast<size_t>(token) + 1];
  }
  for (size_t i = 0; i < positions_.size(); ++i) partial_begins_[i + 1] += partial_begins_[i];
  partial_ids_.resize(static_cast<size_t>(num_partials_));
  std::vector<int32_t> next(partial_begins_.begin(), partial_begins_.end() - 1);
  for (const PlannedTask& task : tasks_) {
    if (task.partial < 0) continue;
    int32_t row = task.partial;
    for (const int32_t token : tokens_of(task)) {
      partial_ids_[static_cast<size_t>(next[static_cast<size_t>(token)]++)] = row++;
    }
  }
}

// A decode's new key is read by one task a head block, which can store it first, in cache.
void Plan::choose_stores() {
  std::vector<int32_t> segment_of(positions_.size(), -1);
  for (size_t i = 0; i < segments_.size(); ++i) {
    const auto row = static_cast<size_t>(segments_[i].row);
    if (has_one_block_a_head() && segments_[i].num_tokens() == 1 && is_wanted_[row] != 0) {
      segment_of[row] = static_cast<int32_t>(i);
      continue;
    }
    for (int64_t first = 0; first < segments_[i].num_tokens(); first += kStoreTokens) {
      const int64_t left = segments_[i].num_tokens() - first;
      stored_first_.push_back({static_cast<int32_t>(i), first, std::min(left, kStoreTokens)});
    }
  }
  for (PlannedTask& task : tasks_) {
    if (task.num_tokens != 1) continue;
    const auto token = static_cast<size_t>(task_tokens_[static_cast<size_t>(task.first_token)]);
    if (segment_of[token] >= 0 && task.end == positions_[token] + 1) {
      task.stores_segment = segment_of[token];
    }
  }
}

}  // namespace vtensor::kernels
