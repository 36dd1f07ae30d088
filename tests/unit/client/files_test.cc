#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "client/cli/exit_code.h"
#include "client/cli/output_file.h"
#include "client/cli/request_file.h"
#include "server/base/error.h"
#include "tests/testing/golden.h"

namespace h3::ctl {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class FilesTest : public ::testing::Test {
 protected:
  FilesTest() {
    std::string pattern = (fs::temp_directory_path() / "h3ctl-test-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~FilesTest() override { fs::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  std::string Write(const std::string& name, const std::string& content) const {
    std::ofstream(Path(name), std::ios::binary) << content;
    return Path(name);
  }
  // A safetensors file of one tensor.
  std::string WriteTensor(const std::string& name, const std::string& type, size_t bytes, const std::string& metadata) const {
    std::string json = R"({"__metadata__":{)" + metadata + R"(},"text":{"dtype":")" + type + R"(","shape":[)" +
                       std::to_string(bytes / (type == "I32" ? 4 : 8)) + R"(],"data_offsets":[0,)" + std::to_string(bytes) +
                       "]}}";
    std::string length(8, '\0');
    length[0] = static_cast<char>(json.size() & 0xff);
    length[1] = static_cast<char>(json.size() >> 8);
    return Write(name, length + json + std::string(bytes, '\1'));
  }

  fs::path folder_;
};

std::vector<std::string> Names(const std::vector<client::TensorView>& tensors) {
  std::vector<std::string> names;
  for (const client::TensorView& tensor : tensors) names.push_back(tensor.name);
  return names;
}

TEST_F(FilesTest, ARequestFileGivesItsLayoutAndLogicalTensorsOnly) {
  const std::string path = testing::GoldenPath("inputs/ref2va_mixed.safetensors");
  const auto request = RequestFile::Open(path);
  ASSERT_TRUE(request.ok()) << request.status();
  const v1::Layout& layout = request->layout();
  EXPECT_EQ(layout.text_tokens(), 9);
  EXPECT_EQ(layout.latent_frames(), 2);
  EXPECT_EQ(layout.audio_latents(), 4);
  ASSERT_EQ(layout.references_size(), 4);
  EXPECT_EQ(layout.references(1).kind(), v1::REFERENCE_KIND_VIDEO);
  EXPECT_EQ(layout.references(1).latent_width(), 6);
  EXPECT_EQ(layout.references(1).audio_latents(), 5);
  EXPECT_EQ(layout.references(2).kind(), v1::REFERENCE_KIND_AUDIO);
  EXPECT_EQ(request->base_sigma(), 0.55);
  EXPECT_EQ(request->video_shift(), 12);
  EXPECT_THAT(Names(request->conditions()), ElementsAre("condition_audio.0", "condition_audio.1", "condition_video.0",
                                                        "condition_video.1", "condition_video.2", "text", "text_token_tags"));
  EXPECT_THAT(Names(request->targets()), ElementsAre("target_audio_rows", "target_video"));
  const auto golden = testing::ReadTensors(path);
  for (const auto* tensors : {&request->conditions(), &request->targets()}) {
    for (const client::TensorView& tensor : *tensors) {
      EXPECT_EQ(tensor.data, golden.at(tensor.name).data) << tensor.name;
      EXPECT_EQ(tensor.shape, golden.at(tensor.name).shape) << tensor.name;
      EXPECT_EQ(tensor.dtype, tensor.name == "text_token_tags" ? v1::DTYPE_I64 : v1::DTYPE_F32);
    }
  }
}

TEST_F(FilesTest, KeyframesArriveInOrder) {
  const auto request = RequestFile::Open(testing::GoldenPath("inputs/fl2va_first_last.safetensors"));
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_THAT(request->layout().keyframes(), ElementsAre(v1::KEYFRAME_FIRST, v1::KEYFRAME_LAST));
}

TEST_F(FilesTest, BadRequestFilesAreRefusedWithReasonAndName) {
  const std::string layout =
      R"("layout":"{\"text_tokens\":1,\"latent_frames\":1,\"latent_height\":2,\"latent_width\":2,\"audio_latents\":1}")";
  const auto refusal = [](const std::string& path) {
    const absl::Status status = RequestFile::Open(path).status();
    EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    EXPECT_EQ(ExitCode(status), 3) << status;
    return ReasonOf(status);
  };
  EXPECT_EQ(refusal(Path("missing")), "NO_SUCH_FILE");
  EXPECT_EQ(refusal(folder_.string()), "NO_SUCH_FILE");
  EXPECT_EQ(refusal(Write("empty", "")), "MALFORMED_FILE");
  EXPECT_EQ(refusal(Write("text", "not a safetensors file at all")), "MALFORMED_FILE");
  EXPECT_EQ(refusal(WriteTensor("bare", "I64", 8, "")), "BAD_LAYOUT");
  EXPECT_EQ(refusal(WriteTensor("broken_layout", "I64", 8, R"("layout":"{")")), "BAD_LAYOUT");
  EXPECT_EQ(refusal(WriteTensor("wrong_type", "I32", 8, layout)), "BAD_TENSOR");
  EXPECT_TRUE(RequestFile::Open(WriteTensor("good", "I64", 8, layout)).ok());
}

std::vector<client::Tensor> SomeTensors() {
  return {
      {.name = "video", .dtype = v1::DTYPE_F32, .shape = {2, 1}, .data = std::string("\x00\x00\x80\x3f\x00\x00\x00\x40", 8)},
      {.name = "audio", .dtype = v1::DTYPE_F32, .shape = {1}, .data = std::string("\x00\x00\x40\x40", 4)},
      {.name = "none", .dtype = v1::DTYPE_F64, .shape = {0, 3}, .data = ""}};
}

TEST_F(FilesTest, WrittenTensorsAreReadBackAsTheyWere) {
  ASSERT_TRUE(WriteSafetensors(Path("out.safetensors"), SomeTensors()).ok());
  const auto read = testing::ReadTensors(Path("out.safetensors"));
  ASSERT_THAT(read, SizeIs(3));
  EXPECT_THAT(testing::Values(read.at("video")), ElementsAre(1, 2));
  EXPECT_THAT(read.at("video").shape, ElementsAre(2, 1));
  EXPECT_THAT(testing::Values(read.at("audio")), ElementsAre(3));
  EXPECT_THAT(read.at("none").shape, ElementsAre(0, 3));
}

TEST_F(FilesTest, WritingReplacesTheOldFileAndLeavesNothingElse) {
  Write("out.safetensors", "old");
  ASSERT_TRUE(WriteSafetensors(Path("out.safetensors"), SomeTensors()).ok());
  EXPECT_THAT(testing::ReadTensors(Path("out.safetensors")), SizeIs(3));
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(FilesTest, AFailedWriteLeavesNothingBehind) {
  fs::create_directory(Path("out.safetensors"));  // A rename over a folder fails.
  EXPECT_FALSE(WriteSafetensors(Path("out.safetensors"), SomeTensors()).ok());
  EXPECT_EQ(std::distance(fs::directory_iterator(folder_), fs::directory_iterator()), 1);
}

TEST_F(FilesTest, OutputPathsThatCannotBeWrittenAreRefusedEarly) {
  EXPECT_TRUE(CheckOutputPath(Path("new")).ok());
  EXPECT_TRUE(CheckOutputPath("relative.safetensors").ok());
  const std::vector<std::pair<std::string, std::string>> refused = {
      {Path("no/folder/out"), "there is no folder"}, {folder_.string(), "that is a folder; name a file in it"},
      {"", "the name of a file"},
      {Path(std::string(300, 'x')), "File name too long"}};
  for (const auto& [path, message] : refused) {
    const absl::Status status = CheckOutputPath(path);
    EXPECT_EQ(ExitCode(status), 2) << path << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

TEST_F(FilesTest, DevicesAndPipesAreWrittenIntoAndStayWhatTheyAre) {
  ASSERT_TRUE(CheckOutputPath("/dev/null").ok());
  EXPECT_TRUE(WriteSafetensors("/dev/null", SomeTensors()).ok());
  EXPECT_TRUE(fs::is_character_file("/dev/null"));
  EXPECT_FALSE(WriteSafetensors("/dev/full", SomeTensors()).ok());

  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0600), 0);
  ASSERT_TRUE(CheckOutputPath(Path("pipe")).ok());
  const int reader = open(Path("pipe").c_str(), O_RDONLY | O_NONBLOCK);
  ASSERT_TRUE(WriteSafetensors(Path("pipe"), SomeTensors()).ok());
  std::string bytes(4096, '\0');
  bytes.resize(static_cast<size_t>(std::max<ssize_t>(0, read(reader, bytes.data(), bytes.size()))));
  close(reader);
  Write("copy", bytes);
  EXPECT_THAT(testing::ReadTensors(Path("copy")), SizeIs(3));
}

}  // namespace
}  // namespace h3::ctl
