// check_integrity() finds what has been corrupted: one field at a time, named in the error.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <functional>
#include <ostream>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/support/swap_world.h"

namespace vtensor {
namespace {

struct Corruption {
  std::string name;
  std::string message;
  std::function<void(World&, VTensorId)> corrupt;
};

void PrintTo(const Corruption& corruption, std::ostream* out) { *out << corruption.name; }

uintptr_t address_of(World& world, VTensorId id, size_t row) {
  return world.faulty.pool.vset.address(0, world.core.vtensors.live(id).slot, row);
}

Chunk& chunk_of(World& world, VTensorId id) {
  Pool& pool = world.faulty.pool;
  return pool.pset[pool.vset[world.core.vtensors.live(id).slot].table.front()];
}

const std::vector<Corruption> kCorruptions = {
    {"UnmappedByOthers", "the driver maps slot 0 row 2",
     [](World& world, VTensorId id) {
       world.faulty.pool.driver->unmap(address_of(world, id, 2), kChunk, kChunk);
     }},
    {"RemappedByOthers", "the driver maps slot 0 row 1",
     [](World& world, VTensorId id) {
       Driver& driver = *world.faulty.pool.driver;
       const Handle other = chunk_of(world, id).handle;
       driver.unmap(address_of(world, id, 1), kChunk, kChunk);
       driver.map(address_of(world, id, 1), {&other, 1}, kChunk);
     }},
    {"MappedBeyondTheTable", "the driver maps slot 0 row 3",
     [](World& world, VTensorId id) {
       const Handle other = chunk_of(world, id).handle;
       world.faulty.pool.driver->map(address_of(world, id, 3), {&other, 1}, kChunk);
     }},
    {"UnmappedBehindTheDriver", "the system shows nothing",
     [](World& world, VTensorId id) {
       void* addr = reinterpret_cast<void*>(address_of(world, id, 1));
       constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED;
       ASSERT_NE(mmap(addr, kChunk, PROT_READ, kFlags, -1, 0), MAP_FAILED);
     }},
    {"RemappedBehindTheDriver", "the system shows the chunk at 0x0",
     [](World& world, VTensorId id) {
       void* from = reinterpret_cast<void*>(address_of(world, id, 0));
       void* to = reinterpret_cast<void*>(address_of(world, id, 1));
       ASSERT_NE(mremap(from, 0, kChunk, MREMAP_MAYMOVE | MREMAP_FIXED, to), MAP_FAILED);
     }},
    {"FrozenTokens", "froze tokens",
     [](World& world, VTensorId id) { world.core.vtensors.live(id).frozen_tokens = 11; }},
    {"FrozenTooFew", "froze what others see in row 2",
     [](World& world, VTensorId id) { world.core.vtensors.live(id).frozen_tokens = 8; }},
    {"Leaves", "order of eviction holds every unpinned leaf",
     [](World& world, VTensorId) {
       RTree& rtree = world.faulty.pool.rtree;
       rtree.unpin("pin");
       ++rtree.leaves().begin()->second->last_used;
     }},
    {"LeavesThatArePinned", "order of eviction holds unpinned leaves only",
     [](World& world, VTensorId) {
       RTree& rtree = world.faulty.pool.rtree;
       const size_t pinned = rtree.pin("", kPrompt, "other", 0);
       ASSERT_EQ(pinned, kPrompt.size());
       auto& leaves = const_cast<std::set<RTree::LeafKey>&>(rtree.leaves());
       leaves.insert({0, nullptr});
     }},
    {"PeakTokens", "peak length",
     [](World& world, VTensorId id) { world.core.vtensors.live(id).peak_tokens = 9; }},
    {"DirtyBytes", "dirty and written bytes",
     [](World& world, VTensorId id) { chunk_of(world, id).dirty_bytes = kChunk + 1; }},
    {"WrittenBytes", "dirty and written bytes",
     [](World& world, VTensorId id) { chunk_of(world, id).written_bytes = kChunk + 1; }},
    {"WrittenBeyondDirty", "what is written of chunk 0 is dirty",
     [](World& world, VTensorId id) {
       world.core.vtensors.freeze_rows(world.core.vtensors.live(id), 1);
       chunk_of(world, id).dirty_bytes = 0;
     }},
    {"FreeChunkToScrub", "set of free chunks to scrub",
     [](World& world, VTensorId) {
       const VTensorId other = world.make(tokens_from(500, 4), 'b');
       const ChunkId id = world.faulty.pool.vset[world.core.vtensors.live(other).slot].table[0];
       world.core.retirement.release(other);
       world.core.reclaimer.evict(64);
       ASSERT_TRUE(world.faulty.pool.pset.is_free(id));
       world.faulty.pool.pset[id].dirty_bytes = 0;
     }},
    {"FreeSlot", "the set of free slots",
     [](World& world, VTensorId) { world.faulty.pool.vset[3].state = SlotState::kHeld; }},
    {"ParkedTwice", "the parked list holds parked slots once",
     [](World& world, VTensorId) {
       Pool& pool = world.faulty.pool;
       const SlotId slot = pool.vset.take_free();
       pool.vset.park(slot);
       pool.vset.park(slot);
     }},
    {"RetiringElsewhere", "the retiring list holds retiring slots once",
     [](World& world, VTensorId) {
       world.core.state.epochs.begin();
       const VTensorId other = *world.core.placement.create({}, "");
       const SlotId slot = world.core.vtensors.live(other).slot;
       world.core.retirement.release(other);
       world.faulty.pool.vset.park(slot);
     }},
    {"GuardedRows", "guards mapped rows only",
     [](World& world, VTensorId id) {
       world.faulty.pool.vset[world.core.vtensors.live(id).slot].guarded_rows = 4;
     }},
    {"Retiring", "retiring list",
     [](World& world, VTensorId) {
       Pool& pool = world.faulty.pool;
       pool.vset.retire(pool.vset.take_free());
     }},
    {"Broken", "count of broken slots",
     [](World& world, VTensorId) {
       Pool& pool = world.faulty.pool;
       pool.vset.make_broken(pool.vset.take_free());
     }},
    {"Pins", "pin",
     [](World& world, VTensorId) {
       world.faulty.pool.rtree.for_each(
           [](const RNode& node, const std::string&) { ++const_cast<RNode&>(node).num_pins; });
     }},
};

class IntegrityTest : public testing::TestWithParam<Corruption> {};

TEST_P(IntegrityTest, what_was_corrupted_is_found_and_named) {
  World world(64, {}, "", On::kHost);
  const VTensorId id = world.make(kPrompt, 'a');
  world.core.recorder.record_prefix(id, kPrompt);
  world.faulty.pool.rtree.pin("", kPrompt, "pin", 0);
  ASSERT_NO_THROW(check_integrity(world.core));
  GetParam().corrupt(world, id);
  try {
    check_integrity(world.core);
    FAIL() << "nothing was found";
  } catch (const IntegrityError& error) {
    EXPECT_NE(std::string(error.what()).find(GetParam().message), std::string::npos)
        << error.what();
  }
}

INSTANTIATE_TEST_SUITE_P(Each, IntegrityTest, testing::ValuesIn(kCorruptions),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace vtensor
