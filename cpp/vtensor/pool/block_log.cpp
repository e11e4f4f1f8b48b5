#include "vtensor/pool/block_log.h"

namespace vtensor {
namespace {

// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
uint64_t mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30U)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27U)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31U);
}

}  // namespace

BlockHash salt_hash(const std::string& salt) {
  uint64_t hash = mix(salt.size());
  for (const char byte : salt) hash = mix(hash ^ static_cast<unsigned char>(byte));
  return hash;
}

BlockHash block_hash(BlockHash before, std::span<const Token> block) {
  uint64_t hash = before;
  for (size_t i = 0; i < kBlockTokens; i += 2) {
    const uint64_t low = static_cast<uint32_t>(block[i]);
    const uint64_t high = static_cast<uint32_t>(block[i + 1]);
    hash = mix(hash ^ (high << 32U | low));
  }
  return hash;
}

bool BlockLog::has_room(size_t num_words) {
  num_words_ += num_words;
  if (num_words_ > kMaxWords) lose();
  return !is_lost_;
}

void BlockLog::stored(const std::string& salt, std::optional<BlockHash> parent,
                      std::span<const BlockHash> blocks, std::span<const Token> tokens) {
  if (!has_room(blocks.size() + tokens.size())) return;
  events_.push_back({BlockEvent::Kind::kStored,
                     {blocks.begin(), blocks.end()},
                     parent,
                     {tokens.begin(), tokens.end()},
                     salt});
  if (events_.size() == 1) news_.notify_one();
}

void BlockLog::removed(std::span<const BlockHash> blocks) {
  if (blocks.empty() || !has_room(blocks.size())) return;
  if (events_.empty() || events_.back().kind != BlockEvent::Kind::kRemoved) {
    events_.push_back({BlockEvent::Kind::kRemoved, {}, {}, {}, {}});
    if (events_.size() == 1) news_.notify_one();
  }
  std::vector<BlockHash>& last = events_.back().blocks;
  last.insert(last.end(), blocks.begin(), blocks.end());
}

void BlockLog::cleared() {
  take();
  is_lost_ = false;
  events_.emplace_back();
  news_.notify_one();
}

void BlockLog::lose() {
  take();
  is_lost_ = true;
  news_.notify_one();
}

void BlockLog::close() {
  is_open_ = false;
  is_lost_ = false;
  news_.notify_all();
}

void BlockLog::wait(std::unique_lock<std::mutex>& lock, std::chrono::nanoseconds timeout) {
  news_.wait_for(lock, timeout, [&] { return has_news() || !is_open_; });
}

std::vector<BlockEvent> BlockLog::take() {
  num_words_ = 0;
  return std::exchange(events_, {});
}

}  // namespace vtensor
