#include "server/registry/state_store.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testing/temporary_directory.h"

namespace h3 {
namespace {

TEST(StateStoreTest, RecordsSurviveTheProcessThatWroteThem) {
  const testing::TemporaryDirectory directory;
  const std::string path = (directory.path() / "state.sqlite").string();
  const std::string binary("a\0b\xff", 4);
  {
    auto store = *StateStore::Open(path);
    ASSERT_TRUE(store->Put("kind", "key", "first").ok());
    ASSERT_TRUE(store->Put("kind", "key", binary).ok());
    ASSERT_TRUE(store->Put("kind", "gone", "x").ok());
    ASSERT_TRUE(store->Put("other", "key", "").ok());
    ASSERT_TRUE(store->Remove("kind", "gone").ok());
    ASSERT_TRUE(store->Remove("kind", "never").ok());
  }
  auto store = *StateStore::Open(path);
  EXPECT_EQ(store->Get("kind", "key")->value(), binary);
  EXPECT_EQ(store->Get("other", "key")->value(), "");
  EXPECT_FALSE(store->Get("kind", "gone")->has_value());
  EXPECT_THAT(*store->List("kind"), ::testing::ElementsAre(std::pair<const std::string, std::string>("key", binary)));
}

TEST(StateStoreTest, HasOneOwner) {
  const testing::TemporaryDirectory directory;
  const std::string path = (directory.path() / "state.sqlite").string();
  auto first = StateStore::Open(path);
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(StateStore::Open(path, absl::ZeroDuration()).status().code(), absl::StatusCode::kFailedPrecondition);
  first->reset();
  EXPECT_TRUE(StateStore::Open(path, absl::ZeroDuration()).ok());
}

TEST(StateStoreTest, RefusesWhatIsNoDatabase) {
  const testing::TemporaryDirectory directory;
  EXPECT_FALSE(StateStore::Open(directory.Write("state.sqlite", std::string(5000, 'x'))).ok());
  EXPECT_FALSE(StateStore::Open((directory.path() / "absent" / "state.sqlite").string()).ok());
}

}  // namespace
}  // namespace h3
