#include "server/lora/host_tier.h"

#include <gtest/gtest.h>

#include <string>

namespace h3 {
namespace {

std::shared_ptr<const HostContent> Content(const std::string& digest, size_t bytes) {
  return MakeHostContent("name of " + digest, digest, std::string(bytes, 'x'), c10::Device(c10::DeviceType::CPU));
}

TEST(HostTierTest, TheLeastRecentlyUsedGoesAndTheBudgetIsNeverExceeded) {
  HostTier tier(ByteCount(100));
  tier.Add(Content("a", 40));
  tier.Add(Content("b", 40));
  EXPECT_NE(tier.Find("a"), nullptr);  // b is the older one now.
  tier.Add(Content("c", 40));
  EXPECT_TRUE(tier.Has("a") && tier.Has("c"));
  EXPECT_FALSE(tier.Has("b"));
  ByteCount held;
  for (const AdapterResidency& adapter : tier.List()) held += adapter.bytes;
  EXPECT_EQ(held, ByteCount(80));
  EXPECT_EQ(tier.Find("b"), nullptr);
  const TierCounters counters = tier.counters();
  EXPECT_EQ(counters.hits, 1);
  EXPECT_EQ(counters.misses, 1);
  EXPECT_EQ(counters.evictions, 1);
}

TEST(HostTierTest, WhatIsLargerThanTheBudgetPushesNobodyOut) {
  HostTier tier(ByteCount(100));
  tier.Add(Content("a", 60));
  tier.Add(Content("huge", 101));
  EXPECT_TRUE(tier.Has("a"));
  EXPECT_FALSE(tier.Has("huge"));
}

TEST(HostTierTest, TheSameContentIsKeptOnceAndDroppedWhole) {
  HostTier tier(ByteCount(100));
  tier.Add(Content("a", 60));
  tier.Add(Content("a", 60));
  EXPECT_EQ(tier.List().size(), 1u);
  const auto reading = tier.Find("a");
  tier.Drop("a");
  EXPECT_FALSE(tier.Has("a"));
  EXPECT_EQ(reading->view(), std::string(60, 'x')) << "who reads it keeps it";
  tier.Add(Content("b", 100));
  EXPECT_TRUE(tier.Has("b")) << "what was dropped takes no room";
}

}  // namespace
}  // namespace h3
