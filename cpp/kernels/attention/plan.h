// Plan: the tasks that one step's attention consists of; the same for all layers.
//
// Every query token's visible keys are cut into pieces, each a contiguous range of one slot. A
// piece is computed together with those of other tokens: the two phases of ChunkAttention
// (section 3.2).
//
//              shared range (slot 3)        own keys
//   request A  |===========================|=====|       chunk first: the query rows of A, B and C
//   request B  |===========================|==|          against the shared range, as one block;
//   request C  |===========================|========|    then sequence first: each against its own
//
// A token with one piece is done by its task. The pieces of others leave partial results; the task
// that finishes last merges them (equation 2). Pieces that are long for the number of threads are
// cut by keys.
//
// Where only some rows of the batch are read afterwards, as in a model's last layer, those alone
// are computed; keys and values of all tokens are stored.
//
// Thread-safety: immutable after construction.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/shared_range.h"

namespace vtensor::kernels {

// The tokens [start, end) of one request in the batch, whose first one is row `row` of the flat
// batch.
struct Segment {
  int64_t slot = 0;
  int64_t row = 0;
  int64_t start = 0;  // tokens that have KV already
  int64_t end = 0;
  int64_t num_tokens() const { return end - start; }
};

struct PlanOptions {
  int64_t window = INT64_MAX;  // a token sees itself and the window - 1 tokens before it,
  int group = 1;               // query heads of a KV head
  int num_kv_heads = 1;
  int num_threads = 1;
  int64_t chunk = INT64_MAX;  // and of these the ones of its own chunk of so many tokens
};

// Tokens [first, first + count) of a segment, whose keys and values are stored together.
struct PlannedStore {
  int32_t segment = 0;
  int64_t first = 0;
  int64_t count = 1;
};

struct PlannedTask {
  int64_t slot = 0;
  int64_t begin = 0;  // keys [begin, end)
  int64_t end = 0;
  int32_t first_token = 0;  // tokens [first_token, + num_tokens) of Plan::task_tokens
  int32_t num_tokens = 0;
  int32_t partial = -1;         // its first partial row; -1: none, it writes the output
  int32_t stores_segment = -1;  // the decode whose new key lies in [begin, end), or -1
};

// A part of the query heads: all of a KV head, or, where they are too many rows, some of them.
struct HeadBlock {
  int kv_head = 0;
  int first_head = 0;
  int num_heads = 0;
};

class Plan {
 public:
  // rows: of the flat batch, whose outputs are wanted, in any order; none given: all. Outputs of
  // the others are not written.
  // Throws std::invalid_argument for segments, ranges or rows that contradict each other.
  Plan(std::vector<Segment> segments, const std::vector<SharedRange>& shared,
       const PlanOptions& options, const std::optional<std::vector<int64_t>>& rows = std::nullopt);

  const std::vector<Segment>& segments() const { return segments_; }
  const PlanOptions& options() const { return options_; }
  int64_t num_tokens() const { return static_cast<int64_t>(positions_.size()); }
  // Of each token of the flat batch, in its request.
  const std::vector<int64_t>& positions() const { return positions_; }
  // The first token of its request that it sees.
  const std::vector<int64_t>& firsts() const { return firsts_; }
  // Those of many query rows, then those of few, the most expensive ones first. Each is computed
  // once for each head block.
  const std::vector<PlannedTask>& tasks() const { return tasks_; }
  // With few rows a task waits for memory, which reads neighbouring heads best in one go.
  size_t num_tasks_of_many_rows() const { return num_many_; }
  // Else a KV head has more query heads than a task takes.
  bool has_one_block_a_head() const;
  const std::vector<int32_t>& task_tokens() const { return task_tokens_; }
  const std::vector<HeadBlock>& head_blocks() const { return head_blocks_; }
  int64_t num_partials() const { return num_partials_; }
  // The partial rows of a token; none if its task writes the output.
  std::span<const int32_t> partials_of(int32_t token) const;
  // What no task stores: prefills, whose keys several tasks read. Cut, for all threads.
  const std::vector<PlannedStore>& stored_first() const { return stored_first_; }
  // About the keys times the rows of all tasks of one head block.
  double cost() const { return cost_; }
  // Bounds of what is read and written.
  int64_t num_slots() const { return num_slots_; }
  int64_t max_seq_len() const { return max_seq_len_; }

 private:
  struct Pieces;
  void add_positions();
  void choose_rows(const std::optional<std::vector<int64_t>>& rows);
  void add_shared(const std::vector<SharedRange>& shared, Pieces& pieces);
  void add_own(Pieces& pieces);
  std::vector<int32_t> wanted_tokens(const Segment& segment) const;
  void add_task(int64_t slot, int64_t begin, int64_t end, std::span<const int32_t> tokens);
  void cut_long_tasks();
  void sort_tasks();
  void number_partials();
  void choose_stores();
  int64_t first_visible(int64_t position) const;
  double cost_of(const PlannedTask& task) const;
  bool has_few_rows(const PlannedTask& task) const;

  std::vector<Segment> segments_;
  PlanOptions options_;
  int64_t block_tokens_ = 1;  // most tokens of a task
  std::vector<int64_t> positions_;
  std::vector<int64_t> firsts_;
  std::vector<char> is_wanted_;  // by token
  std::vector<PlannedTask> tasks_;
  std::vector<int32_t> task_tokens_;
  std::vector<HeadBlock> head_blocks_;
  std::vector<int32_t> partial_ids_;     // by token
  std::vector<int32_t> partial_begins_;  // [num_tokens + 1]
  std::vector<PlannedStore> stored_first_;
  int64_t num_partials_ = 0;
  size_t num_many_ = 0;
  int64_t num_slots_ = 0;
  int64_t max_seq_len_ = 0;
  double cost_ = 0;
};

}  // namespace vtensor::kernels
