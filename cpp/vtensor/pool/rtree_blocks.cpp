// RTree: what it tells a BlockLog.
#include <algorithm>
#include <utility>

#include "vtensor/pool/rtree.h"

namespace vtensor {

void RTree::watch(BlockLog* log) {
  log_ = log;
  if (log_ == nullptr) {
    for (auto& [salt, root] : roots_) for_each_below(*root, [](RNode& node) { node.blocks = {}; });
    return;
  }
  log_->cleared();
  for (auto& [salt, root] : roots_) {
    for_each_below(*root, [&, &name = salt](RNode& node) {
      node.blocks.clear();
      tell_stored(node, name, own_blocks(node));
    });
  }
}

// Parents first.
void RTree::for_each_below(RNode& root, const std::function<void(RNode&)>& visit) {
  std::vector<RNode*> pending{&root};
  while (!pending.empty()) {
    RNode* const node = pending.back();
    pending.pop_back();
    if (node != &root) visit(*node);
    for (const auto& [token, child] : node->children) pending.push_back(child.get());
  }
}

// The tokens from the start of the block in which the node starts: the node's own, and at most 15
// of the nodes above.
std::vector<Token> RTree::own_blocks(const RNode& node) {
  std::vector<Token> reversed(node.tokens.rbegin(), node.tokens.rend());
  const size_t first = node.start / kBlockTokens * kBlockTokens;
  for (const RNode* above = node.parent; above->end() > first; above = above->parent) {
    const size_t count = above->end() - std::max(first, above->start);
    reversed.insert(reversed.end(), above->tokens.rbegin(),
                    above->tokens.rbegin() + static_cast<ptrdiff_t>(count));
  }
  return {reversed.rbegin(), reversed.rend()};
}

// Names the whole blocks that end in the node and have no name yet. `tokens`: those up to the
// node's end, from the start of any block that does not lie behind the first of these.
void RTree::tell_stored(RNode& node, const std::string& salt, std::span<const Token> tokens) {
  if (log_ == nullptr) return;
  const size_t begin = node.start / kBlockTokens + node.blocks.size();
  const size_t end = node.end() / kBlockTokens;
  if (begin == end) return;
  const RNode* last = &node;  // with a block: at most 16 nodes up, unless there is none
  while (last->parent != nullptr && last->blocks.empty()) last = last->parent;
  std::optional<BlockHash> parent;
  if (!last->blocks.empty()) parent = last->blocks.back();

  const size_t known = node.blocks.size();
  const size_t skipped = node.end() - tokens.size();
  tokens = tokens.subspan(begin * kBlockTokens - skipped, (end - begin) * kBlockTokens);
  BlockHash hash = parent ? *parent : salt_hash(salt);
  for (size_t at = 0; at < tokens.size(); at += kBlockTokens) {
    hash = block_hash(hash, tokens.subspan(at, kBlockTokens));
    node.blocks.push_back(hash);
  }
  log_->stored(salt, parent, std::span<const BlockHash>(node.blocks).subspan(known), tokens);
}

// After the node has become shorter, or before it goes (end = start).
void RTree::tell_removed(RNode& node, size_t end) {
  if (log_ == nullptr) return;
  const size_t kept = end / kBlockTokens - node.start / kBlockTokens;
  log_->removed(std::span<const BlockHash>(node.blocks).subspan(kept));
  node.blocks.resize(kept);
}

// The part of `node` up to token `cut` becomes `upper`.
void RTree::split_blocks(RNode& upper, RNode& node, size_t cut) {
  if (log_ == nullptr) return;
  const auto middle =
      node.blocks.begin() + static_cast<ptrdiff_t>(cut / kBlockTokens - upper.start / kBlockTokens);
  upper.blocks.assign(node.blocks.begin(), middle);
  node.blocks.erase(node.blocks.begin(), middle);
}

}  // namespace vtensor
