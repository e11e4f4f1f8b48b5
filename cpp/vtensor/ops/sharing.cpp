#include "vtensor/ops/sharing.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace vtensor {
namespace {

// One reader's page table, and up to which row it matches that of its group's first reader.
struct Member {
  uint32_t idx = 0;
  const ChunkId* table = nullptr;
  size_t num_rows = 0;  // that may be shared: mapped, full of tokens that are read
  size_t common_rows = 0;
};

class SharingForest {
 public:
  explicit SharingForest(const Geometry& geometry)
      : geometry_(geometry),
        row_chunks_(geometry.row_chunks),
        compared_chunks_(geometry.lasting_chunks() > 0 ? geometry.lasting_chunks()
                                                       : geometry.row_chunks) {}

  // Requires: the members share all rows below `row`, and each has more rows than that.
  void part(std::span<Member> members, size_t row) {
    if (members.size() < 2) return;
    if (!std::ranges::all_of(members, [&](const Member& member) {
          return compare_rows(member, members.front(), row) == 0;
        })) {
      std::ranges::sort(members, [&](const Member& a, const Member& b) {
        const int order = compare_rows(a, b, row);
        return order != 0 ? order < 0 : a.idx < b.idx;
      });
    }
    for (auto first = members.begin(); first != members.end();) {
      const auto last = std::find_if(first, members.end(), [&](const Member& member) {
        return compare_rows(member, *first, row) != 0;
      });
      if (last - first > 1) walk({first, last}, row);
      first = last;
    }
  }

  std::vector<SharedRange> take(std::span<const ReadExtent> readers) {
    for (SharedRange& range : ranges_) {
      std::ranges::sort(range.members);
      range.slot = readers[static_cast<size_t>(range.members.front())].slot;
    }
    return std::move(ranges_);
  }

 private:
  // Follows the members from `row`, which they all share, to where the last two of them part.
  void walk(std::span<Member> members, size_t row) {
    const Member leader = members.front();
    for (Member& member : members) member.common_rows = common_rows(leader, member, row);
    const auto longest_first = [](const Member& a, const Member& b) {
      return a.common_rows > b.common_rows;
    };
    if (!std::ranges::is_sorted(members, longest_first)) {
      std::ranges::sort(members, longest_first);
    }
    while (members.size() > 1) {
      const size_t end = members.back().common_rows;
      emit(members, row, end);
      row = end;
      const auto leaving =
          std::ranges::lower_bound(members, end, std::ranges::greater{}, &Member::common_rows);
      const auto gone = std::partition(leaving, members.end(),
                                       [&](const Member& member) { return member.num_rows > end; });
      part({leaving, gone}, end);
      members = {members.begin(), leaving};
    }
  }

  void emit(std::span<const Member> members, size_t first_row, size_t end_row) {
    SharedRange range;
    range.start = static_cast<int64_t>(geometry_.tokens_in(first_row));
    range.end = static_cast<int64_t>(geometry_.tokens_in(end_row));
    if (range.start == range.end) return;  // a token may be larger than a row
    range.members.reserve(members.size());
    for (const Member& member : members) range.members.push_back(member.idx);
    ranges_.push_back(std::move(range));
  }

  int compare_rows(const Member& a, const Member& b, size_t row) const {
    return std::memcmp(a.table + row * row_chunks_, b.table + row * row_chunks_,
                       compared_chunks_ * sizeof(ChunkId));
  }

  // Rows that both have and share. Requires: they share all rows below `row`.
  size_t common_rows(const Member& a, const Member& b, size_t row) const {
    if (compared_chunks_ < row_chunks_) {
      while (row < std::min(a.num_rows, b.num_rows) && compare_rows(a, b, row) == 0) ++row;
      return row;
    }
    constexpr size_t kBlock = 64;  // memcmp is fast but does not tell where
    const size_t end = std::min(a.num_rows, b.num_rows) * row_chunks_;
    size_t i = row * row_chunks_;
    while (i + kBlock <= end &&
           std::memcmp(a.table + i, b.table + i, kBlock * sizeof(ChunkId)) == 0)
      i += kBlock;
    while (i < end && a.table[i] == b.table[i]) ++i;
    return i / row_chunks_;
  }

  const Geometry& geometry_;
  size_t row_chunks_;
  size_t compared_chunks_;
  std::vector<SharedRange> ranges_;
};

}  // namespace

std::vector<SharedRange> shared_ranges(const Pool& pool, std::span<const ReadExtent> readers) {
  if (pool.pset.num_shared() == 0) return {};
  std::vector<Member> members;
  members.reserve(readers.size());
  for (uint32_t idx = 0; idx < readers.size(); ++idx) {
    const ReadExtent& reader = readers[idx];
    const size_t num_rows =
        std::min(pool.vset.mapped_rows(reader.slot), pool.geometry.full_rows(reader.num_tokens));
    if (num_rows > 0) members.push_back({idx, pool.vset[reader.slot].table.data(), num_rows, 0});
  }
  SharingForest forest(pool.geometry);
  forest.part(members, 0);
  return forest.take(readers);
}

}  // namespace vtensor
