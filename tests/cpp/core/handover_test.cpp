// KV that one manager hands to another: the same memory, written on by one of them alone; what does
// not fit is refused before anything is mapped, and so is a driver that cannot do it.
#include "vtensor/core/handover.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "tests/cpp/support/drivers.h"
#include "tests/cpp/support/gated_driver.h"
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

struct HandoverCase {
  std::string name;
  std::function<std::unique_ptr<Driver>()> make;
};

class HandoverTest : public testing::TestWithParam<HandoverCase> {
 protected:
  static std::unique_ptr<Driver> make() { return GetParam().make(); }
  // After each test nothing is left in the stand-in, and no rule of CUDA's was broken.
  void TearDown() override {
    sender_.reset();
    receiver_.reset();
    EXPECT_EQ(standin_.live(nullptr), 0);
    EXPECT_EQ(standin_.live("bytes"), 0);
    EXPECT_EQ(standin_.violations(), 0) << standin_.last_violation();
    standin_.reset();
  }
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

  StandinControl standin_;
  std::shared_ptr<Manager> sender_ = open(make());
  std::shared_ptr<Manager> receiver_ = open(make());
};

TEST_P(HandoverTest, WhatLiesApartIsTheSameMemoryThere) {
  const VTensorId sent = filled(true);
  const Parcel parcel = sender_->try_export(sent).value();
  EXPECT_EQ(parcel.num_copied, 0);
  EXPECT_EQ(parcel.chunks.files.size(), GetParam().name == "Cuda" ? 3 : 1);
  const VTensorId got = receiver_->try_adopt(parcel, "").value();
  EXPECT_EQ(receiver_->info(got).num_tokens, kTokens);
  EXPECT_EQ(read(*receiver_, got, kTokens - 1), 1);
  check();
}

TEST_P(HandoverTest, EachGoesOnWithoutTheOther) {
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

TEST_P(HandoverTest, WhatLiesInThePoolIsCopied) {
  const Parcel parcel = sender_->try_export(filled(false)).value();
  EXPECT_EQ(parcel.num_copied, parcel.chunks.places.size());
  const VTensorId got = receiver_->try_adopt(parcel, "").value();
  EXPECT_EQ(read(*receiver_, got, 0), 1);
  check();
}

TEST_P(HandoverTest, AParcelThatDoesNotFitMapsNothing) {
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

TEST_P(HandoverTest, ShortageIsAValueAndTheParcelStaysGood) {
  const Parcel parcel = sender_->try_export(filled(true)).value();
  const VTensorId busy = receiver_->try_create({}, "").value();
  extend(*receiver_, busy, 15 * kChunk / kKiB);
  EXPECT_FALSE(receiver_->try_adopt(parcel, ""));
  receiver_->release(busy);
  EXPECT_TRUE(receiver_->try_adopt(parcel, ""));
  check();
}

TEST_P(HandoverTest, OthersGoOnWhileItIsCopied) {
  auto gated = std::make_unique<GatedDriver>(make());
  GatedDriver& gate = *gated;
  sender_ = open(std::move(gated));
  const VTensorId sent = filled(false);
  const VTensorId other = sender_->try_create({}, "").value();
  gate.arm(CallKind::kCopy);
  auto parcel = std::async(std::launch::async, [&] { return sender_->try_export(sent); });
  gate.entered.get_future().wait();
  auto others = std::async(std::launch::async, [&] {
    extend(*sender_, other, kTokens);
    sender_->check_integrity();
  });
  auto itself = std::async(std::launch::async, [&] { extend(*sender_, sent, kTokens + 1); });
  EXPECT_EQ(others.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  EXPECT_EQ(itself.wait_for(std::chrono::milliseconds(20)), std::future_status::timeout);
  gate.may_pass.set_value();
  EXPECT_EQ(parcel.get()->num_tokens, kTokens);
  others.get();
  itself.get();
  EXPECT_EQ(sender_->info(sent).num_tokens, kTokens + 1);
  check();
}

// Beside a prefix that stands apart a chunk of the pool's has to be copied, and meanwhile somebody
// writes on in that prefix: it is no longer to be sent as it is.
TEST_P(HandoverTest, WhatAnotherWritesToWhileItIsCopiedIsCopiedToo) {
  auto gated = std::make_unique<GatedDriver>(make());
  GatedDriver& gate = *gated;
  sender_ = open(std::move(gated));
  const std::vector<Token> tokens(2 * kChunk / kKiB, 7);
  const VTensorId first = sender_->try_create({}, "", 0, true).value();
  write(*sender_, first, 0, tokens.size(), 1);
  sender_->record_prefix(first, tokens);
  const VTensorId sent = sender_->try_create(tokens, "").value();
  write(*sender_, sent, tokens.size(), kTokens, 1);
  gate.arm(CallKind::kCopy);
  auto parcel = std::async(std::launch::async, [&] { return sender_->try_export(sent); });
  gate.entered.get_future().wait();
  write(*sender_, first, tokens.size(), kTokens, 2);  // in the file of the prefix
  gate.may_pass.set_value();
  EXPECT_EQ(parcel.get()->num_copied, 3);
  check();
}

TEST_P(HandoverTest, ADriverThatFailsLeavesAllAsItWas) {
  for (const auto kind : {FaultPlan::Kind::kDriverError, FaultPlan::Kind::kOutOfMemory}) {
    auto faulty = std::make_unique<FaultyDriver>(make());
    FaultyDriver& faults = *faulty;
    sender_ = open(std::move(faulty));
    const VTensorId sent = filled(false);
    std::optional<Parcel> parcel;
    for (int64_t k = 1; !parcel; ++k) {
      faults.set_plan({.fail_at = k, .kind = kind});
      try {
        parcel = sender_->try_export(sent);
      } catch (const DriverError&) {
      }
      faults.set_plan({});
      check();
    }
    EXPECT_GE(faults.num_failed(), 7);  // three chunks created, three copied, and sent
    EXPECT_EQ(read(*receiver_, receiver_->try_adopt(*parcel, "").value(), 0), 1);
    sender_->trim();  // copies that the driver did not take back
    EXPECT_EQ(sender_->stats().resident_bytes, 3 * kChunk);
  }
}

TEST_P(HandoverTest, WhatTheSenderHasReleasedStays) {
  const VTensorId sent = filled(true);
  Parcel parcel = sender_->try_export(sent).value();
  sender_->release(sent);
  sender_->close();
  const VTensorId got = receiver_->try_adopt(parcel, "").value();
  EXPECT_EQ(read(*receiver_, got, kTokens - 1), 1);
  const Parcel again = receiver_->try_export(got).value();  // and goes on to somebody else
  EXPECT_EQ(again.chunks.places.size(), 3);
  receiver_->release(got);
  receiver_->trim();
  EXPECT_EQ(receiver_->stats().resident_bytes, 0);
}

TEST_P(HandoverTest, AFileThatHoldsNoChunkIsRefused) {
  Parcel parcel = sender_->try_export(filled(true)).value();
  parcel.chunks.files.back() = FileDescriptor(::open("/dev/null", O_RDWR | O_CLOEXEC));
  EXPECT_THROW(receiver_->try_adopt(parcel, ""), std::invalid_argument);
  EXPECT_EQ(receiver_->stats().resident_bytes, 0);
  check();
}

std::unique_ptr<Driver> make_cuda_of_small_chunks() {
  StandinControl().set_granularity(kChunk);
  return make_cuda();
}

INSTANTIATE_TEST_SUITE_P(Drivers, HandoverTest,
                         testing::Values(HandoverCase{"Host", [] { return make_host(); }},
                                         HandoverCase{"Cuda", make_cuda_of_small_chunks}),
                         [](const auto& info) { return info.param.name; });

// One call of CUDA's fails, the first, the second ...: what was taken in before is given back.
void adopt_while_one_call_fails(StandinControl& standin, const char* call) {
  const auto sender = open(make_cuda_of_small_chunks());
  const auto receiver = open(make_cuda_of_small_chunks());
  const VTensorId sent = sender->try_create({}, "", 0, true).value();
  sender->extend({&sent, 1}, {&kTokens, 1});
  const Parcel parcel = sender->try_export(sent).value();
  bool is_adopted = false;
  int k = 0;
  while (!is_adopted) {
    standin.fail(call, ++k, cuda::CUDA_ERROR_UNKNOWN);
    try {
      is_adopted = receiver->try_adopt(parcel, "").has_value();
    } catch (const std::exception&) {
      EXPECT_EQ(receiver->stats().resident_bytes, 0) << call << " " << k;
      EXPECT_EQ(standin.live("handle"), 3) << call << " " << k;  // the sender's
    }
    receiver->check_integrity();
  }
  EXPECT_GT(k, 3) << call;  // there are three chunks
}

TEST(CudaHandoverTest, AReceiverWhoseDriverFailsHasTakenNothing) {
  StandinControl standin;
  for (const char* call : {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"}) {
    adopt_while_one_call_fails(standin, call);
    EXPECT_EQ(standin.live(nullptr), 0) << call;
    EXPECT_EQ(standin.violations(), 0) << standin.last_violation();
    standin.reset();
  }
}

TEST(HandoverRefusalTest, DriversThatCannotDoItSaySo) {
  StandinControl standin;
  standin.set_attribute(cuda::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 0);
  for (auto make : {make_sim, make_cuda}) {
    const auto manager = open(make(), 2 * kMiB);
    EXPECT_THROW(manager->try_create({}, "", 0, true), std::invalid_argument);
    const VTensorId id = manager->try_create({}, "").value();
    EXPECT_THROW(manager->try_export(id), std::invalid_argument);
  }
  standin.reset();
}

}  // namespace
}  // namespace vtensor
