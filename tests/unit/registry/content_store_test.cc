#include "server/registry/content_store.h"

#include <sys/resource.h>

#include <csignal>
#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "tests/testing/temporary_directory.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;

class ContentStoreTest : public ::testing::Test {
 protected:
  std::vector<std::string> Files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(path())) names.push_back(entry.path().filename());
    return names;
  }
  std::string path() const { return (directory_.path() / "blobs").string(); }

  const testing::TemporaryDirectory directory_;
  ContentStore store_ = *ContentStore::Create(path());
};

TEST_F(ContentStoreTest, ContentIsThereWholeOrNotAtAll) {
  const std::string content = "twelve bytes";
  const std::string digest = Sha256Hex(content);
  auto incoming = store_.Begin(digest, 12);
  ASSERT_TRUE(incoming.ok()) << incoming.status();
  ASSERT_TRUE((*incoming)->Append("twelve ").ok());
  EXPECT_FALSE(store_.Has(digest));
  ASSERT_TRUE((*incoming)->Append("bytes").ok());
  EXPECT_FALSE(store_.Has(digest));
  ASSERT_TRUE((*incoming)->Commit().ok());
  incoming->reset();
  EXPECT_EQ(*ReadAll(*store_.Open(digest), 100), content);
  EXPECT_THAT(Files(), ::testing::ElementsAre(digest));
}

TEST_F(ContentStoreTest, WhatIsNotWhatWasAnnouncedLeavesNothing) {
  const std::string digest = Sha256Hex("twelve bytes");
  {
    auto short_one = *store_.Begin(digest, 12);
    ASSERT_TRUE(short_one->Append("twelve").ok());
    EXPECT_EQ(ReasonOf(short_one->Commit()), reason::kMalformedFile);
    auto other = *store_.Begin(digest, 12);
    ASSERT_TRUE(other->Append("twelve BYTES").ok());
    EXPECT_EQ(ReasonOf(other->Commit()), reason::kMalformedFile);
    auto long_one = *store_.Begin(digest, 12);
    EXPECT_EQ(ReasonOf(long_one->Append("twelve bytes and more")), reason::kMalformedFile);
    auto gone = *store_.Begin(digest, 12);  // The client hangs up.
  }
  EXPECT_THAT(Files(), ::testing::IsEmpty());
}

TEST_F(ContentStoreTest, WhatAnEarlierProcessLeftUnfinishedIsRemoved) {
  directory_.Write("blobs/incoming-abc123", "half");
  ASSERT_TRUE(ContentStore::Create(path()).ok());
  EXPECT_THAT(Files(), ::testing::IsEmpty());
}

// A limit on file sizes refuses writes as a full disk does.
TEST_F(ContentStoreTest, AFullDiskIsATypedErrorAndLeavesNothing) {
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small{1000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto refused = store_.Begin(Sha256Hex("x"), 100'000);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused.status()), reason::kDiskFull);
  EXPECT_THAT(Files(), ::testing::IsEmpty());
}

}  // namespace
}  // namespace h3
