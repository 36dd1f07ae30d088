#include "proto/support/tensor_stream.h"

#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"

namespace h3 {
namespace {

using ::testing::ElementsAre;

void Announce(TensorSpecs& specs, const std::string& name, v1::DType dtype, const std::vector<int64_t>& shape, uint64_t bytes) {
  v1::TensorSpec& spec = *specs.Add();
  spec.set_name(name);
  spec.set_dtype(dtype);
  for (const int64_t size : shape) spec.add_shape(size);
  spec.set_bytes(bytes);
}

// Announced float32 vectors of these many elements: "t0", "t1", ...
TensorSpecs Vectors(const std::vector<int64_t>& sizes) {
  TensorSpecs specs;
  for (size_t i = 0; i < sizes.size(); ++i)
    Announce(specs, absl::StrCat("t", i), v1::DTYPE_F32, {sizes[i]}, static_cast<uint64_t>(4 * sizes[i]));
  return specs;
}

v1::TensorChunk Chunk(uint32_t tensor, uint64_t offset, std::string data) {
  v1::TensorChunk chunk;
  chunk.set_tensor(tensor);
  chunk.set_offset(offset);
  chunk.set_data(std::move(data));
  return chunk;
}

void ExpectBadTensor(const absl::Status& status, const std::string& what) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << what;
  EXPECT_EQ(ReasonOf(status), reason::kBadTensor) << what;
}

TEST(TensorSpecsTest, SoundAnnouncementsPass) {
  TensorSpecs specs = Vectors({1, 0, 1000});
  Announce(specs, "scalar", v1::DTYPE_F64, {}, 8);
  Announce(specs, "half", v1::DTYPE_BF16, {2, 3}, 12);
  EXPECT_TRUE(CheckTensorSpecs(specs, 4024).ok());
  EXPECT_TRUE(CheckTensorSpecs({}, 0).ok());
}

TEST(TensorSpecsTest, AnnouncementsThatCannotBeAreRefused) {
  const struct {
    std::string what;
    v1::DType dtype;
    std::vector<int64_t> shape;
    uint64_t bytes;
  } cases[] = {
      {"no dtype", v1::DTYPE_UNSPECIFIED, {1}, 4},
      {"unknown dtype", static_cast<v1::DType>(99), {1}, 4},
      {"negative size", v1::DTYPE_F32, {-1}, 4},
      {"two negative sizes", v1::DTYPE_F32, {-2, -2}, 16},
      {"overflow", v1::DTYPE_F32, {int64_t{1} << 33, int64_t{1} << 33}, 0},
      {"nine dimensions", v1::DTYPE_F32, {1, 1, 1, 1, 1, 1, 1, 1, 1}, 4},
      {"too many bytes", v1::DTYPE_F32, {1}, 5},
      {"too few bytes", v1::DTYPE_F32, {2}, 4},
      {"bytes beyond int64", v1::DTYPE_F32, {1}, std::numeric_limits<uint64_t>::max()},
  };
  for (const auto& c : cases) {
    TensorSpecs specs;
    Announce(specs, "a", c.dtype, c.shape, c.bytes);
    const absl::Status status = CheckTensorSpecs(specs, std::numeric_limits<int64_t>::max());
    ExpectBadTensor(status, c.what);
    EXPECT_EQ(DetailsOf(status)["tensor"], "a") << c.what;
  }
}

TEST(TensorSpecsTest, NamesAreShortAndOccurOnce) {
  TensorSpecs twice = Vectors({1});
  Announce(twice, "t0", v1::DTYPE_F32, {1}, 4);
  ExpectBadTensor(CheckTensorSpecs(twice, 100), "twice");
  for (const size_t length : {size_t{0}, size_t{257}}) {
    TensorSpecs specs;
    Announce(specs, std::string(length, 'a'), v1::DTYPE_F32, {1}, 4);
    ExpectBadTensor(CheckTensorSpecs(specs, 100), absl::StrCat(length));
  }
}

TEST(TensorSpecsTest, ThereAreLimitsOnCountAndBytes) {
  ExpectBadTensor(CheckTensorSpecs(Vectors(std::vector<int64_t>(257, 1)), 1 << 20), "257 tensors");
  EXPECT_TRUE(CheckTensorSpecs(Vectors(std::vector<int64_t>(256, 1)), 1 << 20).ok());
  const absl::Status status = CheckTensorSpecs(Vectors({2, 1}), 11);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(status), reason::kBadTensor);
  constexpr int64_t kQuarter = std::numeric_limits<int64_t>::max() / 4;
  EXPECT_EQ(CheckTensorSpecs(Vectors({kQuarter, kQuarter}), std::numeric_limits<int64_t>::max()).code(),
            absl::StatusCode::kInvalidArgument);
}

TEST(TensorAssemblerTest, PutsChunksTogether) {
  TensorAssembler assembler(Vectors({0, 2, 0, 1, 0}));
  EXPECT_FALSE(assembler.complete());
  ASSERT_TRUE(assembler.Add(Chunk(1, 0, "abc")).ok());
  ASSERT_TRUE(assembler.Add(Chunk(1, 3, "defgh")).ok());
  EXPECT_EQ(DetailsOf(assembler.CheckComplete()).at("tensor"), "t3");
  ASSERT_TRUE(assembler.Add(Chunk(3, 0, "ijkl")).ok());
  EXPECT_TRUE(assembler.complete());
  EXPECT_TRUE(assembler.CheckComplete().ok());
  EXPECT_THAT(assembler.Take(), ElementsAre("", "abcdefgh", "", "ijkl", ""));
}

TEST(TensorAssemblerTest, NothingAnnouncedIsComplete) {
  EXPECT_TRUE(TensorAssembler({}).complete());
  EXPECT_TRUE(TensorAssembler(Vectors({0, 0})).complete());
}

TEST(TensorAssemblerTest, RefusesChunksThatAreNotTheNextOnes) {
  const std::vector<std::pair<std::string, v1::TensorChunk>> cases = {
      {"another tensor", Chunk(1, 0, "abcd")},
      {"no such tensor", Chunk(7, 0, "abcd")},
      {"a gap", Chunk(0, 8, "abcd")},
      {"again", Chunk(0, 0, "abcd")},
      {"past the end", Chunk(0, 4, "abcdefghi")},
      {"empty", Chunk(0, 4, "")},
      {"offset beyond all", Chunk(0, std::numeric_limits<uint64_t>::max(), "abcd")},
  };
  for (const auto& [what, chunk] : cases) {
    TensorAssembler assembler(Vectors({3, 1}));
    ASSERT_TRUE(assembler.Add(Chunk(0, 0, "abcd")).ok());
    ExpectBadTensor(assembler.Add(chunk), what);
  }
}

TEST(TensorAssemblerTest, RefusesChunksAboveTheLimitAndAfterTheEnd) {
  TensorAssembler large(Vectors({kChunkBytes}));
  ExpectBadTensor(large.Add(Chunk(0, 0, std::string(static_cast<size_t>(kChunkBytes) + 1, 'x'))), "large");
  EXPECT_TRUE(large.Add(Chunk(0, 0, std::string(static_cast<size_t>(kChunkBytes), 'x'))).ok());
  TensorAssembler done(Vectors({1}));
  ASSERT_TRUE(done.Add(Chunk(0, 0, "abcd")).ok());
  ExpectBadTensor(done.Add(Chunk(0, 4, "e")), "after the end");
}

TEST(TensorStreamTest, WhatIsCutIsPutTogetherAgain) {
  std::string large(static_cast<size_t>(2 * kChunkBytes + 4), '\0');
  for (size_t i = 0; i < large.size(); ++i) large[i] = static_cast<char>(i * 31);
  const std::vector<std::string> data = {"", large, "abcd", ""};
  ChunkReader reader({data.begin(), data.end()});
  TensorAssembler assembler(Vectors({0, static_cast<int64_t>(large.size() / 4), 1, 0}));
  v1::TensorChunk chunk;
  int chunks = 0;
  while (reader.Next(chunk)) {
    EXPECT_LE(static_cast<int64_t>(chunk.data().size()), kChunkBytes);
    ASSERT_TRUE(assembler.Add(chunk).ok());
    ++chunks;
  }
  EXPECT_EQ(chunks, 4);
  EXPECT_TRUE(assembler.complete());
  EXPECT_EQ(assembler.Take(), data);
}

}  // namespace
}  // namespace h3
