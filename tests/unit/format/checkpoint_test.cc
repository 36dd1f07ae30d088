#include "server/format/checkpoint.h"

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "tests/testing/golden.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/temporary_directory.h"

namespace h3 {
namespace {

using testing::BuildSafetensors;
using testing::GoldenPath;
using testing::ReadTensors;
using testing::Zeros;
using Tensors = std::map<std::string, HostTensor>;

std::string FileOf(const Tensors& tensors) {
  std::vector<HostTensor> list;
  for (const auto& [name, tensor] : tensors) list.push_back(tensor);
  return BuildSafetensors(list);
}

// The small full model, changed.
class CheckpointTest : public ::testing::Test {
 protected:
  absl::StatusOr<Checkpoint> OpenChanged(const std::function<void(Tensors&)>& change) {
    Tensors tensors = model_;
    change(tensors);
    return OpenCheckpoint(directory_.Write("model.safetensors", FileOf(tensors)));
  }
  // The model as a directory with this config.json.
  absl::StatusOr<Checkpoint> OpenWithConfig(const std::string& config) {
    directory_.Write("model.safetensors", FileOf(model_));
    directory_.Write("config.json", config);
    return OpenCheckpoint(directory_.path().string());
  }

  const Tensors model_ = ReadTensors(GoldenPath("full/model.safetensors"));
  const testing::TemporaryDirectory directory_;
};

TEST(GoldenCheckpointTest, EveryContainerGivesTheSameModel) {
  const auto single = OpenCheckpoint(GoldenPath("full/model.safetensors"));
  const auto sharded = OpenCheckpoint(GoldenPath("full-sharded"));
  const auto diffusers = OpenCheckpoint(GoldenPath("full-diffusers/"));
  ASSERT_TRUE(single.ok()) << single.status();
  ASSERT_TRUE(sharded.ok()) << sharded.status();
  ASSERT_TRUE(diffusers.ok()) << diffusers.status();
  EXPECT_EQ(single->container, Container::kSingleFile);
  EXPECT_EQ(sharded->container, Container::kReferenceDirectory);
  EXPECT_EQ(diffusers->container, Container::kDiffusersDirectory);
  EXPECT_EQ(single->qkv_layout, QkvLayout::kStacked);
  EXPECT_EQ(sharded->qkv_layout, QkvLayout::kInterleaved);
  EXPECT_EQ(diffusers->qkv_layout, QkvLayout::kStacked);
  EXPECT_EQ(diffusers->name, "full-diffusers");
  for (const Checkpoint* other : {&*sharded, &*diffusers}) {
    EXPECT_EQ(other->geometry, single->geometry);
    EXPECT_EQ(other->eps, single->eps);
    EXPECT_EQ(other->rope_inv_freq, single->rope_inv_freq);
    EXPECT_EQ(other->TotalBytes(), single->TotalBytes());
    ASSERT_EQ(other->tensors.size(), single->tensors.size());
    for (const auto& [name, tensor] : single->tensors) EXPECT_EQ(other->tensors.at(name).shape, tensor.shape) << name;
  }
}

TEST(GoldenCheckpointTest, GeometryIsThatOfTheConfig) {
  const auto full = OpenCheckpoint(GoldenPath("full/model.safetensors"));
  ASSERT_TRUE(full.ok()) << full.status();
  const Geometry expected = {.hidden = 64,
                             .blocks = 4,
                             .refiner_blocks = 2,
                             .heads = 4,
                             .head_dim = 24,
                             .ffn = 112,
                             .video_channels = 4,
                             .audio_channels = 6,
                             .text_width = 40,
                             .time_input = 32,
                             .time_hidden = 56,
                             .adaln_width = 28,
                             .curve_rows = 0,
                             .rope_frequencies = 3};
  EXPECT_EQ(full->geometry, expected);
  EXPECT_FALSE(full->geometry.pruned());
}

TEST(GoldenCheckpointTest, APrunedModelHasATableAndNoTimeEmbedder) {
  const auto pruned = OpenCheckpoint(GoldenPath("pruned/model.safetensors"));
  ASSERT_TRUE(pruned.ok()) << pruned.status();
  EXPECT_TRUE(pruned->geometry.pruned());
  EXPECT_EQ(pruned->geometry.curve_rows, 1025);
  EXPECT_EQ(pruned->geometry.adaln_width, 8);
  EXPECT_EQ(pruned->geometry.time_input, 0);
  EXPECT_TRUE(pruned->tensors.contains("adaln_t_table"));
  EXPECT_FALSE(pruned->tensors.contains("time_embedder.proj_in.weight"));
}

TEST(GoldenCheckpointTest, DiffusersPartsAreStackedInCanonicalOrder) {
  const auto diffusers = OpenCheckpoint(GoldenPath("full-diffusers"));
  ASSERT_TRUE(diffusers.ok()) << diffusers.status();
  std::vector<std::string> names;
  for (const StoredRows& piece : diffusers->tensors.at("blocks.0.attn.qkv_proj.weight").pieces)
    names.push_back(piece.tensor.name);
  EXPECT_THAT(names,
              ::testing::ElementsAre(::testing::HasSubstr("to_q"), ::testing::HasSubstr("to_k"), ::testing::HasSubstr("to_v")));
  const auto& fc1 = diffusers->tensors.at("blocks.0.mlp.fc1.weight").pieces;
  ASSERT_EQ(fc1.size(), 2u);
  EXPECT_EQ(fc1[0].row_begin, diffusers->geometry.ffn);  // The gate is the stored second half.
  EXPECT_EQ(fc1[1].row_begin, 0);
}

TEST(GoldenCheckpointTest, OptionsDecideRowOrderAndPartition) {
  const auto checkpoint = OpenCheckpoint(GoldenPath("full/model.safetensors"),
                                         {.qkv_layout = QkvLayout::kInterleaved, .partition = Partition::kRef2va});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->qkv_layout, QkvLayout::kInterleaved);
  EXPECT_EQ(checkpoint->partition, Partition::kRef2va);
}

TEST_F(CheckpointTest, APrefixIsTakenOff) {
  const auto checkpoint = OpenChanged([](Tensors& tensors) {
    Tensors prefixed;
    for (auto& [name, tensor] : tensors) {
      const std::string longer = "model.diffusion_model." + name;
      prefixed[longer] = {longer, tensor.dtype, tensor.shape, std::move(tensor.data)};
    }
    prefixed["vae.decoder.weight"] = Zeros("vae.decoder.weight", {2});
    tensors = std::move(prefixed);
  });
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->tensors.count("blocks.0.attn.qkv_proj.weight"), 1u);
}

TEST_F(CheckpointTest, AMissingTensorIsNamed) {
  const auto checkpoint = OpenChanged([](Tensors& tensors) { tensors.erase("blocks.2.mlp.fc2.weight"); });
  EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kBadTensor);
  EXPECT_EQ(DetailsOf(checkpoint.status()).at("tensor"), "blocks.2.mlp.fc2.weight");
}

TEST_F(CheckpointTest, AnyTensorMayBeMissingWithoutACrash) {
  for (const auto& [name, tensor] : model_) {
    if (name == "rope.inv_freq") continue;
    const auto checkpoint = OpenChanged([&](Tensors& tensors) { tensors.erase(name); });
    ASSERT_FALSE(checkpoint.ok()) << name;
    EXPECT_EQ(checkpoint.status().code(), absl::StatusCode::kInvalidArgument) << name << ": " << checkpoint.status();
    EXPECT_NE(ReasonOf(checkpoint.status()), "") << name;
  }
}

TEST_F(CheckpointTest, AnUnexpectedTensorIsNamed) {
  const auto checkpoint = OpenChanged([](Tensors& tensors) { tensors["blocks.0.extra"] = Zeros("blocks.0.extra", {4}); });
  EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kBadTensor);
  EXPECT_EQ(DetailsOf(checkpoint.status()).at("tensor"), "blocks.0.extra");
}

TEST_F(CheckpointTest, TensorsThatContradictEachOtherAreAShapeMismatch) {
  const auto checkpoint = OpenChanged([](Tensors& tensors) {
    tensors["blocks.1.mlp.fc2.weight"] = Zeros("blocks.1.mlp.fc2.weight", {64, 100});
  });
  EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kShapeMismatch);
}

TEST_F(CheckpointTest, AFileOfSomethingElseIsRefused) {
  const auto checkpoint =
      OpenCheckpoint(directory_.Write("other.safetensors", BuildSafetensors({Zeros("encoder.weight", {2, 2})})));
  EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kBadTensor);
}

TEST_F(CheckpointTest, AQuantisedLayerIsRefusedWithTheNameOfItsFormat) {
  const auto checkpoint = OpenChanged([](Tensors& tensors) {
    const std::string name = "blocks.0.mlp.fc1.comfy_quant", json = R"({"format": "float8_e4m3fn"})";
    tensors[name] = {name, DType::kU8, {static_cast<int64_t>(json.size())}, json};
  });
  EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kUnsupportedBase);
  EXPECT_EQ(DetailsOf(checkpoint.status()).at("format"), "float8_e4m3fn");
}

TEST_F(CheckpointTest, AQuantisationNoteOfAnotherShapeIsRefusedTheSame) {
  for (const std::string& json : {std::string("{}"), std::string("[]"), std::string("\xff"), std::string(R"({"format": 8})")}) {
    const auto checkpoint = OpenChanged([&](Tensors& tensors) {
      const std::string name = "blocks.0.mlp.fc1.comfy_quant";
      tensors[name] = {name, DType::kU8, {static_cast<int64_t>(json.size())}, json};
    });
    EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kUnsupportedBase) << json;
  }
}

TEST_F(CheckpointTest, AnEightBitTypeIsRefusedByItsName) {
  const auto checkpoint = OpenChanged([](Tensors& tensors) {
    tensors["blocks.0.mlp.fc1.weight"] = Zeros("blocks.0.mlp.fc1.weight", {224, 64}, DType::kF8E4M3);
  });
  EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kUnsupportedBase);
  EXPECT_EQ(DetailsOf(checkpoint.status()).at("format"), "F8_E4M3");
}

TEST_F(CheckpointTest, AConfigThatAgreesIsTaken) {
  const auto checkpoint = OpenWithConfig(R"({"_class_name": "MiniMaxH3DiTModel", "hidden_size": 64, "norm_eps": 1e-6})");
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->eps, 1e-6f);
}

TEST_F(CheckpointTest, AConfigThatContradictsTheTensorsIsRefusedByField) {
  for (const char* config : {R"({"num_layers": 5})", R"({"num_layers": "4"})", R"({"num_layers": null})"}) {
    const auto checkpoint = OpenWithConfig(config);
    EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kShapeMismatch) << config;
    EXPECT_EQ(DetailsOf(checkpoint.status())["field"], "num_layers") << config;
  }
}

TEST_F(CheckpointTest, AConfigOfAnotherModelOrNoneIsRefused) {
  EXPECT_EQ(ReasonOf(OpenWithConfig(R"({"_class_name": "FluxTransformer2DModel"})").status()), reason::kUnsupportedBase);
  EXPECT_EQ(ReasonOf(OpenWithConfig(R"({"norm_eps": 1e-5, "final_norm_eps": 1e-6})").status()), reason::kUnsupportedBase);
  EXPECT_EQ(ReasonOf(OpenWithConfig("[]").status()), reason::kMalformedFile);
  EXPECT_EQ(ReasonOf(OpenWithConfig("{").status()), reason::kMalformedFile);
  EXPECT_EQ(ReasonOf(OpenWithConfig(R"({"_class_name": 7})").status()), reason::kMalformedFile);
}

TEST_F(CheckpointTest, AnIndexNamesOnlyFilesOfItsOwnDirectory) {
  for (const char* index : {R"({"weight_map": {"a": "../model.safetensors"}})", R"({"weight_map": {"a": "/etc/passwd"}})",
                            R"({"weight_map": {"a": 1}})", R"({"weight_map": []})", R"({})", "[]"}) {
    directory_.Write("model.safetensors.index.json", index);
    EXPECT_EQ(ReasonOf(OpenCheckpoint(directory_.path().string()).status()), reason::kMalformedFile) << index;
  }
}

TEST_F(CheckpointTest, AMalformedShardIsNamed) {
  directory_.Write("model-00001-of-00002.safetensors", FileOf(model_));
  directory_.Write("model-00002-of-00002.safetensors", "short");
  const auto checkpoint = OpenCheckpoint(directory_.path().string());
  EXPECT_EQ(ReasonOf(checkpoint.status()), reason::kMalformedFile);
  EXPECT_EQ(DetailsOf(checkpoint.status()).at("file"), "model-00002-of-00002.safetensors");
}

TEST_F(CheckpointTest, ATensorInTwoShardsIsRefused) {
  directory_.Write("model-00001-of-00002.safetensors", FileOf(model_));
  directory_.Write("model-00002-of-00002.safetensors", FileOf(model_));
  EXPECT_EQ(ReasonOf(OpenCheckpoint(directory_.path().string()).status()), reason::kBadTensor);
}

TEST_F(CheckpointTest, NothingThereIsNotFound) {
  EXPECT_EQ(OpenCheckpoint((directory_.path() / "absent").string()).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(OpenCheckpoint(directory_.path().string()).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(CheckpointTest, TheOfficialRepositorySaysWhichPartitionItIs) {
  directory_.Write("model_index.json", R"({"_minimax_h3": {"partition": "REF2VA"}})");
  const auto checkpoint = OpenChanged([](Tensors&) {});
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_EQ(checkpoint->partition, Partition::kRef2va);
  directory_.Write("model_index.json", R"({"_minimax_h3": {"partition": 2}})");
  EXPECT_EQ(OpenChanged([](Tensors&) {})->partition, Partition::kUnknown);
}

}  // namespace
}  // namespace h3
