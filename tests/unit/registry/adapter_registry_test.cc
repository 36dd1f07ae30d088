#include "server/registry/adapter_registry.h"

#include <filesystem>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "server/base/sha256.h"
#include "server/base/text.h"
#include "tests/testing/golden.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/temporary_directory.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;
using testing::BuildSafetensors;
using testing::Zeros;

// An adapter of this rank.
std::string AdapterOfRank(int64_t rank) {
  return BuildSafetensors(
      {Zeros("blocks.0.attn.out_proj.lora_A.weight", {rank, 96}), Zeros("blocks.0.attn.out_proj.lora_B.weight", {64, rank})});
}

class AdapterRegistryTest : public ::testing::Test {
 protected:
  AdapterRegistryTest() {
    const auto checkpoint = OpenCheckpoint(testing::GoldenPath("full/model.safetensors"));
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    base_.plan = PlanBaseOf(*checkpoint, std::nullopt, false);
    fs::create_directory(directory_.path() / "adapters");
  }

  // Puts the file in place in one step, as tools do.
  void Install(const std::string& name, const std::string& content) {
    const std::string written = directory_.Write("new", content);
    fs::create_directories((adapters() / name).parent_path());
    fs::rename(written, adapters() / (name + ".safetensors"));
  }
  fs::path adapters() const { return directory_.path() / "adapters"; }
  absl::StatusOr<ResolvedAdapter> Resolve(const StackEntry& entry, size_t index = 0) {
    return registry_.Resolve(entry, index, base_);
  }

  const testing::TemporaryDirectory directory_;
  BaseFacts base_;
  const std::unique_ptr<StateStore> state_ = *StateStore::Open((directory_.path() / "state.sqlite").string());
  ContentStore content_ = *ContentStore::Create((directory_.path() / "blobs").string());
  AdapterRegistry registry_{(directory_.path() / "adapters").string(), content_, *state_};
};

TEST_F(AdapterRegistryTest, ANameIsResolvedToItsContent) {
  Install("style", AdapterOfRank(4));
  const auto resolved = Resolve({.adapter = "style", .strength = 0.5});
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->adapter, "style");
  EXPECT_EQ(resolved->digest, Sha256Hex(AdapterOfRank(4)));
  EXPECT_EQ(resolved->strength, 0.5);
  EXPECT_EQ(resolved->modules, 1);
  EXPECT_EQ(resolved->bytes, ByteCount(4 * 4 * (96 + 64)));
  ASSERT_EQ(resolved->scales.size(), 1u);
  EXPECT_EQ(resolved->scales[0].rank, 4);
}

TEST_F(AdapterRegistryTest, AReplacedFileIsAnotherAdapter) {
  Install("style", AdapterOfRank(4));
  const std::string before = registry_.Digest("style").value();
  EXPECT_EQ(registry_.Digest("style").value(), before);
  EXPECT_EQ(registry_.NameOf(before), "style");
  Install("style", AdapterOfRank(2));
  const auto resolved = Resolve({.adapter = "style"});
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_NE(resolved->digest, before);
  EXPECT_EQ(resolved->digest, Sha256Hex(AdapterOfRank(2)));
  EXPECT_EQ(resolved->scales.at(0).rank, 2);
  EXPECT_EQ(registry_.NameOf(before), absl::StrCat("sha256:", before));
  EXPECT_EQ(Resolve({.adapter = absl::StrCat("sha256:", before)}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AdapterRegistryTest, OneContentUnderTwoNamesIsOneAdapter) {
  Install("a", AdapterOfRank(4));
  Install("b", AdapterOfRank(4));
  EXPECT_EQ(registry_.Digest("a").value(), registry_.Digest("b").value());
}

TEST_F(AdapterRegistryTest, ADigestNamesContentThatWasRead) {
  Install("style", AdapterOfRank(4));
  const std::string name = absl::StrCat("sha256:", registry_.Digest("style").value());
  const auto resolved = Resolve({.adapter = name});
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->adapter, name);
  EXPECT_EQ(ReasonOf(Resolve({.adapter = "sha256:00"}).status()), reason::kUnknownAdapter);
}

TEST_F(AdapterRegistryTest, APinnedDigestMustBeThatOfTheFile) {
  Install("style", AdapterOfRank(4));
  EXPECT_TRUE(Resolve({.adapter = "style", .digest = Sha256Hex(AdapterOfRank(4))}).ok());
  const auto refused = Resolve({.adapter = "style", .digest = Sha256Hex(AdapterOfRank(2))}, 3);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused.status()), reason::kAdapterChanged);
  EXPECT_EQ(DetailsOf(refused.status()).at("field"), "stack[3]");
}

TEST_F(AdapterRegistryTest, NamesMayNotLeaveTheDirectory) {
  directory_.Write("secret.safetensors", AdapterOfRank(4));
  fs::create_symlink("../secret.safetensors", adapters() / "link.safetensors");
  for (const std::string& name :
       {std::string("../secret"), (directory_.path() / "secret").string(), std::string("a/../../secret"), std::string("link"),
        std::string("absent"), std::string(), std::string("a\0b", 3), std::string(300, 'a')}) {
    const auto refused = Resolve({.adapter = name}, 1);
    ASSERT_FALSE(refused.ok()) << name;
    EXPECT_EQ(ReasonOf(refused.status()), reason::kUnknownAdapter) << name;
    EXPECT_EQ(DetailsOf(refused.status()).at("field"), "stack[1]") << name;
    EXPECT_FALSE(registry_.Digest(name).ok()) << name;
  }
}

TEST_F(AdapterRegistryTest, RefusalsOfAFileNameTheEntry) {
  Install("broken", "short");
  Install("other", BuildSafetensors({Zeros("unrelated", {1})}));
  const absl::Status broken = Resolve({.adapter = "broken"}, 2).status();
  EXPECT_EQ(ReasonOf(broken), reason::kMalformedFile);
  EXPECT_EQ(DetailsOf(broken).at("adapter"), "broken");
  EXPECT_EQ(DetailsOf(broken).at("field"), "stack[2]");
  EXPECT_EQ(ReasonOf(Resolve({.adapter = "other"}).status()), reason::kNoAdapterTensors);
}

TEST_F(AdapterRegistryTest, AlphasAreReadAndTheRequestsComesFirst) {
  Install("style", BuildSafetensors({testing::Scalar("blocks.0.attn.out_proj.alpha", 2),
                                     Zeros("blocks.0.attn.out_proj.lora_down.weight", {4, 96}),
                                     Zeros("blocks.0.attn.out_proj.lora_up.weight", {64, 4})}));
  EXPECT_EQ(Resolve({.adapter = "style"})->scales.at(0).scale, 0.5);
  EXPECT_EQ(Resolve({.adapter = "style", .alpha = 8})->scales.at(0).scale, 2);
}

TEST_F(AdapterRegistryTest, ListsWhatCanBeNamed) {
  Install("style", AdapterOfRank(4));
  Install("sub/deep", AdapterOfRank(2));
  directory_.Write("adapters/notes.txt", "no adapter");
  directory_.Write("adapters/bad\\name.safetensors", "no name");
  directory_.Write("secret.safetensors", "outside");
  fs::create_symlink("../secret.safetensors", adapters() / "link.safetensors");
  fs::create_symlink("style.safetensors", adapters() / "alias.safetensors");
  ASSERT_TRUE(registry_.Digest("style").ok());
  const auto listed = registry_.List();
  ASSERT_TRUE(listed.ok()) << listed.status();
  std::vector<std::string> names;
  for (const RegisteredAdapter& adapter : *listed) names.push_back(adapter.name);
  ASSERT_THAT(names, ::testing::ElementsAre("alias", "style", "sub/deep"));
  EXPECT_EQ(listed->at(1).digest, Sha256Hex(AdapterOfRank(4)));
  EXPECT_EQ(listed->at(2).digest, "");  // Not read so far.
  EXPECT_EQ(listed->at(2).file_bytes, static_cast<int64_t>(AdapterOfRank(2).size()));
}

TEST_F(AdapterRegistryTest, ListsNothingOfAnAbsentDirectory) {
  AdapterRegistry registry((directory_.path() / "absent").string(), content_, *state_);
  const auto listed = registry.List();
  EXPECT_TRUE(!listed.ok() || listed->empty());
}

// Uploads `content` under its digest.
std::string Put(ContentStore& store, const std::string& content) {
  const std::string digest = Sha256Hex(content);
  auto incoming = store.Begin(digest, static_cast<int64_t>(content.size()));
  EXPECT_TRUE(incoming.ok()) << incoming.status();
  EXPECT_TRUE((*incoming)->Append(content).ok());
  EXPECT_TRUE((*incoming)->Commit().ok());
  return digest;
}

TEST_F(AdapterRegistryTest, AnUploadIsAnAdapterUnderItsName) {
  const std::string digest = Put(content_, AdapterOfRank(4));
  EXPECT_EQ(registry_.NameUpload("mine", digest).value(), "");
  const auto found = registry_.Find("mine");
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->digest, digest);
  EXPECT_TRUE(found->uploaded);
  EXPECT_TRUE(Resolve({.adapter = "mine"}).ok());
  ASSERT_TRUE(registry_.List().ok());
  EXPECT_EQ(registry_.List()->at(0).name, "mine");

  // Another registry over the same state knows it too, and a new upload takes the name.
  AdapterRegistry later(adapters().string(), content_, *state_);
  EXPECT_EQ(later.Digest("mine").value(), digest);
  const std::string second = Put(content_, AdapterOfRank(2));
  EXPECT_EQ(registry_.NameUpload("mine", second).value(), digest);
  EXPECT_EQ(registry_.Digest("mine").value(), second);
  EXPECT_TRUE(Resolve({.adapter = absl::StrCat("sha256:", digest)}).ok());  // Who was promised the first still gets it,
  ASSERT_TRUE(registry_.ForgetAllUnnamed({}).ok());                           // until nobody can wait for it.
  EXPECT_FALSE(content_.Has(digest));
  EXPECT_TRUE(content_.Has(second));
}

// A name is only handed on while it still leads there.
TEST_F(AdapterRegistryTest, TheNameOfADigestLeadsToItNow) {
  Install("a", AdapterOfRank(4));
  Install("b", AdapterOfRank(4));
  const std::string digest = registry_.Digest("a").value();
  ASSERT_EQ(registry_.Digest("b").value(), digest);
  Install("a", AdapterOfRank(2));
  EXPECT_EQ(registry_.NameOf(digest), "b");
  EXPECT_EQ(registry_.Find(absl::StrCat("sha256:", digest))->name, "b");
  fs::remove(adapters() / "b.safetensors");
  EXPECT_EQ(registry_.NameOf(digest), absl::StrCat("sha256:", digest));
  EXPECT_EQ(Resolve({.adapter = absl::StrCat("sha256:", digest)}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(AdapterRegistryTest, ContentThatIsPinnedElsewhereStays) {
  const std::string pinned = Put(content_, AdapterOfRank(4)), loose = Put(content_, AdapterOfRank(2));
  directory_.Write("blobs/notes.txt", "not ours");
  ASSERT_TRUE(registry_.ForgetAllUnnamed({pinned}).ok());
  EXPECT_TRUE(content_.Has(pinned));
  EXPECT_FALSE(content_.Has(loose));
  EXPECT_TRUE(fs::exists(directory_.path() / "blobs/notes.txt"));
}

// Protobuf strings are UTF-8: what a report shows is cut between characters, and a name that is none is no name.
TEST_F(AdapterRegistryTest, WhatIsShownIsText) {
  std::string text = "x";
  for (int i = 0; i < 200; ++i) text += "\u00e9";
  Install("style", BuildSafetensors({Zeros("blocks.0.attn.out_proj.lora_A.weight", {4, 96}), Zeros("blocks.0.attn.out_proj.lora_B.weight", {64, 4})},
                                    {{"recommended_steps", text}}));
  const std::string shown = registry_.Report("style", base_)->schedule_hints.at("recommended_steps");
  EXPECT_TRUE(IsText(shown));
  EXPECT_EQ(shown.size(), 255u);
  Install("\xff\x62", AdapterOfRank(4));
  ASSERT_EQ(registry_.List()->size(), 1u);
  EXPECT_EQ(ReasonOf(registry_.Find("\xff\x62").status()), reason::kUnknownAdapter);
}

TEST_F(AdapterRegistryTest, UploadsNeverTakeTheNameOfAFile) {
  Install("style", AdapterOfRank(4));
  EXPECT_EQ(ReasonOf(registry_.CheckUploadName("style")), reason::kNameTaken);
  for (const char* name : {"../style", "/style", "a//b", "", "sha256:00", "a\\b"}) {
    EXPECT_EQ(ReasonOf(registry_.CheckUploadName(name)), reason::kUnknownAdapter) << name;
  }
}

TEST_F(AdapterRegistryTest, SettingsBelongToTheContent) {
  Install("style", AdapterOfRank(4));
  const std::string digest = registry_.Digest("style").value();
  ASSERT_TRUE(registry_.SetSettings(digest, {.alpha = 2.0, .qkv_layout = QkvLayout::kInterleaved, .fc1_gate_first = false}).ok());
  AdapterRegistry later(adapters().string(), content_, *state_);
  const auto resolved = later.Resolve({.adapter = "style"}, 0, base_);
  ASSERT_TRUE(resolved.ok()) << resolved.status();
  EXPECT_EQ(resolved->scales.at(0).scale, 0.5);
  EXPECT_EQ(resolved->scales.at(0).source, "adapter settings");
  EXPECT_EQ(resolved->settings, (AdapterSettings{.alpha = 2.0, .qkv_layout = QkvLayout::kInterleaved, .fc1_gate_first = false}));

  Install("style", AdapterOfRank(2));  // Another file of that name: nothing is known about it.
  EXPECT_EQ(Resolve({.adapter = "style"})->scales.at(0).scale, 1);
  ASSERT_TRUE(registry_.SetSettings(digest, {}).ok());
  Install("style", AdapterOfRank(4));
  EXPECT_EQ(Resolve({.adapter = "style"})->scales.at(0).scale, 1);
}

// What PEFT's save_pretrained leaves: the scale is in the config.
TEST_F(AdapterRegistryTest, APeftDirectoryIsOneAdapter) {
  Install("tuned/adapter_model", AdapterOfRank(4));
  directory_.Write("adapters/tuned/adapter_config.json", R"({"r": 4, "lora_alpha": 8})");
  for (const char* name : {"tuned", "tuned/adapter_model"}) {
    const auto resolved = Resolve({.adapter = name});
    ASSERT_TRUE(resolved.ok()) << resolved.status();
    EXPECT_EQ(resolved->scales.at(0).scale, 2) << name;
    EXPECT_EQ(resolved->scales.at(0).source, "adapter_config.json");
  }
  ASSERT_EQ(registry_.List()->size(), 1u);
  EXPECT_EQ(registry_.List()->at(0).name, "tuned");
  // The config is read again when it changes, though the weights are the same.
  directory_.Write("adapters/tuned/adapter_config.json", R"({"r": 4, "lora_alpha": 4})");
  EXPECT_EQ(Resolve({.adapter = "tuned"})->scales.at(0).scale, 1);
}

TEST_F(AdapterRegistryTest, AReportSaysWhatTheHeaderTells) {
  Install("style", BuildSafetensors({Zeros("blocks.0.attn.out_proj.lora_A.weight", {4, 96}), Zeros("blocks.0.attn.out_proj.lora_B.weight", {64, 4})},
                                    {{"software", R"({"name": "ai-toolkit", "version": "0.7"})"}, {"num_inference_steps", "4"},
                                     {"video_shift", "12"}, {"ss_steps", "4000"}}));
  const auto report = registry_.Report("style", base_);
  ASSERT_TRUE(report.ok()) << report.status();
  ASSERT_TRUE(report->manifest.ok());
  EXPECT_EQ(report->producer, "ai-toolkit 0.7");
  EXPECT_EQ(report->schedule_hints, (std::map<std::string, std::string>{{"num_inference_steps", "4"}, {"video_shift", "12"}}));
  // rank (in + out) over four blocks of (288 x 64) + (64 x 96) + (224 x 64) + (64 x 112).
  EXPECT_NEAR(report->arithmetic_percent, 100.0 * 4 * (96 + 64) / (4.0 * 64 * (288 + 96 + 224 + 112)), 1e-9);
  Install("bad", BuildSafetensors({Zeros("blocks.0.attn.out_proj.lora_A.weight", {4, 95}), Zeros("blocks.0.attn.out_proj.lora_B.weight", {64, 4})}));
  EXPECT_EQ(ReasonOf(registry_.Report("bad", base_)->manifest.status()), reason::kShapeMismatch);
}

}  // namespace
}  // namespace h3
