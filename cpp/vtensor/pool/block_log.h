// BlockLog: which blocks of tokens have been recorded and forgotten, for routers elsewhere.
//
// A block is 16 tokens, whatever a row holds, and is named by a hash of everything up to its end:
// the salt, the tokens before it and its own. Equal hashes on several replicas mean equal
// beginnings. Not a cryptographic hash: who chooses tokens can make two blocks share a name, and so
// mislead a router, never the rTree, which compares tokens.
//
// Thread-safety: by the manager's mutex, which whoever waits for events hands over. Writers do no
// more than hash and copy the tokens.
//
// Invariants:
//  1. events since the last take() are in order; together with all earlier ones they come to what
//     is recorded, unless is_lost();
//  2. at most about kMaxWords tokens and hashes wait: beyond that events are dropped, and the log
//     is lost until it is told everything anew.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace vtensor {

using Token = int32_t;
using BlockHash = uint64_t;

inline constexpr size_t kBlockTokens = 16;

// Of a block that begins a prompt of this salt there is no block before it: this stands in.
BlockHash salt_hash(const std::string& salt);
// `block`: kBlockTokens tokens.
BlockHash block_hash(BlockHash before, std::span<const Token> block);

struct BlockEvent {
  enum class Kind { kStored, kRemoved, kCleared };

  Kind kind = Kind::kCleared;
  std::vector<BlockHash> blocks;    // stored: each continues the one before
  std::optional<BlockHash> parent;  // of the first one stored; none: it begins a prompt
  std::vector<Token> tokens;        // of those stored
  std::string salt;                 // of those stored
};

class BlockLog {
 public:
  static constexpr size_t kMaxWords = size_t{1} << 22;

  void stored(const std::string& salt, std::optional<BlockHash> parent,
              std::span<const BlockHash> blocks, std::span<const Token> tokens);
  void removed(std::span<const BlockHash> blocks);
  // Nothing is recorded any more; what happened before no longer matters.
  void cleared();
  // Drops all events until cleared().
  void lose();

  bool is_lost() const { return is_lost_; }
  bool is_open() const { return is_open_; }
  void open() { is_open_ = true; }
  void close();  // Nobody need wait any longer.

  // Returns when there are events, all are lost, the log is closed, or the time is over.
  void wait(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout);
  std::vector<BlockEvent> take();

 private:
  bool has_room(size_t num_words);
  bool has_news() const { return is_lost_ || !events_.empty(); }

  std::condition_variable news_;
  bool is_open_ = false;
  std::vector<BlockEvent> events_;
  size_t num_words_ = 0;
  bool is_lost_ = false;
};

}  // namespace vtensor
