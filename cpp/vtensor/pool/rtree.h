// RTree, the paper's rTree: a radix tree over tokens that remembers which chunks hold their KV.
//
// One tree a cache salt, so that tenants never share. A node covers tokens [start, start + size)
// and names the chunks of every row that these tokens touch. Where a node starts inside a row, that
// row stands in the parent as well; the deeper entry wins, because its chunk holds everything up to
// its own end:
//
//   row      |   0    |   1    |   2    |
//   parent   [ c0       c1 ]                  tokens 0..m, m inside row 1
//   child A           [ c1       c2 ]         went on writing in c1
//   child B           [ c5       c6 ]         got c5, a copy of the tail chunk c1
//
// Matching is token-exact. Thread-safety: none; the manager's mutex guards it. No driver calls.
//
// Invariants:
//  1. siblings start with different tokens; no node but a root is empty;
//  2. node.rows covers exactly rows [full_rows(start), rows_for(end)), row-major over columns, with
//     kNoChunk where a window has left a row behind (recorded so, or thinned out by evict());
//  3. each entry of node.rows holds one tree reference, and one pin while node.num_pins > 0;
//  4. node.num_pins counts the pins at or below the node; leaves_ holds every leaf without pins, by
//     last use;
//  5. while a log is watching, node.blocks names the whole blocks of which the last token is the
//     node's, and the log has been told of all of them and of no others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "vtensor/pool/block_log.h"
#include "vtensor/pool/geometry.h"
#include "vtensor/pool/pset.h"

namespace vtensor {

struct RNode {
  RNode* parent = nullptr;
  const std::string* salt = nullptr;  // of a root: its key
  size_t start = 0;                   // tokens before this node
  std::vector<Token> tokens;
  std::vector<ChunkId> rows;
  std::vector<BlockHash> blocks;  // empty while no log is watching
  std::unordered_map<Token, std::unique_ptr<RNode>> children;
  uint64_t last_used = 0;
  size_t num_pins = 0;

  size_t end() const { return start + tokens.size(); }
};

class RTree {
 public:
  // Where a node of a match begins inside a row: what stands in that row before the node.
  struct Seam {
    size_t num_tokens = 0;
    std::vector<ChunkId> row;
  };
  struct Match {
    size_t num_tokens = 0;
    std::vector<ChunkId> table;  // rows_for(num_tokens) rows, row-major over columns
    size_t num_recorded = 0;     // before usable() has shortened it
    size_t cut_by_window = 0;    // tokens of the window for which it was; 0: it was not
    std::vector<Seam> seams;     // ascending; of interest to windows alone, and empty without any
  };
  struct Pin {
    RNode* node;
    int64_t expires_ns;  // steady clock; 0 = never
  };

  RTree(const Geometry& geometry, PSet& pset) : geometry_(geometry), pset_(pset) {}
  ~RTree();
  RTree(const RTree&) = delete;
  RTree& operator=(const RTree&) = delete;

  // The longest recorded prefix of `tokens`; marks what matched, and no whole row beyond, as used
  // now. O(tokens).
  Match match(const std::string& salt, std::span<const Token> tokens);

  // The longest part of the match whose windows are there, with no rows that they have left.
  Match usable(Match match) const;

  // Records `tokens`, whose chunks are `table` (at least rows_for(tokens.size()) rows). What is
  // recorded already stays as it is, but for chunks that were given back and are in `table`.
  // Returns how many tokens are new.
  size_t push(const std::string& salt, std::span<const Token> tokens,
              std::span<const ChunkId> table);

  // Takes idle rows of a leaf out of parked slots: rows [first_row, last_row], the chunks of the
  // last one being `chunks`. Afterwards these are mapped nowhere.
  using UnmapIdle =
      std::function<void(size_t first_row, size_t last_row, std::span<const ChunkId> chunks)>;

  // Gives up least recently used leaves, rows that no window needs at their end and then last rows
  // first, until `num_chunks` chunks became free.
  // Never takes pinned leaves and, unless `any`, none whose chunks a vTensor maps. Idle ones that
  // parked slots map are unmapped first, in the same order, or passed over without `unmap_idle`.
  // Returns the number of chunks that became free.
  size_t evict(size_t num_chunks, const UnmapIdle& unmap_idle = nullptr, bool any = false);
  // Forgets everything that is not pinned. Returns the number of tokens forgotten.
  size_t clear();

  // Pins the longest recorded prefix of `tokens` for `owner`. Returns its length (0: none).
  size_t pin(const std::string& salt, std::span<const Token> tokens, const std::string& owner,
             int64_t expires_ns);
  // Drops the owner's pins; returns how many there were.
  size_t unpin(const std::string& owner);
  // O(1) until the first pin expires.
  void expire_pins(int64_t now_ns);

  // Tells `log` everything that is recorded, and what changes from now on; nullptr ends that.
  // O(tokens recorded).
  void watch(BlockLog* log);
  bool is_watched() const { return log_ != nullptr; }

  size_t num_tokens() const { return num_tokens_; }
  const std::multimap<std::string, Pin>& pins() const { return pins_; }
  // What evict() goes through, in this order; the first use by which it goes stands first.
  using LeafKey = std::pair<uint64_t, RNode*>;
  const std::set<LeafKey>& leaves() const { return leaves_; }
  // Calls visit(node, salt) for every node but the roots, parents first.
  void for_each(const std::function<void(const RNode&, const std::string& salt)>& visit) const;

 private:
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

  RNode& root(const std::string& salt);
  void delist(RNode& node);
  void enlist(RNode& node);
  void touch(RNode& node);
  RNode& touch_head(RNode& node, size_t num_tokens);
  RNode& split(RNode& node, size_t num_tokens);
  void heal(RNode& node, size_t num_tokens, std::span<const ChunkId> table);
  size_t thin(RNode& leaf);
  void keep_seam(Match& match, size_t first_row) const;
  void shorten(Match& match, size_t row) const;
  bool can_grow(const RNode& node, std::span<const ChunkId> table) const;
  void grow(RNode& node, std::span<const Token> tokens, std::span<const ChunkId> table);
  RNode& add_child(RNode& parent, std::span<const Token> tokens, std::span<const ChunkId> table);
  size_t shrink(RNode& leaf, size_t num_chunks);
  size_t remove(RNode& leaf);
  size_t drop_rows(RNode& node, size_t keep_rows);
  static RNode* next_leaf_above(const RNode& leaf);
  void drop_root_if_empty(RNode& root);
  void add_pins(RNode& node, ptrdiff_t change);
  static void for_each_below(RNode& root, const std::function<void(RNode&)>& visit);
  static std::vector<Token> own_blocks(const RNode& node);
  void tell_stored(RNode& node, const std::string& salt, std::span<const Token> tokens);
  void tell_removed(RNode& node, size_t end);
  void split_blocks(RNode& upper, RNode& node, size_t cut);
  bool mapped_nowhere(std::span<const ChunkId> row) const;
  bool frees_something(const RNode& leaf) const;
  bool free_last_row(const RNode& leaf, size_t num_chunks, const UnmapIdle& unmap_idle) const;

  Geometry geometry_;
  PSet& pset_;
  BlockLog* log_ = nullptr;
  std::unordered_map<std::string, std::unique_ptr<RNode>> roots_;
  std::set<LeafKey> leaves_;
  std::multimap<std::string, Pin> pins_;
  int64_t first_expiry_ns_ = kNever;  // no pin expires earlier
  uint64_t clock_ = 0;
  size_t num_tokens_ = 0;
};

}  // namespace vtensor
