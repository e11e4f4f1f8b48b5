// What the tests of swapping, sleeping and dedup share: a core on real memory, and what each
// vTensor of it should show.
#pragma once

#include <dirent.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "tests/cpp/support/core_fixture.h"
#include "vtensor/store/swap_store.h"

namespace vtensor {

inline const Tokens kPrompt = tokens_from(0, 10);  // two whole rows and a half

// A core on real memory. What each vTensor should show is noted here, a mark for each token.
struct World {
  explicit World(size_t budget_chunks = 64, const CoreOptions& options = {},
                 const std::string& directory = "", On driver = DriverTest::GetParam())
      : faulty(small_geometry(), budget_chunks, make_driver(driver)),
        core(faulty.pool, options),
        store(64 * kChunk, kChunk, directory),
        sleep_store(256 * kChunk, kChunk, directory) {}

  FaultyPool faulty;
  Core core;
  SwapStore store;
  SwapStore sleep_store;
  std::map<VTensorId, std::string> marks;

  bool extend(VTensorId id, size_t num_tokens) {
    if (core.extender.extend_in_place({&id, 1}, {&num_tokens, 1})) return true;
    std::optional<Extension> extension = core.extender.plan_extend({&id, 1}, {&num_tokens, 1});
    if (!extension) return false;
    extension->run(faulty.faults, faulty.pool.vset, faulty.pool.geometry);
    core.extender.commit(*extension);
    return true;
  }
  volatile char& at(VTensorId id, size_t token, size_t plane, size_t byte) {
    const uintptr_t base = faulty.pool.vset.address(plane, core.vtensors.live(id).slot, 0);
    return *reinterpret_cast<volatile char*>(base + token * kKiB + byte);
  }
  void append(VTensorId id, size_t num_tokens, char mark) {
    std::string& known = marks[id];
    ASSERT_TRUE(extend(id, num_tokens));
    for (size_t t = known.size(); t < num_tokens; ++t) {
      for (size_t plane = 0; plane < 2; ++plane) {
        at(id, t, plane, 0) = mark;
        at(id, t, plane, kKiB - 1) = static_cast<char>(mark + 1 + static_cast<char>(plane));
      }
    }
    known.resize(num_tokens, mark);
  }
  VTensorId make(const Tokens& tokens, char mark, const std::string& salt = "") {
    const VTensorId id = *core.placement.create(tokens, salt);
    marks[id] = std::string(core.vtensors.live(id).num_tokens, mark);
    append(id, tokens.size(), mark);
    return id;
  }
  VTensorId fork(VTensorId parent) {
    const VTensorId id = *core.placement.fork(parent);
    marks[id] = marks[parent];
    return id;
  }
  void release(VTensorId id) {
    core.swapper.forget(core.vtensors.live(id), store);
    core.retirement.release(id);
    marks.erase(id);
  }
  void expect_contents(VTensorId id) {
    const std::string& known = marks.at(id);
    ASSERT_EQ(core.vtensors.live(id).num_tokens, known.size());
    for (size_t t = 0; t < known.size(); ++t) {
      for (size_t plane = 0; plane < 2; ++plane) {
        ASSERT_EQ(at(id, t, plane, 0), known[t]) << "vTensor " << id << " token " << t;
        ASSERT_EQ(at(id, t, plane, kKiB - 1), known[t] + 1 + static_cast<int>(plane));
      }
    }
  }
  // Every live vTensor shows what it should, brought back where it is swapped out.
  void expect_all_contents() {
    for (const VTensorId id : core.vtensors.live_ids()) {
      if (core.vtensors.live(id).is_swapped) {
        ASSERT_TRUE(core.swapper.swap_in(id, {}, store));
      }
      expect_contents(id);
    }
  }
  size_t num_broken_slots() const {
    size_t broken = 0;
    for (SlotId slot = 0; slot < faulty.pool.vset.num_slots(); ++slot) {
      broken += static_cast<size_t>(faulty.pool.vset[slot].state == SlotState::kBroken);
    }
    return broken;
  }
  // Everything can be given back, but for what broken slots may map.
  void expect_nothing_leaks() {
    for (const VTensorId id : core.vtensors.live_ids()) release(id);
    faulty.pool.rtree.unpin("pin");
    faulty.pool.rtree.clear();
    core.reclaimer.trim();
    check_integrity(core);
    std::set<ChunkId> broken;
    for (SlotId slot = 0; slot < faulty.pool.vset.num_slots(); ++slot) {
      const std::vector<ChunkId>& table = faulty.pool.vset[slot].table;
      broken.insert(table.begin(), table.end());
    }
    EXPECT_EQ(faulty.pool.pset.num_created(), broken.size());
    EXPECT_EQ(store.used_bytes(), 0U);
    EXPECT_EQ(sleep_store.used_bytes(), 0U);
  }
};

// An empty folder, removed in the end.
struct SwapDirectory {
  std::string path = testing::TempDir() + "swap-XXXXXX";
  SwapDirectory() { EXPECT_NE(::mkdtemp(path.data()), nullptr); }
  ~SwapDirectory() { ::rmdir(path.c_str()); }
  size_t num_files() const {
    size_t files = 0;
    DIR* const directory = ::opendir(path.c_str());
    while (const dirent* entry = ::readdir(directory)) files += entry->d_name[0] == '.' ? 0U : 1U;
    ::closedir(directory);
    return files;
  }
};

// Live, forked, swapped-out, parked and pinned: a bit of everything.
inline void fill(World& world) {
  const VTensorId first = world.make(kPrompt, 'a');
  world.core.recorder.record_prefix(first, kPrompt);
  world.append(world.fork(first), 13, 'b');
  const VTensorId third = world.make(tokens_from(200, 9), 'c');
  ASSERT_TRUE(world.core.swapper.swap_out(third, world.store));
  const VTensorId fourth = world.make(tokens_from(300, 5), 'd');
  world.core.recorder.record_prefix(fourth, tokens_from(300, 5));
  world.faulty.pool.rtree.pin("", tokens_from(300, 5), "pin", 0);
  world.release(fourth);
}

}  // namespace vtensor
