// IdSet: a sorted set of small integers, a bitmap. Lowest-first pops keep chunks of neighbouring
// offsets together, so that a driver can map them in one call.
//
// Thread-safety: none.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace vtensor {

class IdSet {
 public:
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }

  bool contains(uint32_t id) const {
    const size_t word = id / 64;
    return word < words_.size() && ((words_[word] >> (id % 64)) & 1U) != 0;
  }

  // Requires: `id` is not in the set.
  void insert(uint32_t id) {
    const size_t word = id / 64;
    if (word >= words_.size()) words_.resize(word + 1, 0);
    words_[word] |= uint64_t{1} << (id % 64);
    if (word < lowest_word_) lowest_word_ = word;
    ++size_;
  }

  // Requires: `id` is in the set.
  void erase(uint32_t id) {
    words_[id / 64] &= ~(uint64_t{1} << (id % 64));
    --size_;
  }

  // Removes and returns the smallest member. Requires: not empty.
  uint32_t pop_lowest() {
    while (words_[lowest_word_] == 0) ++lowest_word_;
    const auto bit = static_cast<uint32_t>(std::countr_zero(words_[lowest_word_]));
    const auto id = static_cast<uint32_t>(lowest_word_ * 64) + bit;
    erase(id);
    return id;
  }

  // Removes and returns the largest member. Requires: not empty.
  uint32_t pop_highest() {
    while (words_.back() == 0) words_.pop_back();
    const size_t word = words_.size() - 1;
    const auto bit = static_cast<uint32_t>(63 - std::countl_zero(words_[word]));
    const auto id = static_cast<uint32_t>(word * 64) + bit;
    erase(id);
    return id;
  }

 private:
  std::vector<uint64_t> words_;
  size_t lowest_word_ = 0;  // no member lies in a lower word
  size_t size_ = 0;
};

}  // namespace vtensor
