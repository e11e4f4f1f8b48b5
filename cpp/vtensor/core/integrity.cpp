#include "vtensor/core/integrity.h"

#include <algorithm>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "vtensor/util/error.h"

namespace vtensor {
namespace {

void expect(bool holds, const std::string& invariant) {
  if (!holds) throw IntegrityError("broken invariant: " + invariant);
}

struct Counted {
  uint32_t table_refs = 0;
  uint32_t parked_refs = 0;
  uint32_t tree_refs = 0;
  uint32_t pins = 0;
};

std::vector<Counted> count_references(const Core& core) {
  const Pool& pool = core.state.pool;
  std::vector<Counted> counted(pool.pset.num_ids());
  for (SlotId slot = 0; slot < pool.vset.num_slots(); ++slot) {
    const bool parked = pool.vset[slot].state == SlotState::kParked;
    for (const ChunkId id : pool.vset[slot].table) {
      if (id == kNoChunk) continue;
      ++counted.at(id).table_refs;
      counted.at(id).parked_refs += parked ? 1 : 0;
    }
  }
  for (const ChunkId id : core.state.claimed) ++counted.at(id).table_refs;
  for (const VTensorId vtensor : core.vtensors.live_ids()) {
    for (const ChunkId id : core.vtensors.live(vtensor).kept) {
      if (id != kNoChunk) ++counted.at(id).table_refs;
    }
  }
  pool.rtree.for_each([&](const RNode& node, const std::string&) {
    for (const ChunkId id : node.rows) {
      if (id == kNoChunk) continue;
      ++counted.at(id).tree_refs;
      counted.at(id).pins += node.num_pins > 0 ? 1 : 0;
    }
  });
  return counted;
}

void check_chunks(const Core& core) {
  const PSet& pset = core.state.pool.pset;
  const std::vector<Counted> counted = count_references(core);
  size_t free = 0;
  size_t referenced = 0;
  size_t idle = 0;
  size_t idle_unrecorded = 0;
  size_t recorded = 0;
  size_t dirty_free = 0;
  size_t shared = 0;
  size_t saved = 0;
  for (ChunkId id = 0; id < pset.num_ids(); ++id) {
    const Chunk& chunk = pset[id];
    const std::string name = "chunk " + std::to_string(id);
    expect(chunk.table_refs == counted[id].table_refs && chunk.tree_refs == counted[id].tree_refs,
           "1, reference count of " + name);
    expect(chunk.pins == counted[id].pins, "pin count of " + name);
    expect(chunk.parked_refs == counted[id].parked_refs, "count of parked entries of " + name);
    expect(pset.is_free(id) == (chunk.created && chunk.refs() == 0), "1, free set and " + name);
    expect(pset.is_dirty_free(id) == (pset.is_free(id) && chunk.dirty_bytes > 0 && !chunk.apart),
           "set of free chunks to scrub and " + name);
    expect(pset.is_apart_free(id) == (pset.is_free(id) && chunk.apart),
           "set of free chunks to give back and " + name);
    expect(!chunk.sealed || chunk.appender == kNoVTensor, "sealed " + name + " is not written");
    expect(!chunk.sealed || chunk.apart, "sealed " + name + " stands apart");
    expect(pset.is_absent(id) == (!chunk.created && chunk.refs() == 0),
           "set of ids without memory and " + name);
    expect(chunk.appender != kNoVTensor || core.state.claimed.contains(id) || chunk.refs() == 0 ||
               chunk.written_bytes <= chunk.dirty_bytes,
           "what is written of " + name + " is dirty");
    expect(chunk.refs() == 0 || chunk.created || core.sleeper.is_asleep() ||
               core.state.claimed.contains(id),
           "referenced " + name + " has no memory");
    expect(chunk.dirty_bytes <= core.state.pool.geometry.chunk_bytes &&
               chunk.written_bytes <= core.state.pool.geometry.chunk_bytes,
           "dirty and written bytes of " + name);
    expect(chunk.refs() > 0 || chunk.appender == kNoVTensor,
           "2, free " + name + " has an appender");
    free += static_cast<size_t>(chunk.created && chunk.refs() == 0);
    referenced += static_cast<size_t>(chunk.refs() > 0);
    idle += static_cast<size_t>(chunk.idle());
    idle_unrecorded += static_cast<size_t>(chunk.idle() && chunk.tree_refs == 0);
    recorded += static_cast<size_t>(chunk.tree_refs > 0);
    shared += static_cast<size_t>(chunk.shared());
    saved += chunk.saved();
    dirty_free += static_cast<size_t>(chunk.created && chunk.refs() == 0 && chunk.dirty_bytes > 0 &&
                                      !chunk.apart);
  }
  expect(pset.num_free() == free, "2, the free set is the set of chunks without references");
  expect(pset.num_dirty_free() == dirty_free, "count of free chunks to scrub");
  expect(pset.num_idle() == idle, "count of idle chunks");
  expect(pset.num_idle_unrecorded() == idle_unrecorded, "count of idle chunks not recorded");
  expect(pset.num_recorded() == recorded, "count of recorded chunks");
  expect(pset.num_shared() == shared, "count of chunks that several vTensors map");
  expect(pset.num_saved() == saved, "count of chunks that sharing saves");
  expect(pset.num_created() <= pset.budget_chunks(), "5, created bytes <= budget");
  expect(pset.num_created() == free + referenced, "6, created = free + referenced");
}

// A chunk's appender is a live vTensor whose page table names it.
void check_appenders(const Core& core) {
  const Pool& pool = core.state.pool;
  size_t with_appender = 0;
  for (ChunkId id = 0; id < pool.pset.num_ids(); ++id) {
    with_appender += static_cast<size_t>(pool.pset[id].appender != kNoVTensor);
  }
  size_t appended = 0;
  for (const VTensorId id : core.vtensors.live_ids()) {
    for (const ChunkId chunk : pool.vset[core.vtensors.live(id).slot].table) {
      appended += static_cast<size_t>(chunk != kNoChunk && pool.pset[chunk].appender == id);
    }
  }
  expect(with_appender == appended, "4, every appender is alive and maps its chunk");
}

void check_slots(const Core& core) {
  const Pool& pool = core.state.pool;
  size_t parked = 0;
  size_t broken = 0;
  size_t retiring = 0;
  for (SlotId slot = 0; slot < pool.vset.num_slots(); ++slot) {
    const Slot& entry = pool.vset[slot];
    const std::string name = "slot " + std::to_string(slot);
    parked += static_cast<size_t>(entry.state == SlotState::kParked);
    retiring += static_cast<size_t>(entry.state == SlotState::kRetiring);
    expect(entry.guarded_rows <= pool.vset.mapped_rows(slot), name + " guards mapped rows only");
    broken += static_cast<size_t>(entry.state == SlotState::kBroken);
    if (entry.state == SlotState::kBroken) continue;
    expect(entry.table.size() % pool.geometry.row_chunks == 0, "3, " + name + " has whole rows");
    expect(entry.table.size() <= pool.geometry.max_rows() * pool.geometry.row_chunks,
           "3, " + name + " is mapped within its range");
    expect(entry.state != SlotState::kFree || entry.table.empty(), "free " + name + " is unmapped");
    expect(pool.vset.is_free(slot) == (entry.state == SlotState::kFree),
           "the set of free slots and " + name);
  }
  std::unordered_set<SlotId> listed;  // in one list, once
  for (const SlotId slot : pool.vset.parked()) {
    expect(pool.vset[slot].state == SlotState::kParked && listed.insert(slot).second,
           "the parked list holds parked slots once");
  }
  uint64_t last_epoch = 0;
  for (const auto& [epoch, slot] : core.retirement.retiring()) {
    expect(pool.vset[slot].state == SlotState::kRetiring && listed.insert(slot).second,
           "the retiring list holds retiring slots once");
    expect(epoch >= last_epoch, "the retiring list is in the order of epochs");
    last_epoch = epoch;
  }
  expect(parked == pool.vset.parked().size(), "the parked list holds the parked slots");
  expect(retiring == core.retirement.retiring().size(),
         "the retiring list holds the retiring slots");
  expect(broken == core.vtensors.num_broken(), "count of broken slots");
}

// What the driver says is mapped, and the system shows, is what the page tables say. A vTensor in
// the worker's hands and a broken slot are in between; asleep, nothing is mapped but what a failed
// wake() left.
void check_mappings(const Core& core) {
  const Pool& pool = core.state.pool;
  const size_t row_chunks = pool.geometry.row_chunks;
  if (core.sleeper.is_asleep()) return;
  std::vector<uintptr_t> addrs;
  for (SlotId slot = 0; slot < pool.vset.num_slots(); ++slot) {
    const Slot& entry = pool.vset[slot];
    const bool busy = entry.state == SlotState::kLive && core.vtensors.live_in(slot).busy;
    if (entry.state == SlotState::kBroken || busy) continue;
    const size_t rows = pool.vset.mapped_rows(slot);
    for (size_t i = 0; i < std::min(rows + 1, pool.geometry.max_rows()) * row_chunks; ++i) {
      const size_t row = i / row_chunks;
      addrs.push_back(pool.vset.address(i % row_chunks, slot, row));
      const auto mapped = pool.driver->mapped_at(addrs.back());
      const bool holds = row < rows && entry.table[i] != kNoChunk;
      const bool right = holds ? mapped == pool.pset[entry.table[i]].handle : !mapped;
      expect(right, "the driver maps slot " + std::to_string(slot) + " row " + std::to_string(row) +
                        " as its page table says");
    }
  }
  pool.driver->verify_mapped(addrs);
}

// Of a window's planes only leading rows are given back, and none that a later query reads.
void check_windows(const Core& core, const VTensor& vtensor, const std::string& name) {
  const Pool& pool = core.state.pool;
  const std::vector<ChunkId>& table = pool.vset[vtensor.slot].table;
  std::vector<size_t> gone(pool.geometry.row_chunks);  // by column
  for (const Window& window : pool.geometry.windows) {
    const size_t rows = core.vtensors.rows_forgotten(vtensor.slot, window);
    expect(rows <= pool.geometry.first_row_kept(window, vtensor.num_tokens),
           name + " has the rows that its windows read");
    std::fill(gone.begin() + static_cast<ptrdiff_t>(window.first_column),
              gone.begin() + static_cast<ptrdiff_t>(window.end_column), rows);
  }
  for (size_t i = 0; i < table.size(); ++i) {
    const bool given_back = i / gone.size() < gone[i % gone.size()];
    expect(given_back == (table[i] == kNoChunk), "3, " + name + " is mapped without holes");
  }
}

void check_vtensor(const Core& core, const VTensor& vtensor) {
  const Pool& pool = core.state.pool;
  const std::string name = "vTensor " + std::to_string(vtensor.id);
  const std::vector<ChunkId>& table = pool.vset[vtensor.slot].table;
  const size_t rows = pool.vset.mapped_rows(vtensor.slot);
  if (vtensor.is_swapped) {
    expect(rows == 0, "swapped " + name + " is unmapped");
    return;
  }
  expect(pool.geometry.rows_for(vtensor.num_tokens) <= rows, name + " is mapped up to its length");
  expect(vtensor.frozen_tokens <= vtensor.num_tokens, name + " froze tokens that it has");
  expect(vtensor.num_tokens <= vtensor.peak_tokens, "the peak length of " + name);
  expect(vtensor.write_limit <= pool.geometry.tokens_in(rows),
         name + " may write mapped rows only");
  const size_t first_owned = vtensor.first_owned_row + (vtensor.last_row_shared ? 1 : 0);
  check_windows(core, vtensor, name);
  for (size_t i = 0; i < table.size(); ++i) {
    if (table[i] == kNoChunk) continue;
    const bool owned = pool.pset[table[i]].appender == vtensor.id;
    const size_t row = i / pool.geometry.row_chunks;
    expect(row < first_owned || owned, "4, " + name + " appends to row " + std::to_string(row));
    expect(row >= vtensor.first_owned_row || !owned, "4, " + name + " owns an aliased row");
  }
}

// Whoever may write into a chunk writes beyond the first `num_tokens` tokens that are seen in it
// at `row`.
void expect_frozen(const Core& core, ChunkId id, size_t row, size_t num_tokens) {
  const Pool& pool = core.state.pool;
  if (id == kNoChunk || pool.pset[id].appender == kNoVTensor) return;
  const VTensor& appender = core.vtensors.live(pool.pset[id].appender);
  const size_t seen = std::min(num_tokens, pool.geometry.tokens_in(row + 1));
  expect(seen <= appender.frozen_tokens, "vTensor " + std::to_string(appender.id) +
                                             " froze what others see in row " +
                                             std::to_string(row));
}

// Tokens of a live vTensor that others alias or that are recorded are never written again.
void check_frozen(const Core& core) {
  const Pool& pool = core.state.pool;
  const size_t row_chunks = pool.geometry.row_chunks;
  for (const VTensorId id : core.vtensors.live_ids()) {
    const VTensor& reader = core.vtensors.live(id);
    const std::vector<ChunkId>& table = pool.vset[reader.slot].table;
    for (size_t i = 0; i < table.size(); ++i) {
      if (table[i] == kNoChunk || pool.pset[table[i]].appender == id) continue;
      expect_frozen(core, table[i], i / row_chunks, reader.num_tokens);
    }
  }
  pool.rtree.for_each([&](const RNode& node, const std::string&) {
    const size_t first_row = pool.geometry.full_rows(node.start);
    for (size_t i = 0; i < node.rows.size(); ++i) {
      expect_frozen(core, node.rows[i], first_row + i / row_chunks, node.end());
    }
  });
}

// Every leaf that is not pinned stands in the order of eviction, by its last use, and nothing else.
void check_eviction_order(const RTree& rtree) {
  size_t num_leaves = 0;
  rtree.for_each([&](const RNode& node, const std::string&) {
    for (const auto& [token, child] : node.children) {
      expect(child->parent == &node && child->start == node.end() && child->tokens.front() == token,
             "a node of the rTree goes on where its parent ends");
    }
    if (!node.children.empty() || node.num_pins > 0) return;
    ++num_leaves;
    expect(rtree.leaves().contains({node.last_used, const_cast<RNode*>(&node)}),
           "the order of eviction holds every unpinned leaf by its last use");
  });
  expect(num_leaves == rtree.leaves().size(), "the order of eviction holds unpinned leaves only");
}

void check_tree(const Core& core) {
  const Pool& pool = core.state.pool;
  size_t num_tokens = 0;
  pool.rtree.for_each([&](const RNode& node, const std::string&) {
    const size_t rows = pool.geometry.rows_for(node.end()) - pool.geometry.full_rows(node.start);
    expect(!node.tokens.empty(), "an rTree node has tokens");
    expect(node.rows.size() == rows * pool.geometry.row_chunks,
           "7, an rTree path's tokens are covered by its chunks");
    const size_t blocks = node.end() / kBlockTokens - node.start / kBlockTokens;
    expect(node.blocks.size() == (pool.rtree.is_watched() ? blocks : 0),
           "an rTree node names the blocks that end in it");
    for (size_t i = 0; i < node.rows.size(); ++i) {
      expect(node.rows[i] != kNoChunk ||
                 i % pool.geometry.row_chunks >= pool.geometry.lasting_chunks(),
             "7, the rTree lacks rows of windows alone");
    }
    num_tokens += node.tokens.size();
  });
  expect(num_tokens == pool.rtree.num_tokens(), "count of recorded tokens");
  std::unordered_map<const RNode*, size_t> pins;
  for (const auto& [owner, pin] : pool.rtree.pins()) {
    for (const RNode* node = pin.node; node != nullptr; node = node->parent) ++pins[node];
  }
  pool.rtree.for_each([&](const RNode& node, const std::string&) {
    expect(node.num_pins == pins[&node], "count of pins at or below a node of the rTree");
  });
}

}  // namespace

void check_integrity(const Core& core) {
  check_chunks(core);
  check_appenders(core);
  check_slots(core);
  check_mappings(core);
  for (const VTensorId id : core.vtensors.live_ids()) check_vtensor(core, core.vtensors.live(id));
  if (!core.sleeper.is_asleep()) check_frozen(core);
  check_tree(core);
  check_eviction_order(core.state.pool.rtree);
}

}  // namespace vtensor
