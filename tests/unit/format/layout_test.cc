#include "server/format/layout.h"

#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "tests/testing/golden.h"

namespace h3 {
namespace {

using testing::GoldenInput;
using testing::ReadGoldenInput;
using testing::Values;

template <typename T>
std::vector<double> AsDoubles(const std::vector<T>& values) {
  return {values.begin(), values.end()};
}

std::vector<float> Floats(const HostTensor& tensor) {
  std::vector<float> values(tensor.data.size() / sizeof(float));
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return values;
}

class GoldenLayout : public ::testing::TestWithParam<std::string> {
 protected:
  const HostTensor& Tensor(const std::string& name) { return input_.tensors.at(name); }
  Packing Packed() {
    std::vector<int64_t> tags;
    for (const double tag : Values(Tensor("text_token_tags"))) tags.push_back(static_cast<int64_t>(tag));
    auto packing = Pack(input_.request.layout, tags);
    EXPECT_TRUE(packing.ok()) << packing.status();
    return *std::move(packing);
  }

  const GoldenInput input_ = ReadGoldenInput(GetParam());
};

TEST_P(GoldenLayout, PassesItsCheck) {
  EXPECT_TRUE(CheckLayout(input_.request.layout, 1000).ok());
  EXPECT_EQ(GetParam().rfind(std::string(TaskName(TaskOf(input_.request.layout))), 0), 0u);
}

TEST_P(GoldenLayout, PositionsAreEqualToTheLastBit) {
  std::vector<double> positions;
  for (const auto& position : Packed().positions) positions.insert(positions.end(), position.begin(), position.end());
  EXPECT_EQ(positions, Values(Tensor("position_ids")));
}

TEST_P(GoldenLayout, TagsAndIndicesAreEqual) {
  const Packing packing = Packed();
  EXPECT_EQ(AsDoubles(packing.tags), Values(Tensor("token_tags")));
  EXPECT_EQ(AsDoubles(packing.text_indices), Values(Tensor("text_indices")));
  EXPECT_EQ(AsDoubles(packing.video_indices), Values(Tensor("video_indices")));
  EXPECT_EQ(AsDoubles(packing.audio_indices), Values(Tensor("audio_indices")));
  EXPECT_EQ(AsDoubles(std::vector<int64_t>{packing.condition_video_rows, packing.condition_audio_rows}),
            Values(Tensor("num_condition_rows")));
}

TEST_P(GoldenLayout, TimestepsAreEqual) {
  const TimestepRows rows =
      AssignTimesteps(Packed(), Floats(Tensor("video_timestep")).front(), Floats(Tensor("audio_timestep")).front());
  EXPECT_EQ(rows.timesteps, Floats(Tensor("timestep")));
  EXPECT_EQ(AsDoubles(rows.row_index), Values(Tensor("timestep_indices")));
}

TEST_P(GoldenLayout, SegmentsCoverEveryRowOnce) {
  const Packing packing = Packed();
  int64_t next = 0;
  for (const Segment& segment : packing.segments) {
    EXPECT_EQ(segment.begin, next);
    next += segment.rows;
  }
  EXPECT_EQ(next, packing.rows);
  EXPECT_EQ(static_cast<double>(packing.rows), PackedRows(input_.request.layout));
}

TEST_P(GoldenLayout, PatchifiedLatentsAreTheVideoRows) {
  std::vector<float> rows;
  const auto append = [&](const HostTensor& latent) {
    const std::vector<float> values = Floats(latent);
    std::vector<float> patches(values.size()), back(values.size());
    const auto& s = latent.shape;  // [1, C, T, H, W]
    PatchifyVideo(values.data(), s[1], s[2], s[3], s[4], patches.data());
    UnpatchifyVideo(patches.data(), s[1], s[2], s[3], s[4], back.data());
    EXPECT_EQ(back, values);
    rows.insert(rows.end(), patches.begin(), patches.end());
  };
  for (size_t i = 0; i < Packed().visual_conditions.size(); ++i) append(Tensor(absl::StrCat("condition_video.", i)));
  append(Tensor("target_video"));
  EXPECT_EQ(rows, Floats(Tensor("video_rows")));
}

INSTANTIATE_TEST_SUITE_P(Inputs, GoldenLayout, ::testing::Values("t2va", "t2va_wide", "fl2va_first_last", "ref2va_mixed"),
                         [](const auto& info) { return info.param; });

Layout Small() { return {.text_tokens = 7, .latent_frames = 3, .latent_height = 4, .latent_width = 6, .audio_latents = 5}; }

TEST(LayoutTest, RefusesWhatCannotBePacked) {
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  const Reference image{ReferenceKind::kImage, 1, 4, 4, 0};
  const std::vector<std::pair<std::string, std::function<void(Layout&)>>> cases = {
      {"keyframes with references", [&](Layout& l) { l.keyframes = {Keyframe::kFirst}, l.references = {image}; }},
      {"a keyframe twice",
       [](Layout& l) {
         l.keyframes = {Keyframe::kLast, Keyframe::kLast};
       }},
      {"three keyframes",
       [](Layout& l) {
         l.keyframes = {Keyframe::kFirst, Keyframe::kLast, Keyframe::kFirst};
       }},
      {"no text", [](Layout& l) { l.text_tokens = 0; }},
      {"negative text", [](Layout& l) { l.text_tokens = -1; }},
      {"no sound", [](Layout& l) { l.audio_latents = 0; }},
      {"no frames", [](Layout& l) { l.latent_frames = 0; }},
      {"odd height", [](Layout& l) { l.latent_height = 5; }},
      {"odd width", [](Layout& l) { l.latent_width = 3; }},
      {"negative width", [](Layout& l) { l.latent_width = -2; }},
      {"too many rows", [](Layout& l) { l.latent_frames = 1000; }},
      {"rows beyond int64",
       [](Layout& l) { l.latent_frames = kHuge, l.latent_height = kHuge - 1, l.latent_width = kHuge - 1; }},
      {"text beyond int64", [](Layout& l) { l.text_tokens = kHuge, l.audio_latents = kHuge; }},
      {"image of two frames", [&](Layout& l) { l.references = {image}, l.references[0].latent_frames = 2; }},
      {"image with sound", [&](Layout& l) { l.references = {image}, l.references[0].audio_latents = 1; }},
      {"image of odd size", [&](Layout& l) { l.references = {image}, l.references[0].latent_height = 3; }},
      {"silent sound",
       [](Layout& l) {
         l.references = {{ReferenceKind::kAudio, 0, 0, 0, 0}};
       }},
      {"sound with frames",
       [](Layout& l) {
         l.references = {{ReferenceKind::kAudio, 1, 2, 2, 3}};
       }},
      {"video without frames",
       [](Layout& l) {
         l.references = {{ReferenceKind::kVideo, 0, 4, 4, 0}};
       }},
      {"video with negative sound",
       [](Layout& l) {
         l.references = {{ReferenceKind::kVideo, 1, 4, 4, -1}};
       }},
  };
  ASSERT_TRUE(CheckLayout(Small(), 1000).ok());
  for (const auto& [name, change] : cases) {
    Layout layout = Small();
    change(layout);
    const absl::Status status = CheckLayout(layout, 1000);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(ReasonOf(status), reason::kBadLayout) << name;
  }
}

TEST(LayoutTest, TheRowLimitIsInclusive) {
  EXPECT_EQ(PackedRows(Small()), 35);
  EXPECT_TRUE(CheckLayout(Small(), 35).ok());
  EXPECT_FALSE(CheckLayout(Small(), 34).ok());
}

TEST(LayoutTest, RefusesTextTagsOfAnotherCountOrValue) {
  EXPECT_EQ(ReasonOf(Pack(Small(), std::vector<int64_t>(6, 1)).status()), reason::kBadTensor);
  std::vector<int64_t> tags(7, 1);
  tags[3] = 2;
  EXPECT_EQ(ReasonOf(Pack(Small(), tags).status()), reason::kBadTensor);
}

TEST(LayoutTest, EqualTimestepsShareARow) {
  const auto packing = Pack(Small(), std::vector<int64_t>(7, 1));
  ASSERT_TRUE(packing.ok());
  const TimestepRows rows = AssignTimesteps(*packing, 0.5f, 0.5f);
  EXPECT_EQ(rows.timesteps, std::vector<float>{0.5f});
  EXPECT_EQ(rows.row_index, std::vector<int64_t>(35, 0));
}

TEST(LayoutTest, APartitionServesItsOwnTasks) {
  for (const Task task : {Task::kT2va, Task::kFl2va, Task::kRef2va})
    EXPECT_TRUE(CheckPartition(task, Partition::kUnknown).ok());
  EXPECT_TRUE(CheckPartition(Task::kT2va, Partition::kFl2va).ok());
  EXPECT_TRUE(CheckPartition(Task::kFl2va, Partition::kFl2va).ok());
  EXPECT_TRUE(CheckPartition(Task::kRef2va, Partition::kRef2va).ok());
  const absl::Status refused = CheckPartition(Task::kRef2va, Partition::kFl2va);
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused), reason::kBaseMismatch);
  EXPECT_EQ(ReasonOf(CheckPartition(Task::kT2va, Partition::kRef2va)), reason::kBaseMismatch);
}

TEST(RequestLayoutTest, RefusesWhatIsNotALayout) {
  for (const char* json :
       {"", "[]", "null", "{", R"({"text_tokens": "seven"})", R"({"text_tokens": 1.5})", R"({"keyframes": "first"})",
        R"({"keyframes": ["middle"]})", R"({"refs": [1]})", R"({"refs": [{"kind": "smell"}]})"}) {
    const auto request = ParseRequestLayout(json);
    EXPECT_FALSE(request.ok()) << json;
    EXPECT_EQ(ReasonOf(request.status()), reason::kBadLayout) << json;
  }
}

}  // namespace
}  // namespace h3
