#include "server/format/adapter.h"

#include <cmath>
#include <fstream>
#include <iterator>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "tests/testing/golden.h"
#include "tests/testing/safetensors_builder.h"

namespace h3 {
namespace {

using testing::BuildSafetensors;
using testing::GoldenPath;
using testing::Scalar;
using testing::Zeros;

const Geometry& GeometryOf(const std::string& model) {
  static auto* const geometries = new std::map<std::string, Geometry>;
  const auto found = geometries->find(model);
  if (found != geometries->end()) return found->second;
  const auto checkpoint = OpenCheckpoint(GoldenPath(model + "/model.safetensors"));
  EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
  return (*geometries)[model] = checkpoint->geometry;
}
const Geometry& Full() { return GeometryOf("full"); }
const Geometry& Pruned() { return GeometryOf("pruned"); }

absl::StatusOr<AdapterManifest> Read(const std::string& content, const Geometry& geometry, const IntakeOptions& options = {}) {
  const auto header = ParseSafetensorsHeader(content, static_cast<int64_t>(content.size()));
  EXPECT_TRUE(header.ok()) << header.status();
  const TensorReader read = [&](const TensorInfo& info) -> absl::StatusOr<std::string> {
    return content.substr(static_cast<size_t>(info.offset), static_cast<size_t>(info.bytes));
  };
  return ReadAdapter(*header, read, geometry, options);
}

absl::StatusOr<AdapterManifest> ReadGolden(const std::string& name, const Geometry& geometry,
                                           const IntakeOptions& options = {}) {
  std::ifstream file(GoldenPath(name + ".safetensors"), std::ios::binary);
  EXPECT_TRUE(file.good()) << name;
  return Read({std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()}, geometry, options);
}

const std::string& SiteName(const AdapterTerm& term) {
  static const auto* const sites = new std::vector<Site>(Sites(Full()));
  return (*sites)[static_cast<size_t>(term.site)].name;
}

constexpr int64_t kRank = 4;
constexpr char kModule[] = "blocks.0.attn.qkv_proj";

// A pair of this rank for a module of these widths.
std::vector<HostTensor> Pair(const std::string& module, int64_t out, int64_t in, int64_t rank = kRank) {
  return {Zeros(module + ".lora_A.weight", {rank, in}), Zeros(module + ".lora_B.weight", {out, rank})};
}

std::vector<HostTensor> QkvPair() { return Pair(kModule, 3 * Full().inner(), Full().hidden); }

std::vector<HostTensor> With(std::vector<HostTensor> tensors, std::vector<HostTensor> more) {
  for (HostTensor& tensor : more) tensors.push_back(std::move(tensor));
  return tensors;
}

std::string ReasonFor(const std::vector<HostTensor>& tensors, const IntakeOptions& options = {},
                      const std::map<std::string, std::string>& metadata = {}, const Geometry& geometry = Full()) {
  return ReasonOf(Read(BuildSafetensors(tensors, metadata), geometry, options).status());
}

// The only term of a file.
AdapterTerm OnlyTerm(const std::vector<HostTensor>& tensors, const IntakeOptions& options = {},
                     const std::map<std::string, std::string>& metadata = {}, const Geometry& geometry = Full()) {
  const auto manifest = Read(BuildSafetensors(tensors, metadata), geometry, options);
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  if (!manifest.ok()) return {};
  EXPECT_EQ(manifest->terms.size(), 1u);
  return manifest->terms.at(0);
}

struct GoldenAdapter {
  std::string name;
  size_t terms;
  std::string format;
  std::string model = "full";
};

class GoldenAdapters : public ::testing::TestWithParam<GoldenAdapter> {};

TEST_P(GoldenAdapters, EveryModuleBecomesATerm) {
  const auto manifest = ReadGolden("lora/" + GetParam().name, GeometryOf(GetParam().model));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->terms.size(), GetParam().terms);
  EXPECT_EQ(manifest->format, GetParam().format);
  EXPECT_THAT(manifest->left_out, ::testing::IsEmpty());
  EXPECT_EQ(manifest->curve.has_value(), GetParam().name.rfind("complete", 0) == 0);
}

INSTANTIATE_TEST_SUITE_P(
    Lora, GoldenAdapters,
    ::testing::Values(GoldenAdapter{"turbo_bare", 29, "reference"}, GoldenAdapter{"turbo_comfy", 29, "reference"},
                      GoldenAdapter{"turbo_comfy_alpha4", 29, "reference"}, GoldenAdapter{"turbo_diffsynth", 29, "diffsynth"},
                      GoldenAdapter{"turbo_diffusers", 41, "diffusers"}, GoldenAdapter{"turbo_kohya_alpha4", 29, "kohya"},
                      GoldenAdapter{"turbo_peft", 29, "peft"}, GoldenAdapter{"style_bf16", 16, "reference"},
                      GoldenAdapter{"style_fp16_metaalpha", 16, "reference"}, GoldenAdapter{"uneven", 16, "reference"},
                      GoldenAdapter{"edges_fp32", 11, "reference"}, GoldenAdapter{"time_embedder", 2, "reference"},
                      GoldenAdapter{"split_qkv_ranks", 11, "diffusers"}, GoldenAdapter{"dora", 8, "reference"},
                      GoldenAdapter{"dora_columns", 6, "reference"}, GoldenAdapter{"dora_diffusers", 12, "diffusers"},
                      GoldenAdapter{"lokr", 4, "reference"}, GoldenAdapter{"complete_fixed_a", 24, "reference", "pruned"},
                      GoldenAdapter{"complete_fixed_b_comfy", 16, "reference", "pruned"},
                      GoldenAdapter{"complete_own_table", 24, "reference", "pruned"}),
    [](const auto& info) { return info.param.name; });

TEST(RejectedAdapterTest, EachHasItsReason) {
  std::ifstream file(GoldenPath("reject/reasons.json"));
  const nlohmann::json reasons = nlohmann::json::parse(file);
  ASSERT_FALSE(reasons.empty());
  for (const auto& [name, entry] : reasons.items()) {
    const auto manifest = ReadGolden("reject/" + name, Full());
    // Kinds that are supported by now, and values that only the worker reads.
    if (entry.contains("until") || name == "nan") {
      EXPECT_TRUE(manifest.ok()) << name << ": " << manifest.status();
      continue;
    }
    EXPECT_EQ(manifest.status().code(), absl::StatusCode::kInvalidArgument) << name;
    EXPECT_EQ(ReasonOf(manifest.status()), entry["reason"].get<std::string>()) << name << ": " << manifest.status();
  }
}

TEST(AdapterScaleTest, WithoutAlphaTheScaleIsOne) {
  const AdapterTerm term = OnlyTerm(QkvPair());
  EXPECT_EQ(term.scale, 1);
  EXPECT_EQ(term.rank, kRank);
  EXPECT_EQ(term.scale_source, "default (alpha = rank)");
}

TEST(AdapterScaleTest, AnAlphaTensorComesBeforeTheMetadataAndTheRequestBeforeBoth) {
  const std::vector<HostTensor> tensors = With(QkvPair(), {Scalar(std::string(kModule) + ".alpha", 2)});
  const std::map<std::string, std::string> metadata = {{"alpha", "8"}};
  const AdapterTerm own = OnlyTerm(tensors, {}, metadata);
  EXPECT_EQ(own.scale, 0.5);
  EXPECT_EQ(own.scale_source, "alpha tensor");
  const AdapterTerm declared = OnlyTerm(QkvPair(), {}, metadata);
  EXPECT_EQ(declared.scale, 2);
  EXPECT_EQ(declared.scale_source, "metadata alpha");
  const AdapterTerm requested = OnlyTerm(tensors, {.alpha = 1}, metadata);
  EXPECT_EQ(requested.scale, 0.25);
  EXPECT_EQ(requested.scale_source, "request");
}

TEST(AdapterScaleTest, AnAlphaOfZeroSilencesTheAdapterAndIsToldAsAWarning) {
  using ::testing::ElementsAre;
  const auto warnings = [](const std::vector<HostTensor>& tensors, const IntakeOptions& options = {}) {
    const auto manifest = Read(BuildSafetensors(tensors), Full(), options);
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    return manifest.ok() ? manifest->warnings : std::vector<std::string>();
  };
  const std::vector<HostTensor> zero = With(QkvPair(), {Scalar(std::string(kModule) + ".alpha", 0)});
  EXPECT_EQ(OnlyTerm(zero).scale, 0);
  EXPECT_THAT(warnings(zero), ElementsAre("alpha is 0 (alpha tensor) for 1 of 1 modules: the adapter has no effect; give "
                                          "alpha= in the request if that is not meant"));
  const auto mixed = warnings(With(zero, Pair("blocks.1.attn.qkv_proj", 3 * Full().inner(), Full().hidden)));
  ASSERT_EQ(mixed.size(), 1u);
  EXPECT_THAT(mixed[0], ::testing::HasSubstr("for 1 of 2 modules: they have no effect"));
  EXPECT_THAT(warnings(zero, {.alpha = 4}), ElementsAre());
  EXPECT_THAT(warnings(QkvPair()), ElementsAre());
  // DoRA sets the norms of its weight whatever its factors add.
  EXPECT_THAT(warnings(With(zero, {Zeros(std::string(kModule) + ".dora_scale", {3 * Full().inner(), 1})})), ElementsAre());
}

TEST(AdapterScaleTest, AnAlphaTensorMayHaveAnyNumberOfDimensionsOfOne) {
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {1}, {1, 1}, {1, 1, 1, 1}}) {
    HostTensor alpha = Scalar(std::string(kModule) + ".alpha", 8);
    alpha.shape = shape;
    EXPECT_EQ(OnlyTerm(With(QkvPair(), {alpha})).alpha, 8) << shape.size();
  }
}

// As tools write them that treat linear layers as 1x1 convolutions.
TEST(AdapterShapeTest, TrailingDimensionsOfOneAreTheSameMatrices) {
  const int64_t out = 3 * Full().inner(), in = Full().hidden;
  const std::string m = kModule;
  const AdapterTerm term = OnlyTerm({Zeros(m + ".lora_A.weight", {kRank, in, 1, 1}),
                                     Zeros(m + ".lora_B.weight", {out, kRank, 1, 1}), Zeros(m + ".dora_scale", {out, 1, 1, 1})});
  ASSERT_TRUE(term.low_rank.has_value());
  EXPECT_EQ(term.rank, kRank);
  EXPECT_EQ(term.low_rank->a.shape, (std::vector<int64_t>{kRank, in}));
  EXPECT_EQ(term.low_rank->b.shape, (std::vector<int64_t>{out, kRank}));
  EXPECT_EQ(term.low_rank->magnitude_axis, MagnitudeAxis::kRows);
  // Two dimensions stay two, also where one of them is 1.
  const AdapterTerm thin = OnlyTerm({Zeros(m + ".lora_A.weight", {1, in, 1}), Zeros(m + ".lora_B.weight", {out, 1})});
  ASSERT_TRUE(thin.low_rank.has_value());
  EXPECT_EQ(thin.low_rank->b.shape, (std::vector<int64_t>{out, 1}));
  // What is not one is not dropped.
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{kRank, in, 3, 3}, {kRank, in, 3, 1}, {1, kRank, in}}) {
    EXPECT_EQ(ReasonFor({Zeros(m + ".lora_A.weight", shape), Zeros(m + ".lora_B.weight", {out, kRank})}), reason::kShapeMismatch);
  }
}

TEST(AdapterScaleTest, PeftConfigGivesAlphaPatternsAndRootRank) {
  const AdapterTerm plain = OnlyTerm(QkvPair(), {.settings = {.peft_config = R"({"r": 4, "lora_alpha": 8})"}});
  EXPECT_EQ(plain.scale, 2);
  EXPECT_EQ(plain.scale_source, "adapter_config.json");
  const AdapterTerm root = OnlyTerm(QkvPair(), {.settings = {.peft_config = R"({"r": 4, "lora_alpha": 8, "use_rslora": true})"}});
  EXPECT_TRUE(root.root_rank);
  EXPECT_EQ(root.scale, 8 / std::sqrt(4.0));
  EXPECT_EQ(OnlyTerm(QkvPair(), {.settings = {.peft_config = R"({"r": 4, "lora_alpha": 8, "alpha_pattern": {"qkv_proj": 2}})"}}).scale, 0.5);
}

TEST(AdapterScaleTest, MetadataCountForTheirOwnComponentOnly) {
  const std::map<std::string, std::string> metadata = {
      {"lora_adapter_metadata", R"({"transformer.lora_alpha": 8, "text_encoder.lora_alpha": 64, "transformer.r": 4})"}};
  EXPECT_EQ(OnlyTerm(QkvPair(), {}, metadata).scale, 2);
}

TEST(AdapterScaleTest, RefusesWhatContradictsItselfOrIsNoNumber) {
  EXPECT_EQ(ReasonFor(QkvPair(), {}, {{"alpha", "8"}, {"ss_network_alpha", "4"}}), reason::kBadScale);
  EXPECT_EQ(ReasonFor(QkvPair(), {}, {{"lora_alpha", "8"}, {"network_alpha", "8"}}), "");
  for (const char* text : {"", "eight", "nan", "inf", "-1", "1e300"}) {
    EXPECT_EQ(ReasonFor(QkvPair(), {}, {{"alpha", text}}), reason::kBadScale) << text;
  }
  EXPECT_EQ(ReasonFor(QkvPair(), {}, {{"alpha", "8"}, {"rank", "0"}}), reason::kBadScale);
  EXPECT_EQ(ReasonFor(QkvPair(), {}, {{"alpha", "8"}, {"rank", "64"}}), reason::kBadScale);
  EXPECT_EQ(ReasonFor(QkvPair(), {.settings = {.peft_config = "[]"}}), reason::kBadScale);
  EXPECT_EQ(ReasonFor(QkvPair(), {.settings = {.peft_config = R"({"lora_alpha": 4})"}}, {{"alpha", "8"}}), reason::kBadScale);
}

// Found by fuzzing: what is nested without end must not be walked through again to be shown.
TEST(AdapterScaleTest, RefusesValuesThatAreNestedWithoutEnd) {
  const std::string nested = std::string(200'000, '[') + std::string(200'000, ']');
  EXPECT_EQ(ReasonFor(QkvPair(), {.settings = {.peft_config = R"({"lora_alpha": )" + nested + "}"}}), reason::kBadScale);
  EXPECT_EQ(ReasonFor(QkvPair(), {}, {{"lora_adapter_metadata", R"({"transformer.r": )" + nested + "}"}}), reason::kBadScale);
}

TEST(AdapterScaleTest, RefusesMorePatternsThanAnyModelHasModules) {
  nlohmann::json config = {{"lora_alpha", 8}, {"r", 4}, {"alpha_pattern", nlohmann::json::object()}};
  for (int i = 0; i < 2000; ++i) config["alpha_pattern"][std::to_string(i)] = 4;
  EXPECT_EQ(ReasonFor(QkvPair(), {.settings = {.peft_config = config.dump()}}), reason::kBadScale);
}

// An alpha from outside is the way out that the refusal names.
TEST(AdapterScaleTest, AGivenAlphaTakesThePlaceOfWhatContradictsItself) {
  const std::map<std::string, std::string> metadata = {{"alpha", "8"}, {"lora_alpha", "16"}, {"rank", "64"}};
  EXPECT_EQ(ReasonFor(QkvPair(), {}, metadata), reason::kBadScale);
  EXPECT_EQ(OnlyTerm(QkvPair(), {.alpha = 2.0}, metadata).scale, 0.5);
  EXPECT_EQ(OnlyTerm(QkvPair(), {.settings = {.alpha = 2.0}}, metadata).scale, 0.5);
}

// A short pattern that takes long to compile, and one that is none: refused, not skipped.
TEST(AdapterScaleTest, RefusesPatternsThatCannotBeUsed) {
  for (const char* pattern : {R"(\\pL{500}N)", "qkv(", R"((((a{30}){30}){30}){30})"}) {
    EXPECT_EQ(ReasonFor(QkvPair(), {.settings = {.peft_config = absl::StrCat(R"({"lora_alpha": 8, "alpha_pattern": {")", pattern, R"(": 2}})")}}),
              reason::kBadScale)
        << pattern;
  }
}

TEST(AdapterTest, RefusesFullDifferencesInLoKrsClothing) {
  const std::string m = kModule;
  const int64_t out = 3 * Full().inner(), in = Full().hidden;
  const std::vector<HostTensor> whole = {Zeros(m + ".lokr_w1", {out, in}), Zeros(m + ".lokr_w2", {1, 1})};
  EXPECT_EQ(ReasonFor(whole), reason::kUnsupportedAdapterType);
  EXPECT_EQ(ReasonFor(whole, {.materialized = true}), "");
  const std::vector<HostTensor> halves = {Zeros(m + ".lokr_w1_a", {out, 1}), Zeros(m + ".lokr_w1_b", {1, in}), Zeros(m + ".lokr_w2", {1, 1})};
  EXPECT_EQ(ReasonFor(halves), reason::kUnsupportedAdapterType);
}

TEST(AdapterTest, RefusesAnAbsurdRank) {
  EXPECT_EQ(ReasonFor(Pair("final_layer.audio_out", Full().audio_channels, Full().hidden, 40'000)), reason::kUnsupportedAdapterType);
}

// Found by fuzzing: sizes that no int64 holds, out of factors without an element.
TEST(AdapterTest, RefusesKroneckerFactorsWhoseProductHasNoSize) {
  const std::string m = kModule;
  const int64_t huge = int64_t{1} << 32;
  EXPECT_EQ(ReasonFor({Zeros(m + ".lokr_w1", {huge, 0}), Zeros(m + ".lokr_w2", {huge, 0})}), reason::kShapeMismatch);
}

TEST(AdapterScaleTest, RefusesAlphaTensorsThatAreNotOneNumber) {
  const std::string alpha = std::string(kModule) + ".alpha";
  for (const float value : {-1.0f, std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(ReasonFor(With(QkvPair(), {Scalar(alpha, value)})), reason::kBadScale) << value;
  }
  EXPECT_EQ(ReasonFor(With(QkvPair(), {Zeros(alpha, {2})})), reason::kBadScale);
  EXPECT_EQ(ReasonFor(With(QkvPair(), {Zeros(alpha, {1, 2})})), reason::kBadScale);
  EXPECT_EQ(ReasonFor(With(QkvPair(), {Zeros(alpha, {0})})), reason::kBadScale);
  EXPECT_EQ(ReasonFor(With(QkvPair(), {Zeros(alpha, {}, DType::kBool)})), reason::kBadScale);
}

TEST(AdapterNamesTest, ASplitQueryTakesItsOwnRowsOnly) {
  const int64_t inner = Full().inner();
  const AdapterTerm q = OnlyTerm(Pair("transformer.transformer_blocks.1.attn.to_q", inner, Full().hidden));
  EXPECT_EQ(SiteName(q), "blocks.1.attn.qkv_proj");
  EXPECT_EQ(q.rows, (RowRange{0, inner}));
  EXPECT_EQ(q.row_map, RowMap::kIdentity);
  const AdapterTerm v = OnlyTerm(Pair("transformer.transformer_blocks.1.attn.to_v", inner, Full().hidden));
  EXPECT_EQ(v.rows, (RowRange{2 * inner, inner}));
}

TEST(AdapterNamesTest, HalvesOfFc1AreSwappedWhereTheTrainerStoresThemSo) {
  const int64_t out = 2 * Full().ffn, in = Full().hidden;
  const std::vector<HostTensor> diffusers = Pair("transformer.transformer_blocks.0.ff.net.0.proj", out, in);
  const std::vector<HostTensor> reference = Pair("blocks.0.mlp.fc1", out, in);
  EXPECT_EQ(OnlyTerm(diffusers).row_map, RowMap::kSwapHalves);
  EXPECT_EQ(SiteName(OnlyTerm(diffusers)), "blocks.0.mlp.fc1");
  EXPECT_EQ(OnlyTerm(reference).row_map, RowMap::kIdentity);
  EXPECT_EQ(OnlyTerm(diffusers, {.settings = {.fc1_gate_first = true}}).row_map, RowMap::kIdentity);
  EXPECT_EQ(OnlyTerm(reference, {.settings = {.fc1_gate_first = false}}).row_map, RowMap::kSwapHalves);
  EXPECT_EQ(OnlyTerm(reference, {}, {{"gate_first", "false"}}).row_map, RowMap::kSwapHalves);
}

TEST(AdapterNamesTest, DiffSynthStoresQkvByHead) {
  const int64_t out = 3 * Full().inner(), in = Full().hidden;
  const std::string module(kModule);
  const std::vector<HostTensor> diffsynth = {Zeros(module + ".lora_A.default.weight", {kRank, in}),
                                             Zeros(module + ".lora_B.default.weight", {out, kRank})};
  EXPECT_EQ(OnlyTerm(diffsynth).row_map, RowMap::kDeinterleave);
  EXPECT_EQ(OnlyTerm(QkvPair()).row_map, RowMap::kIdentity);
  EXPECT_EQ(OnlyTerm(diffsynth, {.settings = {.qkv_layout = QkvLayout::kStacked}}).row_map, RowMap::kIdentity);
  EXPECT_EQ(OnlyTerm(QkvPair(), {.settings = {.qkv_layout = QkvLayout::kInterleaved}}).row_map, RowMap::kDeinterleave);
}

TEST(AdapterNamesTest, TwoNamesOfOneModuleAreAmbiguous) {
  EXPECT_EQ(ReasonFor(With(QkvPair(), Pair("lora_unet_blocks_0_attn_qkv_proj", 3 * Full().inner(), Full().hidden))),
            reason::kAmbiguousNames);
  EXPECT_EQ(ReasonFor(With(QkvPair(), Pair("blocks.0.attn.to_q", Full().inner(), Full().hidden))), reason::kAmbiguousNames);
}

TEST(AdapterNamesTest, NothingOfAFileIsDropped) {
  EXPECT_EQ(ReasonFor(With(QkvPair(), {Zeros("something.else", {1})})), reason::kUnknownModule);
  EXPECT_EQ(ReasonFor(With(QkvPair(), {Scalar("blocks.1.attn.qkv_proj.alpha", 1)})), reason::kMissingPair);
  EXPECT_EQ(ReasonFor(With(QkvPair(), {Zeros("blocks.0.mlp.fc2.weight", {Full().hidden, Full().ffn})})),
            reason::kUnsupportedAdapterType);
}

TEST(AdapterNamesTest, QuantisedFactorsAreRefused) {
  std::vector<HostTensor> tensors = QkvPair();
  tensors[0] = Zeros(tensors[0].name, tensors[0].shape, DType::kI8);
  EXPECT_EQ(ReasonFor(tensors), reason::kUnsupportedAdapterType);
}

TEST(AdapterNamesTest, ARankOfZeroIsAShapeMismatch) {
  EXPECT_EQ(ReasonFor(Pair(kModule, 3 * Full().inner(), Full().hidden, 0)), reason::kShapeMismatch);
}

TEST(AdapterNamesTest, RefusalsNameTensorAndShapes) {
  const auto manifest = Read(BuildSafetensors(Pair(kModule, 3 * Full().inner(), Full().hidden + 8)), Full());
  const ErrorDetails details = DetailsOf(manifest.status());
  EXPECT_EQ(details.at("tensor"), "blocks.0.attn.qkv_proj.lora_A.weight");
  EXPECT_EQ(details.at("shape"), "[4, 72]");
  EXPECT_EQ(details.at("expected"), "[rank, 64]");
}

TEST(AdapterNamesTest, NormDifferencesAndOffsetsAreTaken) {
  const auto manifest = Read(BuildSafetensors({Zeros("diffusion_model.blocks.0.attn.q_norm.diff", {Full().head_dim}),
                                               Zeros("diffusion_model.blocks.0.attn.out_proj.diff_b", {Full().hidden})}),
                             Full());
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  ASSERT_EQ(manifest->norm_offsets.size(), 1u);
  EXPECT_EQ(manifest->norm_offsets[0].tensor, "blocks.0.attn.q_norm.weight");
  ASSERT_EQ(manifest->terms.size(), 1u);
  EXPECT_TRUE(manifest->terms[0].offset.has_value());
}

TEST(AdapterPartitionTest, ASectionForEachPartitionGivesTheBaseItsOwn) {
  const int64_t out = 3 * Full().inner(), in = Full().hidden;
  const std::vector<HostTensor> both =
      With(Pair("transformer.blocks.0.attn.qkv_proj", out, in, 2), Pair("transformer_ref.blocks.0.attn.qkv_proj", out, in, 6));
  const auto ref = Read(BuildSafetensors(both), Full(), {.base_partition = Partition::kRef2va});
  ASSERT_TRUE(ref.ok()) << ref.status();
  ASSERT_EQ(ref->terms.size(), 1u);
  EXPECT_EQ(ref->terms[0].rank, 6);
  EXPECT_THAT(ref->ignored_sections, ::testing::ElementsAre("transformer"));
  const auto plain = Read(BuildSafetensors(both), Full(), {.base_partition = Partition::kFl2va});
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ(plain->terms.at(0).rank, 2);
  EXPECT_THAT(plain->ignored_sections, ::testing::ElementsAre("transformer_ref"));
}

TEST(AdapterPartitionTest, AnAdapterOfTheOtherPartitionIsRefused) {
  const auto tensors = Pair("transformer_ref.blocks.0.attn.qkv_proj", 3 * Full().inner(), Full().hidden);
  const auto refused = Read(BuildSafetensors(tensors), Full(), {.base_partition = Partition::kFl2va});
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused.status()), reason::kBaseMismatch);
  const auto unknown = Read(BuildSafetensors(tensors), Full());
  ASSERT_TRUE(unknown.ok()) << unknown.status();
  EXPECT_EQ(unknown->partition, Partition::kRef2va);
  EXPECT_THAT(unknown->warnings, ::testing::SizeIs(1));
}

TEST(PrunedAdapterTest, AdalnPairsOfTheFullWidthNeedTheGrid) {
  const auto refused = ReadGolden("lora/turbo_comfy", Pruned());
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused.status()), reason::kAdalnNeedsGrid);

  const auto through = ReadGolden("lora/turbo_comfy", Pruned(), {.base_has_grid = true, .grid_width = Full().adaln_width});
  ASSERT_TRUE(through.ok()) << through.status();
  EXPECT_EQ(through->terms.size(), 29u);
  int on_grid = 0;
  for (const AdapterTerm& term : through->terms) on_grid += term.features == AdalnFeatures::kGrid;
  EXPECT_EQ(on_grid, 5);  // Four blocks and the final layer.

  const auto other = ReadGolden("lora/turbo_comfy", Pruned(), {.base_has_grid = true, .grid_width = 12});
  EXPECT_EQ(ReasonOf(other.status()), reason::kShapeMismatch);
}

TEST(PrunedAdapterTest, LeaveOutDropsTheAdalnPairsAndSaysSo) {
  IntakeOptions options;
  options.leave_out = {"adaln"};
  const auto manifest = ReadGolden("lora/turbo_comfy", Pruned(), options);
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->terms.size(), 24u);
  EXPECT_THAT(manifest->left_out, ::testing::SizeIs(5));
}

TEST(PrunedAdapterTest, PairsInTableCoordinatesAreRefused) {
  const auto tensors = Pair("blocks.0.adaln_proj.linear", 18 * Pruned().hidden, Pruned().adaln_width);
  EXPECT_EQ(ReasonOf(Read(BuildSafetensors(tensors), Pruned()).status()), reason::kBaseMismatch);
  EXPECT_EQ(ReasonOf(Read(BuildSafetensors(tensors), Full()).status()), reason::kBaseMismatch);
}

TEST(PrunedAdapterTest, ATimeEmbedderIsNotThereToBeAdapted) {
  EXPECT_EQ(ReasonOf(ReadGolden("lora/time_embedder", Pruned()).status()), reason::kBaseMismatch);
}

TEST(PrunedAdapterTest, ACurveIsCompleteOrRefused) {
  const std::vector<HostTensor> table = {Zeros("adaln_t_table", {1025, 8})};
  const std::vector<HostTensor> one = {Zeros("blocks.0.adaln_proj.linear.weight", {18 * Pruned().hidden, 8}),
                                       Zeros("blocks.0.adaln_proj.linear.bias", {18 * Pruned().hidden})};
  for (const auto& tensors : {With(QkvPair(), table), With(QkvPair(), one), With(With(QkvPair(), table), one)}) {
    EXPECT_EQ(ReasonOf(Read(BuildSafetensors(tensors), Pruned()).status()), reason::kIncompleteCurve);
  }
}

// The coordinates of a pruned table are arbitrary up to a linear change: a pair in them means something only with its own table.
TEST(PrunedAdapterTest, PairsInTableCoordinatesNeedTheirOwnTable) {
  const Geometry pruned = Pruned();
  const std::string module = "blocks.0.adaln_proj.linear";
  const int64_t out = 18 * pruned.hidden, width = pruned.adaln_width;
  const std::vector<HostTensor> pair = {Zeros(module + ".lora_A.weight", {2, width}), Zeros(module + ".lora_B.weight", {out, 2})};
  EXPECT_EQ(ReasonFor(pair, {}, {}, pruned), reason::kBaseMismatch);
  const std::vector<HostTensor> proven = With(pair, {Zeros("diffusion_model.adaln_t_table", {17, width})});
  for (const Geometry& base : {pruned, Full()}) {
    EXPECT_EQ(OnlyTerm(proven, {}, {}, base).features, AdalnFeatures::kOwnTable);
  }
  // Any width and grid length; a LoKr too.
  const std::vector<HostTensor> wider = {Zeros(module + ".lora_A.weight", {2, 9}), Zeros(module + ".lora_B.weight", {out, 2}),
                                         Zeros("adaln_t_table", {5, 9})};
  EXPECT_EQ(OnlyTerm(wider, {}, {}, pruned).features, AdalnFeatures::kOwnTable);
  const std::vector<HostTensor> lokr = {Zeros(module + ".lokr_w1", {2, 2}), Zeros(module + ".lokr_w2", {out / 2, width / 2})};
  EXPECT_EQ(ReasonFor(lokr, {}, {}, pruned), reason::kBaseMismatch);
  EXPECT_EQ(OnlyTerm(With(lokr, {Zeros("adaln_t_table", {17, width})}), {}, {}, pruned).features, AdalnFeatures::kOwnTable);
}

TEST(AdapterSettingsTest, ComeAfterTheRequestAndBeforeTheFile) {
  const std::map<std::string, std::string> metadata = {{"alpha", "8"}};
  AdapterTerm term = OnlyTerm(QkvPair(), {.settings = {.alpha = 2.0}}, metadata);
  EXPECT_EQ(term.scale, 0.5);
  EXPECT_EQ(term.scale_source, "adapter settings");
  term = OnlyTerm(QkvPair(), {.settings = {.alpha = 2.0}, .alpha = 16.0}, metadata);
  EXPECT_EQ(term.scale, 4);
  EXPECT_EQ(term.scale_source, "request");
  EXPECT_EQ(ReasonFor(QkvPair(), {.base_partition = Partition::kFl2va, .settings = {.partition = Partition::kRef2va}}),
            reason::kBaseMismatch);
}

TEST(DifferenceTest, IsTakenOnlyByAMergedCopy) {
  const HostTensor difference = Zeros(std::string(kModule) + ".diff", {3 * Full().inner(), Full().hidden});
  EXPECT_EQ(ReasonFor({difference}), reason::kUnsupportedAdapterType);
  EXPECT_TRUE(OnlyTerm({difference}, {.materialized = true}).difference.has_value());
  EXPECT_EQ(ReasonFor({Zeros(std::string(kModule) + ".diff", {3, Full().hidden})}, {.materialized = true}), reason::kShapeMismatch);
}

TEST(SummariseScalesTest, CountsModulesOfOneKindAndScale) {
  const auto manifest = ReadGolden("lora/style_fp16_metaalpha", Full());
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  int64_t modules = 0;
  for (const EffectiveScale& line : SummariseScales(*manifest, Full())) {
    EXPECT_EQ(line.rank, 5);
    EXPECT_EQ(line.alpha, 2.5);
    EXPECT_EQ(line.scale, 0.5);
    EXPECT_EQ(line.source, "metadata alpha");
    modules += line.modules;
  }
  EXPECT_EQ(modules, 16);
}

}  // namespace
}  // namespace h3
