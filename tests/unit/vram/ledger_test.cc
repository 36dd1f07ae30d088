#include "server/vram/ledger.h"

#include <set>
#include <string>
#include <thread>
#include <vector>

#include "gtest/gtest.h"

namespace h3 {
namespace {

ByteCount SumOfOwners(const LedgerSnapshot& snapshot) {
  ByteCount sum;
  for (const ByteCount bytes : snapshot.owners) sum += bytes;
  return sum;
}

TEST(VramLedgerTest, StartsEmpty) {
  const VramLedger ledger("cuda:0");
  EXPECT_EQ(ledger.device(), "cuda:0");
  EXPECT_EQ(ledger.Snapshot().used, ByteCount(0));
  EXPECT_EQ(ledger.Snapshot().peak, ByteCount(0));
}

TEST(VramLedgerTest, EveryByteHasOneOwner) {
  VramLedger ledger("cpu");
  ledger.Add(Owner::kBaseWeights, MiB(10));
  ledger.Add(Owner::kAdapters, MiB(2));
  ledger.Remove(Owner::kAdapters, MiB(1));
  const LedgerSnapshot snapshot = ledger.Snapshot();
  EXPECT_EQ(snapshot.of(Owner::kBaseWeights), MiB(10));
  EXPECT_EQ(snapshot.of(Owner::kAdapters), MiB(1));
  EXPECT_EQ(snapshot.of(Owner::kActivations), ByteCount(0));
  EXPECT_EQ(snapshot.used, MiB(11));
  EXPECT_EQ(snapshot.used, SumOfOwners(snapshot));
}

TEST(VramLedgerTest, ThePeakStaysUntilItIsReset) {
  VramLedger ledger("cpu");
  ledger.Add(Owner::kActivations, MiB(8));
  ledger.Remove(Owner::kActivations, MiB(6));
  EXPECT_EQ(ledger.Snapshot().peak, MiB(8));
  ledger.ResetPeak();
  EXPECT_EQ(ledger.Snapshot().peak, MiB(2));
  ledger.Add(Owner::kActivations, MiB(1));
  EXPECT_EQ(ledger.Snapshot().peak, MiB(3));
}

TEST(VramLedgerTest, WhatWasEverAddedOnlyGrows) {
  VramLedger ledger("cpu");
  for (int i = 0; i < 3; ++i) {
    ledger.Add(Owner::kAdapters, MiB(1));
    ledger.Remove(Owner::kAdapters, MiB(1));
  }
  EXPECT_EQ(ledger.Snapshot().added_to(Owner::kAdapters), MiB(3));
  EXPECT_EQ(ledger.Snapshot().added_to(Owner::kCaches), ByteCount(0));
  EXPECT_EQ(ledger.Snapshot().used, ByteCount(0));
}

TEST(VramLedgerTest, OwnersHaveNamesOfTheirOwn) {
  std::set<std::string> names;
  for (int i = 0; i < kOwners; ++i) names.insert(std::string(OwnerName(static_cast<Owner>(i))));
  EXPECT_EQ(names.size(), static_cast<size_t>(kOwners));
  EXPECT_EQ(OwnerName(Owner::kBaseWeights), "base_weights");
  EXPECT_EQ(OwnerName(Owner::kUnattributed), "unattributed");
}

TEST(VramLedgerTest, SnapshotsAgreeWithThemselvesWhileOthersAllocate) {
  VramLedger ledger("cpu");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger, owner = static_cast<Owner>(t)] {
      for (int i = 0; i < 2000; ++i) {
        ledger.Add(owner, ByteCount(100));
        const LedgerSnapshot snapshot = ledger.Snapshot();
        EXPECT_EQ(snapshot.used, SumOfOwners(snapshot));
        EXPECT_GE(snapshot.peak, snapshot.used);
        ledger.Remove(owner, ByteCount(100));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(ledger.Snapshot().used, ByteCount(0));
  EXPECT_GE(ledger.Snapshot().peak, ByteCount(100));
  EXPECT_LE(ledger.Snapshot().peak, ByteCount(400));
}

TEST(VramLedgerDeathTest, RemovingMoreThanIsThereIsABugOfOurs) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  VramLedger ledger("cpu");
  ledger.Add(Owner::kCaches, ByteCount(1));
  EXPECT_DEATH(ledger.Remove(Owner::kCaches, ByteCount(2)), "left >= 0");
}

TEST(OwnerScopeTest, ScopesNestAndEnd) {
  EXPECT_EQ(OwnerScope::Current(), Owner::kUnattributed);
  {
    const OwnerScope outer(Owner::kActivations);
    EXPECT_EQ(OwnerScope::Current(), Owner::kActivations);
    {
      const OwnerScope inner(Owner::kWorkspace);
      EXPECT_EQ(OwnerScope::Current(), Owner::kWorkspace);
    }
    EXPECT_EQ(OwnerScope::Current(), Owner::kActivations);
  }
  EXPECT_EQ(OwnerScope::Current(), Owner::kUnattributed);
}

TEST(OwnerScopeTest, AScopeIsOfItsThread) {
  const OwnerScope scope(Owner::kAdapters);
  std::thread([] { EXPECT_EQ(OwnerScope::Current(), Owner::kUnattributed); }).join();
  EXPECT_EQ(OwnerScope::Current(), Owner::kAdapters);
}

}  // namespace
}  // namespace h3
