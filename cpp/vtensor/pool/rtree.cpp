#include "vtensor/pool/rtree.h"

#include <algorithm>
#include <cstring>

namespace vtensor {
namespace {

// Length of the common prefix; compares in blocks, because memcmp is vectorised and std::mismatch
// is not.
size_t common_prefix(std::span<const Token> a, std::span<const Token> b) {
  constexpr size_t kBlock = 64;
  const size_t limit = std::min(a.size(), b.size());
  size_t i = 0;
  while (i + kBlock <= limit &&
         std::memcmp(a.data() + i, b.data() + i, kBlock * sizeof(Token)) == 0) {
    i += kBlock;
  }
  while (i < limit && a[i] == b[i]) ++i;
  return i;
}

}  // namespace

RTree::~RTree() {
  pins_.clear();
  // Nodes are freed without recursion, so that a deep tree cannot exhaust the stack.
  std::vector<std::unique_ptr<RNode>> pending;
  for (auto& [salt, root] : roots_) pending.push_back(std::move(root));
  while (!pending.empty()) {
    const std::unique_ptr<RNode> node = std::move(pending.back());
    pending.pop_back();
    for (auto& [token, child] : node->children) pending.push_back(std::move(child));
  }
}

RNode& RTree::root(const std::string& salt) {
  std::unique_ptr<RNode>& slot = roots_[salt];
  if (!slot) {
    slot = std::make_unique<RNode>();
    slot->salt = &roots_.find(salt)->first;
  }
  return *slot;
}

// Every change of a node that eviction may take stands between these two.
void RTree::delist(RNode& node) {
  if (node.children.empty()) leaves_.erase({node.last_used, &node});
}

void RTree::enlist(RNode& node) {
  const bool is_leaf = node.parent != nullptr && node.children.empty();
  if (is_leaf && node.num_pins == 0) leaves_.insert({node.last_used, &node});
}

void RTree::touch(RNode& node) {
  delist(node);
  node.last_used = ++clock_;
  enlist(node);
}

// Marks the first `num_tokens` tokens of the node, and no whole row beyond them, as used now: the
// rest keeps its age, as a node of its own. Returns the node of these tokens.
RNode& RTree::touch_head(RNode& node, size_t num_tokens) {
  const bool has_rest =
      geometry_.rows_for(node.start + num_tokens) < geometry_.rows_for(node.end());
  RNode& head = has_rest ? split(node, num_tokens) : node;
  touch(head);
  return head;
}

RTree::Match RTree::match(const std::string& salt, std::span<const Token> tokens) {
  Match found;
  const auto entry = roots_.find(salt);
  if (entry == roots_.end()) return found;
  const size_t row_chunks = geometry_.row_chunks;
  RNode* node = entry->second.get();
  while (found.num_tokens < tokens.size()) {
    const auto next = node->children.find(tokens[found.num_tokens]);
    if (next == node->children.end()) break;
    node = next->second.get();
    const size_t length = common_prefix(node->tokens, tokens.subspan(found.num_tokens));
    const bool ends_inside = length < node->tokens.size();
    node = &touch_head(*node, length);
    const size_t first_row = geometry_.full_rows(node->start);
    keep_seam(found, first_row);
    found.num_tokens += length;
    const size_t end_row = geometry_.rows_for(found.num_tokens);
    found.table.resize(end_row * row_chunks);
    std::copy_n(node->rows.begin(), (end_row - first_row) * row_chunks,
                found.table.begin() + static_cast<ptrdiff_t>(first_row * row_chunks));
    if (ends_inside) break;
  }
  found.num_recorded = found.num_tokens;
  return found;
}

// Cuts `node` after `num_tokens` of its tokens. The old object becomes the lower part, so that
// pins and children stay where they are. Returns the new upper part.
RNode& RTree::split(RNode& node, size_t num_tokens) {
  const size_t row_chunks = geometry_.row_chunks;
  const size_t first_row = geometry_.full_rows(node.start);
  const size_t cut = node.start + num_tokens;
  std::unique_ptr<RNode>& link = node.parent->children.at(node.tokens.front());

  auto upper = std::make_unique<RNode>();
  upper->parent = node.parent;
  upper->start = node.start;
  upper->last_used = node.last_used;
  upper->num_pins = node.num_pins;
  upper->tokens.assign(node.tokens.begin(),
                       node.tokens.begin() + static_cast<ptrdiff_t>(num_tokens));
  const auto rows_end = node.rows.begin() +
                        static_cast<ptrdiff_t>((geometry_.rows_for(cut) - first_row) * row_chunks);
  upper->rows.assign(node.rows.begin(), rows_end);

  split_blocks(*upper, node, cut);

  const auto lower_begin =
      node.rows.begin() +
      static_cast<ptrdiff_t>((geometry_.full_rows(cut) - first_row) * row_chunks);
  for (auto chunk = lower_begin; chunk < rows_end; ++chunk) {  // the row that both now name
    pset_.add_tree_ref(*chunk);
    if (node.num_pins > 0) pset_.add_pin(*chunk);
  }
  node.rows.erase(node.rows.begin(), lower_begin);
  node.tokens.erase(node.tokens.begin(), node.tokens.begin() + static_cast<ptrdiff_t>(num_tokens));
  node.start = cut;

  std::unique_ptr<RNode> lower = std::move(link);
  lower->parent = upper.get();
  RNode& result = *upper;
  upper->children.emplace(lower->tokens.front(), std::move(lower));
  link = std::move(upper);
  return result;
}

// A leaf may simply become longer when the newcomer goes on in the same tail chunks.
bool RTree::can_grow(const RNode& node, std::span<const ChunkId> table) const {
  if (node.parent == nullptr || !node.children.empty() || node.num_pins > 0) return false;
  const size_t row_chunks = geometry_.row_chunks;
  const size_t tail_row = geometry_.full_rows(node.end());
  if (tail_row == geometry_.rows_for(node.end())) return true;  // ends at a row border
  return std::equal(node.rows.end() - static_cast<ptrdiff_t>(row_chunks), node.rows.end(),
                    table.begin() + static_cast<ptrdiff_t>(tail_row * row_chunks));
}

void RTree::grow(RNode& node, std::span<const Token> tokens, std::span<const ChunkId> table) {
  const size_t row_chunks = geometry_.row_chunks;
  const size_t from = geometry_.full_rows(node.start) * row_chunks + node.rows.size();
  node.tokens.insert(node.tokens.end(), tokens.begin(), tokens.end());
  const size_t to = geometry_.rows_for(node.end()) * row_chunks;
  for (size_t i = from; i < to; ++i) {
    node.rows.push_back(table[i]);
    pset_.add_tree_ref(table[i]);
  }
  num_tokens_ += tokens.size();
  touch(node);
}

RNode& RTree::add_child(RNode& parent, std::span<const Token> tokens,
                        std::span<const ChunkId> table) {
  delist(parent);
  auto child = std::make_unique<RNode>();
  child->parent = &parent;
  child->start = parent.end();
  RNode& result = *child;
  parent.children.emplace(tokens.front(), std::move(child));
  // An empty node that starts inside a row has no rows yet: grow() adds from full_rows(start) on.
  grow(result, tokens, table);
  return result;
}

size_t RTree::push(const std::string& salt, std::span<const Token> tokens,
                   std::span<const ChunkId> table) {
  if (tokens.empty()) return 0;
  RNode* node = &root(salt);
  size_t done = 0;
  while (done < tokens.size()) {
    const auto next = node->children.find(tokens[done]);
    if (next == node->children.end()) break;
    RNode& child = *next->second;
    const size_t length = common_prefix(child.tokens, tokens.subspan(done));
    done += length;
    heal(child, done, table);
    if (length < child.tokens.size()) {
      if (done == tokens.size()) {
        touch_head(child, length);
        return 0;
      }
      node = &split(child, length);
      touch(*node);
      break;
    }
    touch(child);
    node = &child;
  }
  const std::span<const Token> rest = tokens.subspan(done);
  if (rest.empty()) return 0;
  if (can_grow(*node, table)) {
    grow(*node, rest, table);
  } else {
    node = &add_child(*node, rest, table);
  }
  tell_stored(*node, salt, tokens);
  return rest.size();
}

bool RTree::mapped_nowhere(std::span<const ChunkId> row) const {
  return std::ranges::all_of(
      row, [&](ChunkId id) { return id == kNoChunk || pset_[id].table_refs == 0; });
}

bool RTree::frees_something(const RNode& leaf) const {
  const std::span<const ChunkId> rows(leaf.rows);
  return mapped_nowhere(rows.last(geometry_.row_chunks));
}

// Whether the leaf's last row is mapped nowhere, or is no longer: idle rows of it, as many as are
// needed, have been unmapped.
bool RTree::free_last_row(const RNode& leaf, size_t num_chunks, const UnmapIdle& unmap_idle) const {
  if (frees_something(leaf)) return true;
  const size_t row_chunks = geometry_.row_chunks;
  const std::span<const ChunkId> last = std::span<const ChunkId>(leaf.rows).last(row_chunks);
  if (!unmap_idle ||
      !std::ranges::all_of(last, [&](ChunkId id) { return id == kNoChunk || pset_[id].idle(); })) {
    return false;
  }
  const size_t first_row = geometry_.full_rows(leaf.start);
  const size_t end_row = first_row + leaf.rows.size() / row_chunks;
  const size_t num_rows = std::min(ceil_div(num_chunks, row_chunks), end_row - first_row);
  unmap_idle(end_row - num_rows, end_row - 1, last);
  return frees_something(leaf);
}

// Keeps the first `keep_rows` rows of the node. Returns how many chunks became free.
size_t RTree::drop_rows(RNode& node, size_t keep_rows) {
  size_t freed = 0;
  while (node.rows.size() > keep_rows * geometry_.row_chunks) {
    const ChunkId id = node.rows.back();
    node.rows.pop_back();
    pset_.drop_tree_ref(id);
    freed += static_cast<size_t>(id != kNoChunk && pset_[id].refs() == 0);
  }
  return freed;
}

// Drops tail rows that are mapped nowhere until `num_chunks` became free or the leaf is gone.
size_t RTree::shrink(RNode& leaf, size_t num_chunks) {
  const size_t first_row = geometry_.full_rows(leaf.start);
  size_t freed = 0;
  while (freed < num_chunks && frees_something(leaf)) {
    const size_t last_row = first_row + leaf.rows.size() / geometry_.row_chunks - 1;
    const size_t new_end = geometry_.tokens_in(last_row);
    if (new_end <= leaf.start) return freed + remove(leaf);
    num_tokens_ -= leaf.end() - new_end;
    leaf.tokens.resize(new_end - leaf.start);
    tell_removed(leaf, new_end);
    freed += drop_rows(leaf, geometry_.rows_for(new_end) - first_row);
  }
  return freed;
}

size_t RTree::remove(RNode& leaf) {
  delist(leaf);
  tell_removed(leaf, leaf.start);
  num_tokens_ -= leaf.tokens.size();
  const size_t freed = drop_rows(leaf, 0);
  RNode& parent = *leaf.parent;
  const Token first = leaf.tokens.front();
  parent.children.erase(first);
  if (parent.parent == nullptr) {
    drop_root_if_empty(parent);
  } else {
    enlist(parent);
  }
  return freed;
}

void RTree::drop_root_if_empty(RNode& root) {
  if (root.children.empty()) roots_.erase(std::string(*root.salt));
}

// The parent of a leaf that will be an unpinned leaf itself when this one is gone, or nullptr.
RNode* RTree::next_leaf_above(const RNode& leaf) {
  RNode& parent = *leaf.parent;
  const bool becomes_leaf = parent.parent != nullptr && parent.children.size() == 1;
  return becomes_leaf && parent.num_pins == 0 ? &parent : nullptr;
}

// One pass over the leaves: those passed over are met once, however many there are. A parent that
// becomes a leaf takes its turn by its own last use: at once if that is due, later in the pass
// else.
size_t RTree::evict(size_t num_chunks, const UnmapIdle& unmap_idle, bool any) {
  size_t freed = 0;
  for (auto next = leaves_.begin(); freed < num_chunks && next != leaves_.end();) {
    RNode* node = (next++)->second;
    while (node != nullptr && freed < num_chunks) {
      if (!geometry_.windows.empty()) freed += thin(*node);
      if (freed >= num_chunks) break;
      const bool frees = free_last_row(*node, num_chunks - freed, unmap_idle);
      if (!(any || frees)) break;
      const LeafKey key{node->last_used, node};
      RNode* const above = next_leaf_above(*node);
      freed += frees ? shrink(*node, num_chunks - freed) : remove(*node);
      if (leaves_.contains(key)) continue;  // shorter, and its tail is mapped now
      const bool is_due =
          above != nullptr && (next == leaves_.end() || LeafKey{above->last_used, above} < *next);
      node = is_due ? above : nullptr;
    }
  }
  return freed;
}

size_t RTree::clear() {
  const size_t before = num_tokens_;
  BlockLog* const log = pins_.empty() ? std::exchange(log_, nullptr) : nullptr;  // all goes
  for (auto next = leaves_.begin(); next != leaves_.end();) {
    RNode* node = (next++)->second;
    while (node != nullptr) {
      RNode* const above = next_leaf_above(*node);
      remove(*node);
      node = above;
    }
  }
  if (log != nullptr) {
    log_ = log;
    log_->cleared();
  }
  return before - num_tokens_;
}

void RTree::add_pins(RNode& node, ptrdiff_t change) {
  for (RNode* at = &node; at->parent != nullptr; at = at->parent) {
    const bool was_pinned = at->num_pins > 0;
    at->num_pins = static_cast<size_t>(static_cast<ptrdiff_t>(at->num_pins) + change);
    if (was_pinned == (at->num_pins > 0)) continue;
    was_pinned ? enlist(*at) : delist(*at);
    for (const ChunkId id : at->rows) was_pinned ? pset_.drop_pin(id) : pset_.add_pin(id);
  }
}

size_t RTree::pin(const std::string& salt, std::span<const Token> tokens, const std::string& owner,
                  int64_t expires_ns) {
  const auto entry = roots_.find(salt);
  if (entry == roots_.end()) return 0;
  RNode* node = entry->second.get();
  size_t done = 0;
  while (done < tokens.size()) {
    const auto next = node->children.find(tokens[done]);
    if (next == node->children.end()) break;
    RNode& child = *next->second;
    const size_t length = common_prefix(child.tokens, tokens.subspan(done));
    done += length;
    const bool ends_inside = length < child.tokens.size();
    node = ends_inside ? &split(child, length) : &child;
    touch(*node);
    if (ends_inside) break;
  }
  if (done == 0) return 0;
  pins_.emplace(owner, Pin{node, expires_ns});
  if (expires_ns != 0) first_expiry_ns_ = std::min(first_expiry_ns_, expires_ns);
  add_pins(*node, 1);
  return done;
}

size_t RTree::unpin(const std::string& owner) {
  const auto [begin, end] = pins_.equal_range(owner);
  size_t dropped = 0;
  for (auto pin = begin; pin != end; ++pin, ++dropped) add_pins(*pin->second.node, -1);
  pins_.erase(begin, end);
  return dropped;
}

void RTree::expire_pins(int64_t now_ns) {
  if (now_ns < first_expiry_ns_) return;
  first_expiry_ns_ = kNever;
  for (auto pin = pins_.begin(); pin != pins_.end();) {
    const int64_t expires_ns = pin->second.expires_ns;
    const bool expired = expires_ns != 0 && expires_ns <= now_ns;
    if (expired) add_pins(*pin->second.node, -1);
    if (!expired && expires_ns != 0) first_expiry_ns_ = std::min(first_expiry_ns_, expires_ns);
    pin = expired ? pins_.erase(pin) : std::next(pin);
  }
}

void RTree::for_each(
    const std::function<void(const RNode&, const std::string& salt)>& visit) const {
  for (const auto& [salt, root] : roots_) {
    std::vector<const RNode*> pending{root.get()};
    while (!pending.empty()) {
      const RNode* node = pending.back();
      pending.pop_back();
      if (node->parent != nullptr) visit(*node, salt);
      for (const auto& [token, child] : node->children) pending.push_back(child.get());
    }
  }
}

}  // namespace vtensor
