#include "server/format/safetensors.h"

#include <limits>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "tests/testing/golden.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/temporary_directory.h"

namespace h3 {
namespace {

using testing::BuildSafetensors;
using testing::RawSafetensors;
using testing::Zeros;

absl::StatusOr<SafetensorsHeader> Parse(const std::string& file) {
  return ParseSafetensorsHeader(file, static_cast<int64_t>(file.size()));
}

std::string WithLength(uint64_t length, const std::string& rest) {
  std::string file = RawSafetensors("", rest);
  std::memcpy(file.data(), &length, sizeof(length));
  return file;
}

// A file of one tensor whose entry is `entry`, with `bytes` bytes of data.
std::string OneEntry(const std::string& entry, size_t bytes = 4) {
  return RawSafetensors("{\"a\":" + entry + "}", std::string(bytes, '\0'));
}

struct Malformed {
  std::string name;
  std::string file;
};

std::vector<Malformed> MalformedFiles() {
  const std::string sound = BuildSafetensors({Zeros("a", {2, 2}), Zeros("b", {3})});
  const std::string scalar = R"({"dtype":"F32","shape":[],"data_offsets":[0,4]})";
  return {
      {"Empty", ""},
      {"SevenBytes", std::string(7, '\0')},
      {"OnlyALength", std::string(8, '\0')},
      {"OnlyZeros", std::string(4096, '\0')},
      {"LengthAllOnes", WithLength(std::numeric_limits<uint64_t>::max(), "{}")},
      {"LengthWrapsWhenAdded", WithLength(std::numeric_limits<uint64_t>::max() - 7, "{}")},
      {"LengthTwoTo63", WithLength(uint64_t{1} << 63, "{}")},
      {"LengthAboveTheCap", WithLength(static_cast<uint64_t>(kMaxHeaderBytes) + 1, "{}")},
      {"LengthBeyondTheFile", WithLength(3, "{}")},
      {"LengthZero", WithLength(0, "{}")},
      {"NotUtf8",
       RawSafetensors("{\"\xff\xfe\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", std::string(4, '\0'))},
      {"NotJson", RawSafetensors("{nonsense")},
      {"TextAfterTheObject", RawSafetensors("{}{}")},
      {"ArrayAtTop", RawSafetensors("[]")},
      {"DeepArrays", OneEntry(std::string(100'000, '['))},
      {"DeepShapes", OneEntry("{\"shape\":" + std::string(100'000, '['))},
      {"DeepObjects", RawSafetensors([] {
         std::string text;
         for (int i = 0; i < 100'000; ++i) text += "{\"a\":";
         return text;
       }())},
      {"DuplicateName", RawSafetensors("{\"a\":" + scalar + ",\"a\":" + scalar + "}", std::string(4, '\0'))},
      {"DuplicateMetadata", RawSafetensors(R"({"__metadata__":{},"__metadata__":{}})")},
      {"DuplicateField", OneEntry(R"({"dtype":"F32","dtype":"F32","shape":[],"data_offsets":[0,4]})")},
      {"MetadataNumber", RawSafetensors(R"({"__metadata__":{"a":1}})")},
      {"MetadataNested", RawSafetensors(R"({"__metadata__":{"a":{"b":"c"}}})")},
      {"NoOffsets", OneEntry(R"({"dtype":"F32","shape":[]})")},
      {"OneOffset", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[4]})")},
      {"ThreeOffsets", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[0,4,8]})")},
      {"NegativeOffset", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[-4,0]})")},
      {"OffsetsBackwards", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[4,0]})")},
      {"FractionalOffsets", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[0.0,4.0]})")},
      {"OffsetsPastTheEnd", OneEntry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})")},
      {"OffsetAboveInt64", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[0,18446744073709551615]})")},
      {"Overlap", RawSafetensors("{\"a\":" + scalar + ",\"b\":" + scalar + "}", std::string(4, '\0'))},
      {"GapBefore", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[4,8]})", 8)},
      {"TrailingBytes", sound + "x"},
      {"TruncatedInTheLastTensor", sound.substr(0, sound.size() - 1)},
      {"ShapeOverflows", OneEntry(R"({"dtype":"F32","shape":[8589934592,8589934592],"data_offsets":[0,4]})")},
      {"ShapeOfOtherSize", OneEntry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})")},
      {"NegativeShape", OneEntry(R"({"dtype":"F32","shape":[-1],"data_offsets":[0,4]})")},
      {"RankNine", OneEntry(R"({"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]})")},
      {"UnknownDtype", OneEntry(R"({"dtype":"F4","shape":[],"data_offsets":[0,4]})")},
      {"UnknownField", OneEntry(R"({"dtype":"F32","shape":[],"data_offsets":[0,4],"more":1})")},
      {"EntryIsText", OneEntry("\"F32\"")},
      {"EntryIsNull", OneEntry("null")},
  };
}

class MalformedSafetensors : public ::testing::TestWithParam<Malformed> {};

TEST_P(MalformedSafetensors, IsRefusedFromMemory) {
  const auto header = Parse(GetParam().file);
  ASSERT_FALSE(header.ok());
  EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument) << header.status();
  EXPECT_EQ(ReasonOf(header.status()), reason::kMalformedFile) << header.status();
}

TEST_P(MalformedSafetensors, IsRefusedFromDisk) {
  const testing::TemporaryDirectory directory;
  const auto header = ReadSafetensorsHeader(directory.Write("a.safetensors", GetParam().file));
  ASSERT_FALSE(header.ok());
  EXPECT_EQ(ReasonOf(header.status()), reason::kMalformedFile) << header.status();
}

INSTANTIATE_TEST_SUITE_P(D3, MalformedSafetensors, ::testing::ValuesIn(MalformedFiles()),
                         [](const auto& info) { return info.param.name; });

TEST(SafetensorsTest, ReadsTensorsByNameWithTheirPlaceInTheFile) {
  const std::string file =
      BuildSafetensors({Zeros("b", {2, 3}, DType::kBF16), Zeros("a", {}, DType::kF64)}, {{"format", "pt"}});
  const auto header = Parse(file);
  ASSERT_TRUE(header.ok()) << header.status();
  ASSERT_EQ(header->tensors.size(), 2u);
  EXPECT_EQ(header->tensors[0].name, "a");
  EXPECT_EQ(header->tensors[0].dtype, DType::kF64);
  EXPECT_EQ(header->tensors[0].offset + 8, header->file_bytes);
  const TensorInfo* b = header->Find("b");
  ASSERT_NE(b, nullptr);
  EXPECT_EQ(b->shape, (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(b->bytes, 12);
  EXPECT_EQ(b->offset + b->bytes, header->tensors[0].offset);
  EXPECT_EQ(header->Find("c"), nullptr);
  EXPECT_EQ(header->metadata.at("format"), "pt");
}

TEST(SafetensorsTest, TensorsWithoutElementsAreSound) {
  const auto header = Parse(BuildSafetensors({Zeros("a", {0, 5}), Zeros("b", {2}), Zeros("c", {0})}));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->Find("a")->bytes, 0);
}

TEST(SafetensorsTest, SpacesThatPadTheHeaderAreSound) { EXPECT_TRUE(Parse(RawSafetensors("{}   ")).ok()); }

TEST(SafetensorsTest, NamesTheTensorThatIsWrong) {
  const auto header = Parse(OneEntry(R"({"dtype":"F32","shape":[2],"data_offsets":[0,4]})"));
  EXPECT_EQ(DetailsOf(header.status())["tensor"], "a");
}

struct Other {
  std::string looks_like;
  std::string file;
  std::string message;
};

class OtherFormats : public ::testing::TestWithParam<Other> {};

TEST_P(OtherFormats, AreNamedWithWhatToDo) {
  const testing::TemporaryDirectory directory;
  const std::string path = directory.Write("a.safetensors", GetParam().file);
  for (const auto& header : {Parse(GetParam().file), ReadSafetensorsHeader(path)}) {
    EXPECT_EQ(header.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(ReasonOf(header.status()), reason::kMalformedFile);
    EXPECT_EQ(DetailsOf(header.status())["looks_like"], GetParam().looks_like);
    EXPECT_THAT(std::string(header.status().message()), ::testing::HasSubstr(GetParam().message));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, OtherFormats,
    ::testing::Values(Other{"empty", "", "download it again"},
                      Other{"git-lfs-pointer", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git lfs pull"},
                      Other{"html", "<!DOCTYPE html><title>Sign in</title>", "log in, or take the direct link"},
                      Other{"html", "\xef\xbb\xbf\r\n  <HTML>", "web page"}, Other{"html", "<html>", "web page"},
                      Other{"zip", std::string("PK\x03\x04\x14\0\0\0\0\0", 10), "convert the checkpoint to safetensors"},
                      Other{"zip", std::string("PK\x03\x04\0\0\0\0\0\0", 10), "zip archive"},  // A length that would be read.
                      Other{"pickle", "\x80\x02}q\x01.", "Python pickle"},
                      Other{"pickle", "\x80\x04" + std::string(100, 'x'), "never loaded"},
                      Other{"gguf", std::string("GGUF\x03\0\0\0\0\0\0\0", 12), "get the safetensors version"},
                      Other{"gguf", "GGUF", "GGUF file"}));

TEST(SafetensorsTest, ACutDownloadSaysHowMuchIsThereAndHowMuchIsMissing) {
  const std::string whole = BuildSafetensors({Zeros("a", {2, 2}), Zeros("b", {100})});
  const testing::TemporaryDirectory directory;
  for (const size_t missing : {size_t{1}, size_t{400}, size_t{410}}) {  // In b, all of b, in a.
    const std::string cut = whole.substr(0, whole.size() - missing);
    for (const auto& header : {Parse(cut), ReadSafetensorsHeader(directory.Write("a.safetensors", cut))}) {
      EXPECT_EQ(ReasonOf(header.status()), reason::kMalformedFile);
      EXPECT_THAT(std::string(header.status().message()),
                  ::testing::HasSubstr(
                      absl::StrCat(cut.size(), " bytes are there, ", missing, " are missing; download it again")));
      ErrorDetails details = DetailsOf(header.status());
      EXPECT_EQ(details["looks_like"], "truncated");
      EXPECT_EQ(details["missing_bytes"], absl::StrCat(missing));
    }
  }
  const auto in_the_header = Parse(whole.substr(0, 20));
  EXPECT_THAT(std::string(in_the_header.status().message()), ::testing::HasSubstr("20 bytes are there, at least "));
  EXPECT_EQ(DetailsOf(in_the_header.status())["looks_like"], "truncated");
}

TEST(SafetensorsTest, AnAbsentFileOrADirectoryIsNotFound) {
  const testing::TemporaryDirectory directory;
  EXPECT_EQ(ReadSafetensorsHeader((directory.path() / "absent").string()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReadSafetensorsHeader(directory.path().string()).status().code(), absl::StatusCode::kNotFound);
}

TEST(SafetensorsTest, DiskAndMemoryAgreeOnTheGoldenModel) {
  const auto header = ReadSafetensorsHeader(testing::GoldenPath("full/model.safetensors"));
  ASSERT_TRUE(header.ok()) << header.status();
  EXPECT_EQ(header->tensors.size(), testing::ReadTensors(testing::GoldenPath("full/model.safetensors")).size());
}

}  // namespace
}  // namespace h3
