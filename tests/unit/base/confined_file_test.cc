#include "server/base/confined_file.h"

#include <sys/stat.h>

#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "tests/testing/temporary_directory.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;

// root/secret beside root/adapters, which holds what strangers may name.
class ConfinedFileTest : public ::testing::Test {
 protected:
  ConfinedFileTest() {
    directory_.Write("secret", "secret");
    directory_.Write("adapters/a.safetensors", "content");
    directory_.Write("adapters/sub/b", "below");
  }

  absl::StatusOr<FileDescriptor> Open(const std::string& name) { return OpenConfined((root_ / "adapters").string(), name); }
  absl::StatusOr<std::string> Content(const std::string& name) {
    const auto file = Open(name);
    if (!file.ok()) return file.status();
    return ReadAll(*file, 1000);
  }
  // What a stranger is told of a name that leads nowhere: the name, and never where it would have led.
  void ExpectNotFound(const std::string& name) {
    const auto file = Open(name);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kNotFound) << name;
    EXPECT_EQ(ReasonOf(file.status()), reason::kUnknownAdapter) << name;
    EXPECT_THAT(std::string(file.status().message()), ::testing::Not(::testing::HasSubstr(root_.string())));
  }

  const testing::TemporaryDirectory directory_;
  const fs::path root_ = directory_.path();
};

TEST_F(ConfinedFileTest, OpensWhatIsInTheDirectory) {
  EXPECT_EQ(Content("a.safetensors").value(), "content");
  EXPECT_EQ(Content("sub/b").value(), "below");
  EXPECT_TRUE(OpenConfined((root_ / "adapters").string(), "a", ".safetensors").ok());
}

TEST_F(ConfinedFileTest, NamesThatAreNoPlainRelativePathsAreRefused) {
  const std::string nul("a\0b", 3);
  for (const std::string& name :
       {std::string(), std::string(".."), std::string("."), std::string("../secret"), std::string("sub/../../secret"),
        std::string("sub/../a.safetensors"), std::string("/etc/passwd"), (root_ / "secret").string(), std::string("sub//b"),
        std::string("sub/"), std::string("./a.safetensors"), std::string("..\\secret"), std::string("%2e%2e/secret"),
        std::string("a\nb"), std::string("a\x7f"), nul, std::string("a.safetensors\0", 14), std::string(300, 'a')}) {
    const auto file = Open(name);
    EXPECT_EQ(file.status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(ReasonOf(file.status()), reason::kUnknownAdapter) << name;
    EXPECT_THAT(std::string(file.status().message()), ::testing::Not(::testing::HasSubstr(root_.string())));
  }
}

TEST_F(ConfinedFileTest, TheLongestNameHas255Bytes) {
  EXPECT_TRUE(CheckConfinedName(std::string(255, 'a')).ok());
  EXPECT_FALSE(CheckConfinedName(std::string(256, 'a')).ok());
  EXPECT_TRUE(CheckConfinedName("Stil_\xc3\xbc"
                                "ber alles v2.safetensors")
                  .ok());
}

TEST_F(ConfinedFileTest, ALookAlikeOfDotsIsANameLikeAnyOther) {
  ExpectNotFound("\xef\xbc\x8e\xef\xbc\x8e/secret");  // Full-width dots.
}

TEST_F(ConfinedFileTest, LinksMayNotLeaveTheDirectory) {
  fs::create_symlink("../secret", root_ / "adapters" / "relative");
  fs::create_symlink(root_ / "secret", root_ / "adapters" / "absolute");
  fs::create_directory_symlink("..", root_ / "adapters" / "up");
  fs::create_symlink("loop", root_ / "adapters" / "loop");
  fs::create_symlink("nowhere", root_ / "adapters" / "dangling");
  for (const char* name : {"relative", "absolute", "up/secret", "loop", "dangling"}) ExpectNotFound(name);
}

TEST_F(ConfinedFileTest, LinksWithinTheDirectoryAreFollowed) {
  fs::create_symlink("sub/b", root_ / "adapters" / "inside");
  EXPECT_EQ(Content("inside").value(), "below");
}

TEST_F(ConfinedFileTest, AFifoIsNeitherOpenedNorWaitedFor) {
  ASSERT_EQ(mkfifo((root_ / "adapters" / "fifo").c_str(), 0600), 0);
  ExpectNotFound("fifo");
}

TEST_F(ConfinedFileTest, DirectoriesAndAbsentFilesAreNotFound) {
  ExpectNotFound("sub");
  ExpectNotFound("absent");
  ExpectNotFound("a.safetensors/b");
  EXPECT_EQ(OpenConfined((root_ / "no-directory").string(), "a").status().code(), absl::StatusCode::kNotFound);
}

TEST_F(ConfinedFileTest, AnOpenFileStaysWhatItWasWhenItsNameIsReplaced) {
  const auto file = Open("a.safetensors");
  ASSERT_TRUE(file.ok());
  directory_.Write("adapters/new", "another file");
  fs::rename(root_ / "adapters" / "new", root_ / "adapters" / "a.safetensors");
  EXPECT_EQ(ReadAll(*file, 1000).value(), "content");
}

TEST_F(ConfinedFileTest, ReadsAtMostWhatItMay) {
  const auto file = Open("a.safetensors");
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(ReadAll(*file, 7).value(), "content");
  EXPECT_EQ(ReadAll(*file, 6).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReadBegin(*file, 3).value(), "con");
  EXPECT_EQ(ReadBegin(*file, 100).value(), "content");
}

}  // namespace
}  // namespace h3
