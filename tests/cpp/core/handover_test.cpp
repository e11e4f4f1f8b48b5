// KV that one manager hands to another: the same memory, written on by one of them alone; what does
// not fit is refused before anything is mapped, and so is a driver that cannot do it.
#include "vtensor/core/handover.h"

#include <gtest/gtest.h>

#include <memory>
#include <stdexcept>
#include <utility>

#include "tests/cpp/support/drivers.h"
#include "vtensor/manager.h"

namespace vtensor {
namespace {

constexpr size_t kChunk = 4 * kKiB;
constexpr size_t kTokens = 10;  // of a KiB: two whole chunks and a half

std::shared_ptr<Manager> open(std::unique_ptr<Driver> driver, size_t chunk_bytes = kChunk) {
  ManagerOptions options;
  options.max_requests = 4;
  options.memory_budget = 16 * chunk_bytes;
  options.chunk_bytes = chunk_bytes;
  const KVSpec spec = UniformKV{.num_layers = 2,
                                .num_kv_heads = 1,
                                .head_dim = 64,
                                .element_bytes = 4,
                                .max_seq_len = 64,
                                .layers_per_plane = 2};
  return Manager::open(std::move(driver), spec, options);
}

class HandoverTest : public testing::Test {
 protected:
  static void extend(Manager& manager, VTensorId id, size_t num_tokens) {
    manager.extend({&id, 1}, {&num_tokens, 1});
  }
  static void write(Manager& manager, VTensorId id, size_t first, size_t end, char mark) {
    extend(manager, id, end);
    const TensorView view = manager.view(id, 0, KV::kKey);
    for (size_t t = first; t < end; ++t) *reinterpret_cast<char*>(view.address + t * kKiB) = mark;
  }
  static char read(Manager& manager, VTensorId id, size_t token) {
    const TensorView view = manager.view(id, 0, KV::kKey);
    return *reinterpret_cast<char*>(view.address + token * kKiB);
  }
  VTensorId filled(bool to_export) {
    const VTensorId id = sender_->try_create({}, "", 0, to_export).value();
    write(*sender_, id, 0, kTokens, 1);
    return id;
  }
  void check() const {
    sender_->check_integrity();
    receiver_->check_integrity();
  }

  std::shared_ptr<Manager> sender_ = open(make_host());
  std::shared_ptr<Manager> receiver_ = open(make_host());
};

TEST_F(HandoverTest, WhatLiesApartIsTheSameMemoryThere) {
  const VTensorId sent = filled(true);
  const Parcel parcel = sender_->try_export(sent).value();
  EXPECT_EQ(parcel.num_copied, 0);
  EXPECT_EQ(parcel.chunks.files.size(), 1);
  const VTensorId got = receiver_->try_adopt(parcel, "").value();
  EXPECT_EQ(receiver_->info(got).num_tokens, kTokens);
  EXPECT_EQ(read(*receiver_, got, kTokens - 1), 1);
  check();
}

TEST_F(HandoverTest, EachGoesOnWithoutTheOther) {
  const VTensorId sent = filled(true);
  const VTensorId got = receiver_->try_adopt(sender_->try_export(sent).value(), "").value();
  write(*receiver_, got, kTokens, kTokens + 1, 2);
  write(*sender_, sent, kTokens, kTokens + 1, 3);
  EXPECT_EQ(read(*receiver_, got, kTokens), 2);
  EXPECT_EQ(read(*sender_, sent, kTokens), 3);
  EXPECT_EQ(receiver_->stats().chunks_copied, 0);
  EXPECT_EQ(sender_->stats().chunks_copied, 1);
  check();
}

TEST_F(HandoverTest, WhatLiesInThePoolIsCopied) {
  const Parcel parcel = sender_->try_export(filled(false)).value();
  EXPECT_EQ(parcel.num_copied, parcel.chunks.places.size());
  const VTensorId got = receiver_->try_adopt(parcel, "").value();
  EXPECT_EQ(read(*receiver_, got, 0), 1);
  check();
}

TEST_F(HandoverTest, AParcelThatDoesNotFitMapsNothing) {
  const VTensorId sent = filled(true);
  Parcel longer = sender_->try_export(sent).value();
  longer.num_tokens = 65;
  EXPECT_THROW(receiver_->try_adopt(longer, ""), std::invalid_argument);
  Parcel holed = sender_->try_export(sent).value();
  holed.is_there[0] = false;
  EXPECT_THROW(receiver_->try_adopt(holed, ""), std::invalid_argument);
  Parcel beyond = sender_->try_export(sent).value();
  beyond.chunks.places[0].offset_bytes = kGiB;
  EXPECT_ANY_THROW(receiver_->try_adopt(beyond, ""));
  EXPECT_EQ(receiver_->stats().resident_bytes, 0);
  check();
}

TEST_F(HandoverTest, ShortageIsAValueAndTheParcelStaysGood) {
  const Parcel parcel = sender_->try_export(filled(true)).value();
  const VTensorId busy = receiver_->try_create({}, "").value();
  extend(*receiver_, busy, 15 * kChunk / kKiB);
  EXPECT_FALSE(receiver_->try_adopt(parcel, ""));
  receiver_->release(busy);
  EXPECT_TRUE(receiver_->try_adopt(parcel, ""));
  check();
}

TEST_F(HandoverTest, DriversThatCannotDoItSaySo) {
  for (auto make : {make_sim, make_cuda}) {
    const auto manager = open(make(), 2 * kMiB);
    EXPECT_THROW(manager->try_create({}, "", 0, true), std::invalid_argument);
    const VTensorId id = manager->try_create({}, "").value();
    EXPECT_THROW(manager->try_export(id), std::invalid_argument);
  }
}

}  // namespace
}  // namespace vtensor
