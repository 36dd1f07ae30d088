// Faults that people met with H3 adapters elsewhere, as tests/field_reports.md lists them: what can be told from a header
// alone. Only what no other test of this folder asserts.
#include <cmath>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/error.h"
#include "server/format/adapter.h"
#include "server/format/checkpoint.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/testing/temporary_directory.h"

namespace h3 {
namespace {

using testing::BuildSafetensors;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using testing::Scalar;
using ::testing::SizeIs;
using testing::Zeros;
using Metadata = std::map<std::string, std::string>;
using Tensors = std::vector<HostTensor>;

// The reports' own small geometry: no two targets have the same shape.
constexpr Geometry kFull = {.hidden = 16,
                            .blocks = 2,
                            .refiner_blocks = 1,
                            .heads = 2,
                            .head_dim = 4,
                            .ffn = 14,
                            .video_channels = 3,
                            .audio_channels = 5,
                            .text_width = 10,
                            .time_input = 6,
                            .time_hidden = 18,
                            .adaln_width = 20,
                            .curve_rows = 0,
                            .rope_frequencies = 1};

// The same, pruned to a table of this width.
Geometry PrunedTo(int64_t width) {
  Geometry geometry = kFull;
  geometry.time_input = geometry.time_hidden = 0;
  geometry.adaln_width = width;
  geometry.curve_rows = 9;
  return geometry;
}
const Geometry kPruned = PrunedTo(8);

constexpr char kQkv[] = "blocks.0.attn.qkv_proj";
constexpr char kAdaln[] = "blocks.0.adaln_proj.linear";
constexpr int64_t kAdalnRows = 18 * kFull.hidden;

absl::StatusOr<AdapterManifest> Read(const Tensors& tensors, const Metadata& metadata = {}, const IntakeOptions& options = {},
                                     const Geometry& geometry = kFull) {
  const std::string content = BuildSafetensors(tensors, metadata);
  const auto header = ParseSafetensorsHeader(content, static_cast<int64_t>(content.size()));
  EXPECT_TRUE(header.ok()) << header.status();
  const TensorReader read = [&](const TensorInfo& info) -> absl::StatusOr<std::string> {
    return content.substr(static_cast<size_t>(info.offset), static_cast<size_t>(info.bytes));
  };
  return ReadAdapter(*header, read, geometry, options);
}

std::string ReasonFor(const Tensors& tensors, const Metadata& metadata = {}, const IntakeOptions& options = {},
                      const Geometry& geometry = kFull) {
  return ReasonOf(Read(tensors, metadata, options, geometry).status());
}

// The only term of a file.
AdapterTerm OnlyTerm(const Tensors& tensors, const Metadata& metadata = {}, const IntakeOptions& options = {},
                     const Geometry& geometry = kFull) {
  const auto manifest = Read(tensors, metadata, options, geometry);
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  if (!manifest.ok() || manifest->terms.size() != 1) {
    ADD_FAILURE() << "not one term";
    return {};
  }
  return manifest->terms.front();
}

std::string SiteOf(const AdapterTerm& term) { return Sites(kFull).at(static_cast<size_t>(term.site)).name; }

Tensors Pair(const std::string& module, int64_t out, int64_t in, int64_t rank) {
  return {Zeros(module + ".lora_A.weight", {rank, in}), Zeros(module + ".lora_B.weight", {out, rank})};
}
Tensors QkvPair(int64_t rank = 4) { return Pair(kQkv, 24, 16, rank); }
Tensors KohyaPair(const std::string& module, int64_t out, int64_t in, int64_t rank) {
  return {Zeros(module + ".lora_down.weight", {rank, in}), Zeros(module + ".lora_up.weight", {out, rank})};
}

Tensors Join(std::initializer_list<Tensors> lists) {
  Tensors all;
  for (const Tensors& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

// Scale of each site of a file, by name.
std::map<std::string, double> Scales(const absl::StatusOr<AdapterManifest>& manifest) {
  EXPECT_TRUE(manifest.ok()) << manifest.status();
  std::map<std::string, double> scales;
  if (manifest.ok()) {
    for (const AdapterTerm& term : manifest->terms) scales[SiteOf(term)] = term.scale;
  }
  return scales;
}

TEST(FieldReportA1, AKnownPrefixIsTakenOffAndAnAlphaIsNoModule) {
  for (const char* prefix : {"", "model.diffusion_model.", "diffusion_model.", "transformer.", "base_model.model.",
                             "base_model.model.diffusion_model.", "base_model.model.transformer."}) {
    SCOPED_TRACE(prefix);
    const std::string module = absl::StrCat(prefix, kQkv);
    const AdapterTerm term = OnlyTerm(Join({Pair(module, 24, 16, 4), {Scalar(module + ".alpha", 2)}}));
    EXPECT_EQ(SiteOf(term), kQkv);
    EXPECT_EQ(term.scale, 0.5);
    EXPECT_EQ(term.scale_source, "alpha tensor");
  }
}

TEST(FieldReportA1, APrefixThatOccursTwiceIsNoName) {
  for (const char* prefix : {"diffusion_model.diffusion_model.", "transformer.transformer.", "model.model.diffusion_model."}) {
    EXPECT_EQ(ReasonFor(Pair(absl::StrCat(prefix, kQkv), 24, 16, 4)), reason::kUnknownModule) << prefix;
  }
}

TEST(FieldReportA1, SuffixesAreAClosedList) {
  for (const auto& [a, b] : std::map<std::string, std::string>{{"lora_A.weight", "lora_B.weight"},
                                                               {"lora_down.weight", "lora_up.weight"},
                                                               {"lora_A.default.weight", "lora_B.default.weight"},
                                                               {"lora.down.weight", "lora.up.weight"},
                                                               {"lora_A", "lora_B"}}) {
    const Tensors tensors = {Zeros(absl::StrCat(kQkv, ".", a), {4, 16}), Zeros(absl::StrCat(kQkv, ".", b), {24, 4})};
    EXPECT_EQ(SiteOf(OnlyTerm(tensors)), kQkv) << a;
  }
  // A part that nobody knows is neither dropped nor taken for a module's.
  for (const char* part : {"lora_C.weight", "lora_A.other.weight", "lora_embedding_A", "scale", "lora_B.weight_g"}) {
    const HostTensor stranger = Zeros(absl::StrCat(kQkv, ".", part), {4, 16});
    EXPECT_EQ(ReasonFor(Join({QkvPair(), {stranger}})), reason::kUnknownModule) << part;
    EXPECT_EQ(DetailsOf(Read(Join({QkvPair(), {stranger}})).status())["tensor"], stranger.name);
  }
}

Tensors DiffSynthPair(const std::string& module, int64_t out, int64_t in) {
  return {Zeros(module + ".lora_A.default.weight", {2, in}), Zeros(module + ".lora_B.default.weight", {out, 2})};
}

TEST(FieldReportA2, OnlyFusedRowsOfThatProducerAreReordered) {
  const auto manifest =
      Read(Join({DiffSynthPair(kQkv, 24, 16), DiffSynthPair("blocks.0.attn.out_proj", 16, 8),
                 DiffSynthPair("blocks.0.mlp.fc1", 28, 16), DiffSynthPair("token_refiner.blocks.0.attn.qkv_proj", 24, 16)}));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  EXPECT_EQ(manifest->format, "diffsynth");
  ASSERT_THAT(manifest->terms, SizeIs(4));
  for (const AdapterTerm& term : manifest->terms) {
    const bool fused = absl::EndsWith(SiteOf(term), "qkv_proj");
    EXPECT_EQ(term.row_map, fused ? RowMap::kDeinterleave : RowMap::kIdentity) << SiteOf(term);
  }
  // PEFT's own dump of a live model has the same infix and stacked rows.
  const std::string peft = absl::StrCat("base_model.model.", kQkv);
  EXPECT_EQ(OnlyTerm(DiffSynthPair(peft, 24, 16)).row_map, RowMap::kIdentity);
}

TEST(FieldReportA2, RowsThatAreNoWholeHeadsAreRefused) {
  const auto refused = Read(DiffSynthPair(kQkv, 22, 16));
  EXPECT_EQ(ReasonOf(refused.status()), reason::kShapeMismatch);
  EXPECT_EQ(DetailsOf(refused.status())["shape"], "[22, 2]");
}

TEST(FieldReportA3, SplitProjectionsKeepTheirOwnRanksAlphasAndRows) {
  for (const std::string block :
       {"transformer.transformer_blocks.0.attn.to_", "blocks.0.attn.to_", "blocks.0.attn.?_proj",
        "diffusion_model.token_refiner.blocks.0.attn.to_", "token_refiner.refiner_blocks.0.attn.to_"}) {
    SCOPED_TRACE(block);
    const auto module = [&](const char* letter) {
      return absl::StrContains(block, "?") ? absl::StrReplaceAll(block, {{"?", letter}}) : block + letter;
    };
    const auto manifest = Read(Join({Pair(module("q"), 8, 16, 2),
                                     {Scalar(module("q") + ".alpha", 2)},
                                     Pair(module("k"), 8, 16, 4),
                                     {Scalar(module("k") + ".alpha", 4)},
                                     Pair(module("v"), 8, 16, 2),
                                     {Scalar(module("v") + ".alpha", 8)}}));
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    std::map<int64_t, std::pair<int64_t, double>> found;  // First row -> rank and scale.
    for (const AdapterTerm& term : manifest->terms) {
      EXPECT_TRUE(absl::EndsWith(SiteOf(term), "blocks.0.attn.qkv_proj"));
      EXPECT_EQ(term.rows.count, 8);
      EXPECT_EQ(term.row_map, RowMap::kIdentity);
      found[term.rows.begin] = {term.rank, term.scale};
    }
    EXPECT_EQ(found, (std::map<int64_t, std::pair<int64_t, double>>{{0, {2, 1}}, {8, {4, 1}}, {16, {2, 4}}}));
  }
}

TEST(FieldReportA3, AWholeProjectionUnderTheNameOfAPartIsRefused) {
  EXPECT_EQ(ReasonFor(Pair("blocks.0.attn.to_q", 24, 16, 2)), reason::kShapeMismatch);
  EXPECT_EQ(ReasonFor(Pair(kQkv, 8, 16, 2)), reason::kShapeMismatch);
}

TEST(FieldReportA4, ADeclaredOrderComesBeforeThatOfTheNamesAndConcernsFc1Only) {
  const Tensors diffusers = Pair("transformer.transformer_blocks.0.ff.net.0.proj", 28, 16, 2);
  const Tensors native = Pair("blocks.0.mlp.fc1", 28, 16, 2);
  for (const char* yes : {"true", "True", "1"}) {
    EXPECT_EQ(OnlyTerm(diffusers, {{"minimax_h3_gate_first", yes}}).row_map, RowMap::kIdentity) << yes;
    EXPECT_EQ(OnlyTerm(native, {{"minimax_h3_gate_first", yes}}).row_map, RowMap::kIdentity) << yes;
  }
  for (const char* no : {"false", "False", "0"}) {
    EXPECT_EQ(OnlyTerm(diffusers, {{"gate_first", no}}).row_map, RowMap::kSwapHalves) << no;
    EXPECT_EQ(OnlyTerm(native, {{"gate_first", no}}).row_map, RowMap::kSwapHalves) << no;
  }
  for (const char* fc2 : {"blocks.0.mlp.fc2", "transformer.transformer_blocks.0.ff.net.2"}) {
    EXPECT_EQ(OnlyTerm(Pair(fc2, 16, 14, 2)).row_map, RowMap::kIdentity) << fc2;
    EXPECT_EQ(OnlyTerm(Pair(fc2, 16, 14, 2), {{"gate_first", "false"}}).row_map, RowMap::kIdentity) << fc2;
  }
}

TEST(FieldReportA4, AnOffsetOfFc1IsSwappedWithItsRows) {
  const std::string module = "transformer.transformer_blocks.0.ff.net.0.proj";
  const auto manifest = Read(Join({Pair(module, 28, 16, 2), {Zeros(module + ".diff_b", {28})}}));
  ASSERT_TRUE(manifest.ok()) << manifest.status();
  ASSERT_THAT(manifest->terms, SizeIs(2));
  for (const AdapterTerm& term : manifest->terms) EXPECT_EQ(term.row_map, RowMap::kSwapHalves);
}

TEST(FieldReportA5, EverySpellingLeadsToItsModule) {
  const std::map<std::string, std::pair<std::string, Tensors>> spellings = {
      {"lora_unet_blocks_0_attn_qkv_proj", {kQkv, KohyaPair("lora_unet_blocks_0_attn_qkv_proj", 24, 16, 2)}},
      {"lora_unet_blocks_1_adaln_proj_linear",
       {"blocks.1.adaln_proj.linear", KohyaPair("lora_unet_blocks_1_adaln_proj_linear", kAdalnRows, 20, 2)}},
      {"lora_unet_token_refiner_blocks_0_mlp_fc1",
       {"token_refiner.blocks.0.mlp.fc1", KohyaPair("lora_unet_token_refiner_blocks_0_mlp_fc1", 28, 16, 2)}},
      {"lora_unet_final_layer_adaln_proj_linear",
       {"final_layer.adaln_proj.linear", KohyaPair("lora_unet_final_layer_adaln_proj_linear", 32, 20, 2)}},
      {"lycoris_blocks_0_attn_out_proj", {"blocks.0.attn.out_proj", KohyaPair("lycoris_blocks_0_attn_out_proj", 16, 8, 2)}},
      {"lora_unet_transformer_blocks_1_ff_net_2",
       {"blocks.1.mlp.fc2", KohyaPair("lora_unet_transformer_blocks_1_ff_net_2", 16, 14, 2)}},
      {"token_refiner.refiner_blocks.0.attn.to_q",
       {"token_refiner.blocks.0.attn.qkv_proj", Pair("token_refiner.refiner_blocks.0.attn.to_q", 8, 16, 2)}},
      {"transformer.norm_out.linear", {"final_layer.adaln_proj.linear", Pair("transformer.norm_out.linear", 32, 20, 2)}},
  };
  for (const auto& [spelling, wanted] : spellings) EXPECT_EQ(SiteOf(OnlyTerm(wanted.second)), wanted.first) << spelling;
}

// Exports that a blind replacement of dots and underscores has broken, and modules beyond the model: never a near miss.
TEST(FieldReportA5, BrokenNamesAndBlocksBeyondTheModelAreNotGuessedAt) {
  const std::vector<Tensors> broken = {Pair("diffusion_model.blocks.0.attn.qkv.proj", 24, 16, 2),
                                       KohyaPair("blocks.0_adaln_proj_linear", kAdalnRows, 20, 2),
                                       KohyaPair("token_refiner_blocks.0.attn.out_proj", 16, 8, 2),
                                       KohyaPair("lora_unet_blocks.0.attn.qkv.proj", 24, 16, 2),
                                       Pair("blocks.2.attn.qkv_proj", 24, 16, 2),
                                       Pair("blocks.-1.attn.qkv_proj", 24, 16, 2),
                                       Pair("blocks.00.attn.qkv_proj", 24, 16, 2),
                                       KohyaPair("lora_unet_blocks_2_attn_qkv_proj", 24, 16, 2),
                                       Pair("token_refiner.blocks.1.attn.qkv_proj", 24, 16, 2),
                                       Pair("transformer.transformer_blocks.2.attn.to_q", 8, 16, 2)};
  for (const Tensors& tensors : broken) {
    const absl::Status refused = Read(tensors).status();
    EXPECT_EQ(ReasonOf(refused), reason::kUnknownModule) << tensors[0].name;
    EXPECT_EQ(DetailsOf(refused)["tensor"], tensors[0].name);
  }
}

TEST(FieldReportA6, AFileThatBindsNothingIsRefusedWithNamesAndCount) {
  Tensors tensors;
  for (int i = 0; i < 10; ++i) tensors = Join({tensors, Pair(absl::StrCat("double_blocks.", i, ".img_attn.proj"), 16, 16, 2)});
  const absl::Status refused = Read(tensors).status();
  EXPECT_EQ(ReasonOf(refused), reason::kUnknownModule);
  EXPECT_EQ(DetailsOf(refused)["count"], "20");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("20 of 20"));
  for (int i = 0; i < 3; ++i) EXPECT_THAT(std::string(refused.message()), HasSubstr(tensors[static_cast<size_t>(i)].name));
  EXPECT_LT(refused.message().size(), 400u);
}

TEST(FieldReportA6, AFileThatBindsInPartIsRefusedTheSame) {
  const absl::Status refused = Read(Join({QkvPair(), Pair("blocks.0.attn.kv_compress", 16, 16, 2)})).status();
  EXPECT_EQ(ReasonOf(refused), reason::kUnknownModule);
  EXPECT_EQ(DetailsOf(refused)["count"], "2");
  EXPECT_THAT(std::string(refused.message()), HasSubstr("2 of 4"));
}

TEST(FieldReportA7, FactorsThatAreNoFloatsAreRefusedByTheirType) {
  for (const DType dtype : {DType::kI8, DType::kU8, DType::kI64, DType::kI32, DType::kF8E4M3, DType::kF8E5M2, DType::kBool}) {
    for (const size_t factor : {0u, 1u}) {
      Tensors tensors = QkvPair();
      tensors[factor] = Zeros(tensors[factor].name, tensors[factor].shape, dtype);
      const absl::Status refused = Read(tensors).status();
      EXPECT_EQ(ReasonOf(refused), reason::kUnsupportedAdapterType) << DTypeName(dtype);
      EXPECT_EQ(DetailsOf(refused)["dtype"], DTypeName(dtype));
      EXPECT_EQ(DetailsOf(refused)["tensor"], tensors[factor].name);
    }
  }
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kF16, DType::kBF16}) {
    EXPECT_EQ(ReasonFor({Zeros(absl::StrCat(kQkv, ".lora_A.weight"), {4, 16}, dtype),
                         Zeros(absl::StrCat(kQkv, ".lora_B.weight"), {24, 4}, dtype)}),
              "")
        << DTypeName(dtype);
  }
}

TEST(FieldReportA7, EveryOtherFloatPartIsHeldToTheSameTypes) {
  const std::string m = kQkv;
  for (const HostTensor& part :
       Tensors{Zeros(m + ".dora_scale", {24, 1}, DType::kI8), Zeros(m + ".diff_b", {24}, DType::kF8E4M3)}) {
    EXPECT_EQ(ReasonFor(Join({QkvPair(), {part}})), reason::kUnsupportedAdapterType) << part.name;
  }
  EXPECT_EQ(ReasonFor({Zeros(m + ".lokr_w1", {4, 4}, DType::kI8), Zeros(m + ".lokr_w2", {6, 4})}),
            reason::kUnsupportedAdapterType);
}

TEST(FieldReportA7, KindsAreNamed) {
  const std::map<std::string, std::string> kinds = {{"lora_A.weight_scale", "quantised"},
                                                    {"hada_w1_a", "LoHa"},
                                                    {"lora_mid.weight", "Tucker"},
                                                    {"lokr_t2", "Tucker"},
                                                    {"oft_blocks", "OFT"},
                                                    {"boft_blocks", "BOFT"},
                                                    {"reshape_weight", "reshape_weight"},
                                                    {"ia3_l.weight", "IA3"},
                                                    {"comfy_quant", "quantised"},
                                                    {"lora_B.bias", "lora_bias"}};
  for (const auto& [part, kind] : kinds) {
    const absl::Status refused = Read(Join({QkvPair(), {Zeros(absl::StrCat(kQkv, ".", part), {4})}})).status();
    EXPECT_EQ(ReasonOf(refused), reason::kUnsupportedAdapterType) << part;
    EXPECT_THAT(DetailsOf(refused)["type"], HasSubstr(kind)) << part;
  }
}

// The inputs of the report itself: both kinds are applied here, and neither is taken for a plain pair.
TEST(FieldReportA7, DoraAndLokrAreTakenForWhatTheyAre) {
  const std::string m = kQkv;
  const AdapterTerm dora = OnlyTerm(Join({QkvPair(), {Zeros(m + ".dora_scale", {24, 1})}}));
  ASSERT_TRUE(dora.low_rank.has_value());
  EXPECT_EQ(dora.low_rank->magnitude_axis, MagnitudeAxis::kRows);
  const AdapterTerm lokr = OnlyTerm({Zeros(m + ".lokr_w1", {4, 4}), Zeros(m + ".lokr_w2", {6, 4})});
  EXPECT_TRUE(lokr.kronecker.has_value());
  EXPECT_EQ(lokr.scale, 1);
}

TEST(FieldReportA8, DensePartsBesidePairsAreRefusedByName) {
  const std::map<std::string, std::string> parts = {
      {"set_weight", "set_weight"}, {"set_bias", "set_bias"}, {"diff", "full difference"}};
  for (const auto& [part, kind] : parts) {
    const absl::Status refused =
        Read(Join({QkvPair(), {Zeros(absl::StrCat("final_layer.video_out.", part), {12, 16})}})).status();
    EXPECT_EQ(ReasonOf(refused), reason::kUnsupportedAdapterType) << part;
    EXPECT_THAT(DetailsOf(refused)["type"], HasSubstr(kind));
    EXPECT_THAT(DetailsOf(refused)["tensor"], HasSubstr("final_layer.video_out"));
  }
  // A bank of output heads under plain names.
  EXPECT_EQ(ReasonFor(Join({QkvPair(), {Zeros("final_layer.video_out.weight", {48, 16})}})), reason::kUnsupportedAdapterType);
}

TEST(FieldReportA8, AnOffsetIsTakenWithABiasAndWithoutAndInNoOtherSize) {
  for (const auto& [module, rows] :
       std::map<std::string, int64_t>{{kQkv, 24}, {"blocks.0.mlp.fc2", 16}, {kAdaln, kAdalnRows}}) {
    for (const Geometry& geometry : {kFull, kPruned}) {
      const AdapterTerm term = OnlyTerm({Zeros(module + ".diff_b", {rows})}, {}, {}, geometry);
      EXPECT_TRUE(term.offset.has_value()) << module;
      EXPECT_EQ(term.rows, (RowRange{0, rows}));
    }
    EXPECT_EQ(ReasonFor({Zeros(module + ".diff_b", {rows + 1})}), reason::kShapeMismatch);
    EXPECT_EQ(ReasonFor({Zeros(module + ".diff_b", {rows, 1})}), reason::kShapeMismatch);
  }
}

TEST(FieldReportA9, APartitionInTheMetadataIsHeldAgainstTheBases) {
  for (const auto& [key, value] : Metadata{{"base_model", "MiniMaxAI/MiniMax-H3-Ref2VA"},
                                           {"ss_base_model_version", "minimax_h3_ref2va"},
                                           {"modelspec.architecture", "minimax-h3-ref2va/lora"},
                                           {"h3_partition", "REF2VA"}}) {
    SCOPED_TRACE(key);
    const auto refused = Read(QkvPair(), {{key, value}}, {.base_partition = Partition::kFl2va});
    EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_EQ(ReasonOf(refused.status()), reason::kBaseMismatch);
    EXPECT_EQ(DetailsOf(refused.status())["adapter_partition"], "ref2va");
    EXPECT_EQ(DetailsOf(refused.status())["base_partition"], "fl2va");
    const auto taken = Read(QkvPair(), {{key, value}}, {.base_partition = Partition::kRef2va});
    ASSERT_TRUE(taken.ok()) << taken.status();
    EXPECT_EQ(taken->partition, Partition::kRef2va);
    EXPECT_THAT(taken->warnings, IsEmpty());
    // A base that says nothing is warned about, and who knows better says so.
    EXPECT_THAT(Read(QkvPair(), {{key, value}})->warnings, ElementsAre(HasSubstr("ref2va")));
    EXPECT_EQ(ReasonFor(QkvPair(), {{key, value}},
                        {.base_partition = Partition::kFl2va, .settings = {.partition = Partition::kFl2va}}),
              "");
  }
}

TEST(FieldReportA9, AHybridOrAPassingRemarkDeclaresNothing) {
  for (const auto& [key, value] :
       Metadata{{"base_model", "blocks 0-24 fl2va, 25-49 ref2va"}, {"comment", "better than the ref2va one"}}) {
    const auto manifest = Read(QkvPair(), {{key, value}}, {.base_partition = Partition::kFl2va});
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    EXPECT_EQ(manifest->partition, Partition::kUnknown);
  }
}

// The rank of the module that sorts first is nobody else's.
TEST(FieldReportB1, WithoutAnAlphaEveryRankHasTheScaleOne) {
  const Tensors tensors = Join({QkvPair(8), Pair(kAdaln, kAdalnRows, 20, 2), Pair("blocks.1.mlp.fc2", 16, 14, 4)});
  const std::map<std::string, double> expected = {{kQkv, 1}, {kAdaln, 1}, {"blocks.1.mlp.fc2", 1}};
  EXPECT_EQ(Scales(Read(tensors)), expected);
  EXPECT_EQ(Scales(Read({tensors.rbegin(), tensors.rend()})), expected);
}

TEST(FieldReportB1, AnAlphaOfTheWholeFileIsDividedByEachModulesOwnRank) {
  const Tensors tensors = Join({QkvPair(8), Pair(kAdaln, kAdalnRows, 20, 2)});
  EXPECT_EQ(Scales(Read(tensors, {{"alpha", "4"}})), (std::map<std::string, double>{{kQkv, 0.5}, {kAdaln, 2}}));
}

TEST(FieldReportB2, EveryPlaceOfAnAlphaIsRead) {
  struct Case {
    Metadata metadata;
    int64_t rank;
    double scale;
  };
  for (const Case& c :
       std::vector<Case>{{{{"alpha", "2"}}, 4, 0.5},
                         {{{"lora_alpha", "2"}}, 4, 0.5},
                         {{{"ss_network_alpha", "2"}, {"ss_network_dim", "4"}}, 4, 0.5},
                         {{{"transformer.lora_alpha", "64"}, {"transformer.r", "16"}}, 16, 4},
                         {{{"text_encoder.lora_alpha", "64"}, {"transformer.lora_alpha", "8"}}, 4, 2},
                         {{{"lora_adapter_metadata", R"({"transformer.lora_alpha": 1, "transformer.r": 4})"}}, 4, 0.25},
                         {{{"alpha", "8.5"}}, 4, 2.125},
                         {{{"alpha", "0.5"}}, 4, 0.125},
                         {{{"alpha", "0"}}, 4, 0}}) {
    SCOPED_TRACE(c.metadata.begin()->first + " = " + c.metadata.begin()->second);
    const AdapterTerm term = OnlyTerm(QkvPair(c.rank), c.metadata);
    EXPECT_EQ(term.scale, c.scale);
    EXPECT_NE(term.scale_source, "default (alpha = rank)");
  }
}

TEST(FieldReportB2, AScalarCountsForItsModuleAndTheMetadataForTheOthers) {
  const auto manifest =
      Read(Join({QkvPair(4), {Scalar(absl::StrCat(kQkv, ".alpha"), 1)}, Pair("blocks.0.attn.out_proj", 16, 8, 4)}),
           {{"alpha", "8"}});
  EXPECT_EQ(Scales(manifest), (std::map<std::string, double>{{kQkv, 0.25}, {"blocks.0.attn.out_proj", 2}}));
}

// Tools that resize an adapter write no number there (sd-scripts: "Dynamic", and "None" where none was given); every module has
// its own alpha, so that nothing depends on it.
TEST(FieldReportB2, MetadataThatNoModuleNeedsMayBeNoNumber) {
  const Tensors tensors = Join({QkvPair(4), {Scalar(absl::StrCat(kQkv, ".alpha"), 1)}});
  for (const char* text : {"Dynamic", "None"}) {
    const auto manifest = Read(tensors, {{"ss_network_alpha", text}, {"ss_network_dim", text}});
    EXPECT_TRUE(manifest.ok()) << manifest.status();
    EXPECT_EQ(ReasonFor(QkvPair(4), {{"ss_network_alpha", text}}), reason::kBadScale) << "needed here";
  }
}

TEST(FieldReportB2, ContradictionsAndNonsenseAreRefused) {
  EXPECT_EQ(ReasonFor(QkvPair(), {{"alpha", "8"}, {"lora_alpha", "16"}}), reason::kBadScale);
  EXPECT_EQ(ReasonFor(QkvPair(), {{"transformer.lora_alpha", "8"}, {"lora_alpha", "16"}}), reason::kBadScale);
  for (const char* text : {"abc", "-1", "1e39", "8,5", "8 16", "0x", "NaN"})
    EXPECT_EQ(ReasonFor(QkvPair(), {{"alpha", text}}), reason::kBadScale) << text;
  // The metadata are those of another file.
  EXPECT_EQ(ReasonFor(QkvPair(4), {{"transformer.lora_alpha", "64"}, {"transformer.r", "16"}}), reason::kBadScale);
  EXPECT_EQ(OnlyTerm(QkvPair(4), {{"transformer.lora_alpha", "64"}, {"transformer.r", "16"}}, {.alpha = 2}).scale, 0.5);
}

template <typename T>
HostTensor Number(const std::vector<int64_t>& shape, DType dtype, T value) {
  HostTensor tensor = Zeros(absl::StrCat(kQkv, ".alpha"), shape, dtype);
  std::memcpy(tensor.data.data(), &value, sizeof(value));
  return tensor;
}

TEST(FieldReportB2, AnAlphaTensorHasAnyNumberTypeAndOneElement) {
  constexpr uint16_t kHalfTwo = 0x4000, kBrainTwo = 0x4000, kHalfInfinity = 0x7c00;
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{}, {1}, {1, 1}}) {
    for (const HostTensor& alpha :
         Tensors{Number(shape, DType::kF64, 2.0), Number(shape, DType::kF32, 2.0f), Number(shape, DType::kF16, kHalfTwo),
                 Number(shape, DType::kBF16, kBrainTwo), Number(shape, DType::kI64, int64_t{2}),
                 Number(shape, DType::kI32, int32_t{2}), Number(shape, DType::kU8, uint8_t{2})}) {
      EXPECT_EQ(OnlyTerm(Join({QkvPair(4), {alpha}})).scale, 0.5) << DTypeName(alpha.dtype);
    }
  }
  EXPECT_EQ(OnlyTerm(Join({QkvPair(4), {Number({}, DType::kF16, uint16_t{0x0001})}})).scale,
            std::ldexp(1, -26));  // The least half.
  EXPECT_EQ(ReasonFor(Join({QkvPair(4), {Number({}, DType::kF16, kHalfInfinity)}})), reason::kBadScale);
  EXPECT_EQ(ReasonFor(Join({QkvPair(4), {Number({}, DType::kF64, 1e300)}})), reason::kBadScale);
  EXPECT_EQ(ReasonFor(Join({QkvPair(4), {Number({}, DType::kI64, int64_t{-1})}})), reason::kBadScale);
  EXPECT_EQ(ReasonFor(Join({QkvPair(4), {Zeros(absl::StrCat(kQkv, ".alpha"), {2})}})), reason::kBadScale);
  EXPECT_EQ(ReasonFor(Join({QkvPair(4), {Zeros(absl::StrCat(kQkv, ".alpha"), {1, 2})}})), reason::kBadScale);
}

TEST(FieldReportB3, SiblingsOfOneFamilyAreScaledAsEachDeclares) {
  EXPECT_EQ(OnlyTerm(QkvPair(16), {{"alpha", "16"}}).scale, 1);
  EXPECT_EQ(OnlyTerm(QkvPair(16), {{"alpha", "1"}}).scale, 1.0 / 16);
  const AdapterTerm silent = OnlyTerm(QkvPair(16));
  EXPECT_EQ(silent.scale, 1);
  EXPECT_EQ(silent.scale_source, "default (alpha = rank)");
  // Whoever knows the file's documented use says so by its content.
  EXPECT_EQ(OnlyTerm(QkvPair(16), {}, {.settings = {.alpha = 1.0}}).scale, 1.0 / 16);
}

// A fused qkv of rank 3r beside modules of rank r: 384/24 and 128/8 are one scale.
Tensors FusedAndPlain() { return Join({QkvPair(24), Pair("blocks.0.attn.out_proj", 16, 8, 8)}); }

TEST(FieldReportB3, AFusedProjectionWithItsOwnAlphaKeepsTheScale) {
  const auto manifest =
      Read(Join({FusedAndPlain(), {Scalar(absl::StrCat(kQkv, ".alpha"), 1.5f), Scalar("blocks.0.attn.out_proj.alpha", 0.5f)}}));
  EXPECT_EQ(Scales(manifest), (std::map<std::string, double>{{kQkv, 1.0 / 16}, {"blocks.0.attn.out_proj", 1.0 / 16}}));
}

// What a rank declared for the whole file says of modules of another rank cannot be known: the scale that it was declared for,
// or a refusal that asks for alpha, and never a silent third or multiple.
TEST(FieldReportB3, ADeclaredRankThatSomeModulesDoNotHaveNeverChangesTheirScaleSilently) {
  struct Case {
    const char* what;
    Tensors tensors;
    Metadata metadata;
    double scale;
  };
  const Tensors adaln = Join({QkvPair(8), Pair(kAdaln, kAdalnRows, 20, 2)});
  for (const Case& c : std::vector<Case>{{"the fused rank", FusedAndPlain(), {{"r", "24"}, {"lora_alpha", "24"}}, 1},
                                         {"the plain rank", FusedAndPlain(), {{"r", "8"}, {"lora_alpha", "0.5"}}, 1.0 / 16},
                                         {"the backbone's rank", adaln, {{"r", "8"}, {"lora_alpha", "8"}}, 1}}) {
    SCOPED_TRACE(c.what);
    const auto manifest = Read(c.tensors, c.metadata);
    if (!manifest.ok()) {
      EXPECT_EQ(ReasonOf(manifest.status()), reason::kBadScale) << manifest.status();
      continue;
    }
    for (const auto& [site, scale] : Scales(manifest)) EXPECT_EQ(scale, c.scale) << site;
  }
  // The request's word ends all doubt.
  EXPECT_TRUE(Read(FusedAndPlain(), {{"r", "24"}, {"lora_alpha", "24"}}, {.alpha = 8}).ok());
}

TEST(FieldReportB3, RanksThatAPatternDeclaresAreNoContradiction) {
  const char* config = R"({"r": 8, "lora_alpha": 8, "rank_pattern": {"qkv_proj": 24}, "alpha_pattern": {"qkv_proj": 24}})";
  EXPECT_EQ(Scales(Read(FusedAndPlain(), {}, {.settings = {.peft_config = config}})),
            (std::map<std::string, double>{{kQkv, 1}, {"blocks.0.attn.out_proj", 1}}));
}

TEST(FieldReportB4, RankStabilisedOnlyWhereDeclared) {
  EXPECT_EQ(OnlyTerm(QkvPair(4), {{"lora_alpha", "4"}}).scale, 1);
  EXPECT_EQ(OnlyTerm(QkvPair(4), {{"lora_alpha", "4"}, {"use_rslora", "false"}}).scale, 1);
  for (const char* yes : {"true", "True"}) {
    const AdapterTerm term = OnlyTerm(QkvPair(4), {{"lora_alpha", "4"}, {"use_rslora", yes}});
    EXPECT_TRUE(term.root_rank);
    EXPECT_EQ(term.scale, 2);
  }
  EXPECT_EQ(
      OnlyTerm(QkvPair(4), {{"lora_adapter_metadata", R"({"transformer.lora_alpha": 4, "transformer.use_rslora": true})"}})
          .scale,
      2);
  EXPECT_EQ(OnlyTerm(QkvPair(4), {{"use_rslora", "true"}}, {.alpha = 8}).scale, 4);
}

IntakeOptions WithGrid(int64_t width = 20) { return {.base_has_grid = true, .grid_width = width}; }

TEST(FieldReportC1, FullWidthPairsGoThroughTheGridOrAreRefusedWhole) {
  const Tensors tensors = Join({Pair(kAdaln, kAdalnRows, 20, 2), Pair("final_layer.adaln_proj.linear", 32, 20, 2), QkvPair()});
  const auto through = Read(tensors, {}, WithGrid(), kPruned);
  ASSERT_TRUE(through.ok()) << through.status();
  for (const AdapterTerm& term : through->terms) {
    EXPECT_EQ(term.features, term.low_rank->a.shape[1] == 20 ? AdalnFeatures::kGrid : AdalnFeatures::kBase);
  }
  const absl::Status refused = Read(tensors, {}, {}, kPruned).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused), reason::kAdalnNeedsGrid);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("leave-out=adaln"));
  IntakeOptions options;
  options.leave_out = {"adaln"};
  const auto without = Read(tensors, {}, options, kPruned);
  ASSERT_TRUE(without.ok()) << without.status();
  EXPECT_THAT(without->terms, SizeIs(1));
  EXPECT_THAT(without->left_out, ElementsAre(kAdaln, "final_layer.adaln_proj.linear"));
}

TEST(FieldReportC1, AWidthThatIsNeitherIsRefused) {
  for (const int64_t width : {1, 7, 9, 19, 21}) {
    EXPECT_EQ(ReasonFor(Pair(kAdaln, kAdalnRows, width, 2), {}, WithGrid(), kPruned), reason::kShapeMismatch) << width;
    EXPECT_NE(ReasonFor(Pair(kAdaln, kAdalnRows, width, 2), {}, {}, kPruned), "") << width;
    EXPECT_NE(ReasonFor(Pair(kAdaln, kAdalnRows, width, 2)), "") << width;
  }
}

TEST(FieldReportC2, AnAdalnPairIsScaledByItsAlphaAsAnyOther) {
  const Tensors tensors = Join({Pair(kAdaln, kAdalnRows, 20, 2), {Scalar(absl::StrCat(kAdaln, ".alpha"), 8)}});
  for (const bool pruned : {false, true}) {
    EXPECT_EQ(OnlyTerm(tensors, {}, WithGrid(), pruned ? kPruned : kFull).scale, 4);
    EXPECT_EQ(OnlyTerm(tensors, {}, {.base_has_grid = true, .grid_width = 20, .alpha = 1}, pruned ? kPruned : kFull).scale,
              0.5);
  }
}

Tensors CompleteCurve(int64_t rows = 9, int64_t width = 8) {
  Tensors tensors = {Zeros("adaln_t_table", {rows, width})};
  for (const auto& [module, out] : std::map<std::string, int64_t>{
           {kAdaln, kAdalnRows}, {"blocks.1.adaln_proj.linear", kAdalnRows}, {"final_layer.adaln_proj.linear", 32}}) {
    tensors.push_back(Zeros(module + ".weight", {out, width}));
    tensors.push_back(Zeros(module + ".bias", {out}));
  }
  return tensors;
}

TEST(FieldReportC5, ACompleteAdapterIsTakenByBothKindsOfBaseWhateverItsTable) {
  for (const Geometry& geometry : {kFull, kPruned}) {
    for (const auto& [rows, width] : {std::pair(9, 8), std::pair(33, 8), std::pair(9, 9), std::pair(2, 16)}) {
      const auto manifest = Read(Join({CompleteCurve(rows, width), QkvPair()}), {}, {}, geometry);
      ASSERT_TRUE(manifest.ok()) << manifest.status();
      ASSERT_TRUE(manifest->curve.has_value());
      EXPECT_THAT(manifest->curve->weights, SizeIs(3));
      EXPECT_THAT(manifest->terms, SizeIs(1));
    }
  }
}

TEST(FieldReportC5, WithoutAnyOneOfItsTensorsItIsIncomplete) {
  const Tensors complete = CompleteCurve();
  for (size_t i = 0; i < complete.size(); ++i) {
    Tensors tensors = Join({complete, QkvPair()});
    tensors.erase(tensors.begin() + static_cast<ptrdiff_t>(i));
    EXPECT_EQ(ReasonFor(tensors, {}, {}, kPruned), reason::kIncompleteCurve) << "without " << complete[i].name;
  }
  EXPECT_EQ(ReasonFor(Join({QkvPair(), {complete.begin() + 5, complete.end()}}), {}, {}, kPruned), reason::kIncompleteCurve)
      << "only the final layer";
}

TEST(FieldReportC5, TensorsThatDoNotFitEachOtherAreRefused) {
  const auto with = [](const HostTensor& other) {
    Tensors tensors = CompleteCurve();
    for (HostTensor& tensor : tensors) {
      if (tensor.name == other.name) tensor = other;
    }
    return ReasonFor(tensors, {}, {}, kPruned);
  };
  EXPECT_EQ(with(Zeros("adaln_t_table", {1, 8})), reason::kShapeMismatch);
  EXPECT_EQ(with(Zeros("adaln_t_table", {9, 7})), reason::kShapeMismatch);
  EXPECT_EQ(with(Zeros("adaln_t_table", {72})), reason::kShapeMismatch);
  EXPECT_EQ(with(Zeros("adaln_t_table", {9, 8}, DType::kI8)), reason::kUnsupportedAdapterType);
  EXPECT_EQ(with(Zeros("blocks.1.adaln_proj.linear.weight", {kAdalnRows, 20})), reason::kShapeMismatch);
  EXPECT_EQ(with(Zeros("blocks.1.adaln_proj.linear.bias", {kAdalnRows + 1})), reason::kShapeMismatch);
}

TEST(FieldReportC5, WholeProjectionsAndPairsInOneFileAreAmbiguous) {
  for (const int64_t width : {20, 8}) {
    EXPECT_EQ(ReasonFor(Join({CompleteCurve(), Pair(kAdaln, kAdalnRows, width, 2)}), {}, WithGrid(), kPruned),
              reason::kAmbiguousNames)
        << width;
  }
  EXPECT_EQ(ReasonFor(Join({CompleteCurve(), {Zeros("diffusion_model.adaln_t_table", {9, 8})}}), {}, {}, kPruned),
            reason::kAmbiguousNames);
}

TEST(FieldReportC6, TableCoordinatesWithoutTheirTableAreRefusedOnAFullBaseWithTheirBiasKeysToo) {
  const Tensors tensors = Join({Pair(kAdaln, kAdalnRows, 8, 2), {Zeros(absl::StrCat(kAdaln, ".diff_b"), {kAdalnRows})}});
  const absl::Status refused = Read(tensors).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(refused), reason::kBaseMismatch);
  EXPECT_THAT(std::string(refused.message()), HasSubstr("coordinates"));
  const auto ported = Read(Join({tensors, {Zeros("adaln_t_table", {9, 8})}}));
  ASSERT_TRUE(ported.ok()) << ported.status();
  EXPECT_THAT(ported->terms, SizeIs(2));
}

class FieldReportC7 : public ::testing::Test {
 protected:
  // One wide head in place of two narrow ones, on which three axes of rotation find no room: the shapes stay.
  static Geometry Loadable(Geometry geometry) {
    geometry.heads = 1;
    geometry.head_dim = kFull.inner();
    return geometry;
  }
  // A checkpoint of that geometry with some tensors more.
  absl::StatusOr<Checkpoint> Open(const Geometry& of, const Tensors& more = {}, const std::string& prefix = "") {
    const Geometry geometry = Loadable(of);
    Tensors tensors = more;
    for (const TensorShape& tensor : ExpectedTensors(geometry)) tensors.push_back(Zeros(prefix + tensor.name, tensor.shape));
    tensors.push_back(Zeros(prefix + "rope.inv_freq", {geometry.rope_frequencies}));
    return OpenCheckpoint(directory_.Write("model.safetensors", BuildSafetensors(tensors)));
  }

  const testing::TemporaryDirectory directory_;
};

TEST_F(FieldReportC7, WidthsAndGridLengthsAreReadFromTheTensors) {
  for (const int64_t width : {8, 9, 16}) {
    for (const char* prefix : {"", "model.diffusion_model."}) {
      const auto checkpoint = Open(PrunedTo(width), {}, prefix);
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      EXPECT_EQ(checkpoint->geometry, Loadable(PrunedTo(width)));
      // 20 is the full width of this model, and no width that a file was expected to have.
      EXPECT_EQ(OnlyTerm(Pair(kAdaln, kAdalnRows, 20, 2), {}, WithGrid(), checkpoint->geometry).features, AdalnFeatures::kGrid);
    }
  }
}

TEST_F(FieldReportC7, SpellingsOfPruningThatAreNotKnownAreRefusedByTensor) {
  for (const char* name : {"time_embedder.table", "folded_bias", "adaln_basis", "adaln_mean"}) {
    const auto refused = Open(kPruned, {Zeros(name, {9, 8})});
    EXPECT_EQ(ReasonOf(refused.status()), reason::kBadTensor) << name;
    EXPECT_EQ(DetailsOf(refused.status())["tensor"], name);
  }
}

// Which of its two time embeddings such a file means is not said.
TEST_F(FieldReportC7, APrunedFileBuiltAsAFullMlpIsRefused) {
  const auto refused = Open(kFull, {Zeros("adaln_t_table", {9, 20})});
  EXPECT_FALSE(refused.ok());
  EXPECT_EQ(ReasonOf(refused.status()), reason::kBadTensor) << refused.status();
}

}  // namespace
}  // namespace h3
