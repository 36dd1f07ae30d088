// What requests may do to an engine, and what they may not.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>
#include <random>
#include <set>

#include "server/base/error.h"
#include "server/vram/ledger.h"
#include "server/worker/engine.h"
#include "tests/testing/golden.h"
#include "tests/testing/test_device.h"
#include "tests/testing/temporary_directory.h"
#include "tests/unit/worker/engine_fixture.h"

namespace h3 {
namespace {

TEST_F(EngineTest, ARequestHasTheSameBitsWhateverRanBefore) {
  const std::vector<Stack> stacks = {{}, {{"turbo_bare", "", 0.7}}, {{"style_bf16", "", -0.4}, {"dora", "", 0.5}, {"turbo_bare", "", 1.1}}, {{"lokr", "", 0.3}}};
  std::vector<Answer> alone;
  for (const Stack& stack : stacks) alone.push_back(*Generate(SpecOf("ref2va_mixed", stack, 3)));
  std::mt19937 random(1);
  for (int i = 0; i < 24; ++i) {
    const size_t pick = random() % stacks.size();
    ExpectSameBits(*Generate(SpecOf("ref2va_mixed", stacks[pick], 3)), alone[pick]);
  }
}

TEST_F(EngineTest, LiveBytesComeBackExactly) {
  const Stack stack = {{"turbo_bare", "", 0.7}, {"dora_columns", "", 0.5}, {"complete_own_table", "", 0.2}};
  ASSERT_TRUE(Generate(SpecOf("fl2va_first_last", stack, 2)).ok());
  const LedgerSnapshot before = Ledger();
  for (int i = 0; i < 5; ++i) ASSERT_TRUE(Generate(SpecOf("fl2va_first_last", stack, 2)).ok());
  EXPECT_EQ(Ledger().owners, before.owners);
  EXPECT_EQ(before.of(Owner::kUnattributed), ByteCount(0));
  EXPECT_EQ(before.of(Owner::kActivations), ByteCount(0));
}

TEST_F(EngineTest, AThousandStrengthChangesAllocateNothingForAdaptersOrWeights) {
  ASSERT_TRUE(Generate(SpecOf("t2va", {{"turbo_bare", "", 1}, {"style_bf16", "", 1}}, 1)).ok());
  const LedgerSnapshot before = Ledger();
  for (int i = 0; i < 1000; ++i) {
    const double s = 0.001 * i;
    ASSERT_TRUE(Generate(SpecOf("t2va", {{"turbo_bare", "", s}, {"style_bf16", "", 1 - s}}, 1)).ok());
  }
  const LedgerSnapshot after = Ledger();
  for (const Owner owner : {Owner::kBaseWeights, Owner::kAdapters, Owner::kMaterialized, Owner::kCaches}) {
    EXPECT_EQ(after.added_to(owner), before.added_to(owner)) << OwnerName(owner);
  }
}

// The norms of DoRA are recombined from vectors that were made once, whatever the strengths.
TEST_F(EngineTest, StrengthChangesOfDoraReadNoWeightAndAllocateNothingThatStays) {
  const auto stack = [](double s) { return Stack{{"turbo_bare", "", s}, {"dora", "", 1 - s}, {"dora_columns", "", s, 0.5}}; };
  ASSERT_TRUE(Generate(SpecOf("t2va", stack(0.3), 1)).ok());
  const LedgerSnapshot before = Ledger();
  EXPECT_GT(before.of(Owner::kCaches), ByteCount(0));
  for (int i = 0; i < 50; ++i) ASSERT_TRUE(Generate(SpecOf("t2va", stack(0.01 * i), 1)).ok());
  const LedgerSnapshot after = Ledger();
  for (const Owner owner : {Owner::kBaseWeights, Owner::kAdapters, Owner::kMaterialized, Owner::kCaches}) {
    EXPECT_EQ(after.added_to(owner), before.added_to(owner)) << OwnerName(owner);
  }
}

// What was worked out for an adapter goes with it, also where its stack is refused after that.
TEST_F(EngineTest, ARefusedStackLeavesNothingThatALaterAdapterCouldMeet) {
  const auto engine = MakeEngine({.model = GoldenPath("full/model.safetensors"), .adapters = GoldenPath(""), .device = testing::TestDevice()}).value();
  const auto refused = [&] {
    Stack stack = {{"lora/dora", "", 1}, {"reject/nan", "", 1}};
    stack[0].auto_strength = AutoStrength{};
    EXPECT_EQ(ReasonOf(engine->StartGeneration(SpecOf("t2va", stack, 1)).status()), reason::kNotFinite);
    return Ledger();
  };
  const LedgerSnapshot once = refused();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(refused().owners, once.owners);
  for (const AdapterResidency& adapter : engine->Memory().adapters) EXPECT_EQ(adapter.tier, Tier::kHost) << adapter.name;
}

// However a name leads to a file, content that is not the accepted one is not used.
TEST_F(EngineTest, AReplacedFileIsNotTakenForTheAcceptedOne) {
  const testing::TemporaryDirectory folder;
  for (const char* place : {"plain.safetensors", "peft/adapter_model.safetensors"}) {
    std::filesystem::create_directories((folder.path() / place).parent_path());
    std::filesystem::copy_file(GoldenPath("lora/style_bf16.safetensors"), folder.path() / place);
  }
  const auto engine = MakeEngine({.model = GoldenPath("full/model.safetensors"), .adapters = folder.path().string(), .device = testing::TestDevice()}).value();
  for (const char* name : {"plain", "peft"}) {
    EXPECT_EQ(ReasonOf(engine->LoadAdapter({.adapter = name, .digest = std::string(64, '0')}).status()), reason::kAdapterChanged) << name;
    EXPECT_TRUE(engine->LoadAdapter({.adapter = name}).ok()) << name;
  }
}

// What is kept of an adapter, or a request gives, is a number: it makes no second copy of the tensors.
TEST_F(EngineTest, AnotherAlphaIsAnotherNumberAndNotAnotherCopy) {
  const auto with = [&](std::optional<double> request, std::optional<double> settings) {
    Stack stack = {{"turbo_bare", "", 0.5}};
    stack[0].alpha = request;
    stack[0].settings.alpha = settings;
    return *Generate(SpecOf("t2va", stack, 1));
  };
  const Answer eight = with(8, std::nullopt);
  const LedgerSnapshot before = Ledger();
  ExpectSameBits(with(std::nullopt, 8), eight);
  ExpectSameBits(with(8, 2), eight);
  EXPECT_GT(Difference(with(std::nullopt, 2), eight), 1e-4);
  EXPECT_EQ(Ledger().added_to(Owner::kAdapters), before.added_to(Owner::kAdapters));
}

TEST_F(EngineTest, EveryAllocationHasAnOwner) {
  const ByteCount before = Ledger().added_to(Owner::kUnattributed);
  Stack stack = {{"style_bf16", "", 0.7}, {"dora_columns", "", 0.5}, {"lokr", "", 0.2}, {"complete_own_table", "", 0.2}};
  stack[1].auto_strength = AutoStrength{};
  stack[2].apply = Apply::kMaterialized;
  std::swap(stack[1], stack[2]);
  ASSERT_TRUE(Generate(SpecOf("ref2va_mixed", stack, 2)).ok());
  ASSERT_TRUE(engine_->MeasureAdapter({.adapter = "dora"}).ok());
  EXPECT_EQ(Ledger().added_to(Owner::kUnattributed), before);
}

// Sizes of allocations that would be a copy of a target weight, in the base's type or in float32. No activation of this request has one
// of them.
std::set<int64_t> WeightSizes(const ModelInfo& model) {
  std::set<int64_t> sizes;
  for (const Site& site : Sites(model.geometry)) {
    if (site.out * site.in > 4096) sizes.insert(site.out * site.in * 4);
  }
  return sizes;
}

int64_t WeightSizedAllocations(const ModelInfo& model, const std::function<void()>& work) {
  const std::set<int64_t> sizes = WeightSizes(model);
  int64_t found = 0;
  testing::ObserveAllocations([&](ByteCount bytes) { found += sizes.contains(bytes.value()) ? 1 : 0; });
  work();
  testing::ObserveAllocations(nullptr);
  return found;
}

TEST_F(EngineTest, NoRequestAllocatesAnythingOfAWeightsSize) {
  const Stack stack = {{"turbo_bare", "", 0.7}, {"style_bf16", "", -0.4}, {"lokr", "", 0.3}, {"uneven", "", 1}, {"dora", "", 0.5}, {"dora_columns", "", 0.5}};
  EXPECT_EQ(WeightSizedAllocations(engine_->model(), [&] { ASSERT_TRUE(Generate(SpecOf("t2va_wide", stack, 2)).ok()); }), 0);
  // The check itself: a merged copy of one target is found.
  const Geometry& g = engine_->model().geometry;
  EXPECT_EQ(WeightSizedAllocations(engine_->model(), [&] { at::empty({3 * g.inner(), g.hidden}, at::TensorOptions().device(testing::TestDevice())); }), 1);
}

// A caller's own Euler over a session gives what Generate gives, bit for bit: the points need not be known together.
TEST_F(EngineTest, ASessionsEvaluationsAreThoseOfARun) {
  const Stack stack = {{"turbo_bare", "", 1.0}};
  const GenerationSpec spec = SpecOf("t2va", stack, 4, std::nullopt);
  const Answer run = *Generate(spec);
  const GoldenInput input = testing::ReadGoldenInput("t2va");
  auto session = engine_->OpenSession(ConditionsOf(input, stack, false), {}, {});
  ASSERT_TRUE(session.ok()) << session.status();
  HostTensor video = input.tensors.at("video_rows"), audio = input.tensors.at("audio_rows");
  video.name = "target_video_rows";
  audio.name = "target_audio_rows";
  const auto step = [](HostTensor& x, const HostTensor& velocity, float sigma, float next) {
    const float seen = 1.0f - (1.0f - sigma), ratio = next / sigma;
    std::vector<float> values(x.data.size() / sizeof(float)), v(values.size());
    std::memcpy(values.data(), x.data.data(), x.data.size());
    std::memcpy(v.data(), velocity.data.data(), velocity.data.size());
    for (size_t i = 0; i < values.size(); ++i) {
      const float denoised = std::fma(seen, v[i], values[i]);
      values[i] = std::fma(1.0f - ratio, denoised, values[i] * ratio);
    }
    std::memcpy(x.data.data(), values.data(), x.data.size());
  };
  for (size_t i = 0; i < 4; ++i) {
    const auto velocity = (*session)->Evaluate({.t_video = 1.0f - spec.schedule.video[i], .t_audio = 1.0f - spec.schedule.audio[i],
                                                .index = static_cast<int64_t>(i), .video = video, .audio = audio}, {});
    ASSERT_TRUE(velocity.ok()) << velocity.status();
    step(video, (*velocity)[0], spec.schedule.video[i], spec.schedule.video[i + 1]);
    step(audio, (*velocity)[1], spec.schedule.audio[i], spec.schedule.audio[i + 1]);
  }
  EXPECT_LE(testing::RelativeL2(testing::Values(video), testing::Values(run[0])), 1e-7);
  EXPECT_LE(testing::RelativeL2(testing::Values(audio), testing::Values(run[1])), 1e-7);
}

// With ever more memory, each run is refused cleanly until one fits.
TEST_F(EngineTest, EveryMemoryBudgetIsRefusedCleanlyUntilOneIsEnough) {
  const Stack stack = {{"turbo_bare", "", 0.7}, {"dora", "", 0.5}};
  const Answer want = *Generate(SpecOf("t2va", stack, 2));
  const LedgerSnapshot before = Ledger();
  absl::Status last;
  int refusals = 0;
  for (int64_t budget = 0; budget < (4 << 20); budget += 4096) {
    testing::LimitAllocations(ByteCount(budget));
    auto answer = Generate(SpecOf("t2va", stack, 2));
    testing::LimitAllocations(std::nullopt);
    ASSERT_EQ(Ledger().owners, before.owners) << budget;
    last = answer.status();
    if (last.ok()) {
      ExpectSameBits(*answer, want);
      break;
    }
    ASSERT_EQ(last.code(), absl::StatusCode::kResourceExhausted) << last;
    ASSERT_EQ(ReasonOf(last), reason::kVramExceeded);
    ++refusals;
  }
  EXPECT_TRUE(last.ok()) << last;
  EXPECT_GT(refusals, 3);
  ExpectSameBits(*Generate(SpecOf("t2va", stack, 2)), want);
}

// A merged copy is the other way to the same answer, owned, shared and given back.
TEST_F(EngineTest, AMergedCopyGivesTheAnswerOfTheRunTimeForm) {
  double worst = 0;
  for (const char* name : {"turbo_bare", "turbo_diffusers", "style_bf16", "split_qkv_ranks", "edges_fp32", "time_embedder", "dora", "dora_columns", "lokr", "uneven",
                           "complete_own_table"}) {
    Stack stack = {{name, "", 0.7}, {"turbo_bare", "", -0.4}};
    const Answer run_time = *Generate(SpecOf("t2va_wide", stack, 2));
    for (StackEntry& entry : stack) entry.apply = Apply::kMaterialized;
    const auto merged = Generate(SpecOf("t2va_wide", stack, 2));
    ASSERT_TRUE(merged.ok()) << name << ": " << merged.status();
    worst = std::max(worst, Difference(*merged, run_time));
  }
  std::printf("merged against run time: worst relative L2 %.2e\n", worst);
  EXPECT_LE(worst, 1e-6);
}

TEST_F(EngineTest, MergedCopiesAreSharedCountedAndGivenBack) {
  const auto engine = MakeEngine({.model = GoldenPath("full/model.safetensors"), .adapters = GoldenPath("lora"), .idle_merged = ByteCount(300'000),
                                  .device = testing::TestDevice()}).value();
  const auto entry = [](double strength) { return StackEntry{.adapter = "split_qkv_ranks", .strength = strength, .apply = Apply::kMaterialized}; };
  const auto run = [&](const Stack& stack) {
    auto generation = engine->StartGeneration(SpecOf("t2va", stack, 1));
    EXPECT_TRUE(generation.ok()) << generation.status();
    EXPECT_TRUE((*generation)->Advance({}).ok());
    return std::move(*generation);
  };
  // The ledger is the process's: other engines' copies are in it.
  const ByteCount others = engine->Memory().ledger.of(Owner::kMaterialized);
  const auto held = [&] { return engine->Memory().ledger.of(Owner::kMaterialized) - others; };
  // One weight for each distinct target, in the base's type.
  int64_t bytes = 0;
  for (const Site& site : Sites(engine->model().geometry)) {
    if (site.kind == SiteKind::kQkv && site.name.starts_with("blocks.")) bytes += site.out * site.in * 4;
  }
  auto first = run({entry(0.5)});
  EXPECT_EQ(held(), ByteCount(bytes));
  const ByteCount added = engine->Memory().ledger.added_to(Owner::kMaterialized);
  auto second = run({entry(0.5)});
  EXPECT_EQ(engine->Memory().ledger.added_to(Owner::kMaterialized), added) << "identical stacks share one copy";
  auto third = run({entry(0.25)});
  EXPECT_EQ(held(), ByteCount(2 * bytes));
  first.reset();
  second.reset();
  third.reset();
  EXPECT_LE(held(), ByteCount(300'000)) << "what nobody uses goes, least recently used first";
  EXPECT_GT(held(), ByteCount(0));
  const std::string digest = engine->Memory().adapters.at(0).digest;
  ASSERT_TRUE(engine->UnloadAdapter(digest).ok());
  EXPECT_EQ(held(), ByteCount(0));
  EXPECT_EQ(engine->Memory().base_mutations, 0);
}

TEST_F(EngineTest, AMergedCopyThatDoesNotFitLeavesNothing) {
  Stack stack = {{"turbo_bare", "", 0.7}};
  ASSERT_TRUE(Generate(SpecOf("t2va", stack, 1)).ok());
  stack[0].apply = Apply::kMaterialized;
  testing::LimitAllocations(ByteCount(1 << 20));
  const absl::Status refused = Generate(SpecOf("t2va", stack, 1)).status();
  testing::LimitAllocations(std::nullopt);
  EXPECT_EQ(ReasonOf(refused), reason::kVramExceeded);
  EXPECT_EQ(Ledger().of(Owner::kMaterialized), ByteCount(0));
  EXPECT_TRUE(Generate(SpecOf("t2va", stack, 1)).ok());
}

// A budget that holds a third of the adapters: never exceeded, whatever the stacks, and the answers stay the same.
TEST_F(EngineTest, AdaptersStayWithinTheirBudget) {
  const std::vector<std::string> names = {"turbo_bare", "turbo_comfy_alpha4", "turbo_diffusers", "style_bf16", "style_fp16_metaalpha", "edges_fp32",
                                          "split_qkv_ranks", "dora", "dora_columns", "lokr", "uneven", "time_embedder"};
  int64_t all = 0, largest = 0;
  for (const std::string& name : names) {
    const int64_t bytes = engine_->LoadAdapter({.adapter = name})->bytes.value();
    all += bytes;
    largest = std::max(largest, bytes);
  }
  const ByteCount others = Ledger().of(Owner::kAdapters);  // The other engine's: the ledger is the process's.
  const ByteCount budget(std::max(all / 3, largest));
  const auto engine = MakeEngine({.model = GoldenPath("full/model.safetensors"), .adapters = GoldenPath("lora"), .adapter_memory = budget,
                                  .device = testing::TestDevice()}).value();
  const auto held = [&] {
    ByteCount bytes;
    for (const AdapterResidency& adapter : engine->Memory().adapters) {
      if (adapter.tier == Tier::kDevice) bytes += adapter.bytes;
    }
    return bytes;
  };
  std::mt19937 random(3);
  int refused = 0;
  for (int i = 0; i < 300; ++i) {
    Stack stack;
    for (size_t n = random() % 4; n > 0; --n) stack.push_back({names[random() % names.size()], "", 0.5});
    auto run = engine->StartGeneration(SpecOf("t2va", stack, 1));
    ASSERT_LE(held(), budget);
    if (run.ok()) continue;
    ASSERT_EQ(ReasonOf(run.status()), reason::kVramExceeded) << run.status();
    EXPECT_EQ(run.status().code(), absl::StatusCode::kFailedPrecondition) << "alone in the house, what does not fit never fits";
    ++refused;
  }
  const MemoryReport report = engine->Memory();
  const TierCounters& on_device = report.adapters_by_tier[static_cast<size_t>(Tier::kDevice)];
  EXPECT_GT(on_device.hits, 0);
  EXPECT_GT(on_device.evictions, 10);
  EXPECT_LT(refused, 150);
  // The rest of an accelerator's blocks comes out of the margin.
  const ByteCount counted = Ledger().of(Owner::kAdapters) - others;
  EXPECT_GE(counted, held());
  EXPECT_LE(counted, held() + ByteCount(1000 * (testing::BlockUnit() - 1)));

  // What another run holds does not go for it.
  auto first = engine->StartGeneration(SpecOf("t2va", {{"turbo_bare", "", 1}}, 1));
  auto second = engine->StartGeneration(SpecOf("t2va", {{"turbo_diffusers", "", 1}}, 1));
  if (!second.ok()) {
    EXPECT_EQ(second.status().code(), absl::StatusCode::kResourceExhausted) << second.status();
    EXPECT_EQ(DetailsOf(second.status()).at("retry_seconds"), "1");
    first = absl::CancelledError("let go");
    EXPECT_TRUE(engine->StartGeneration(SpecOf("t2va", {{"turbo_diffusers", "", 1}}, 1)).ok());
  } else {
    ADD_FAILURE() << "the budget is too large for this test: " << budget.value();
  }
}

TEST_F(EngineTest, WhatAMergedCopyCannotDoIsRefused) {
  const auto refusal = [](Stack stack) { return ReasonOf(Generate(SpecOf("t2va", stack, 2)).status()); };
  Stack stack = {{"dora", "", 0.5}, {"turbo_bare", "", 0.5}};
  stack[1].apply = Apply::kMaterialized;
  EXPECT_EQ(refusal(stack), reason::kBadStrength) << "after a run-time DoRA";
  std::swap(stack[0], stack[1]);
  EXPECT_EQ(refusal(stack), "");
  stack[0].audio = 0.5;
  EXPECT_EQ(refusal(stack), reason::kBadStrength) << "by modality";
  stack[0].audio = 1;
  stack[0].per_evaluation = {1, 0.5};
  EXPECT_EQ(refusal(stack), reason::kBadStrength) << "by evaluation";
  Stack before = {{"turbo_bare", "", 0.5}, {"dora", "", 0.5}};
  before[0].text = 0.25;
  before[1].apply = Apply::kMaterialized;
  EXPECT_EQ(refusal(before), reason::kBadStrength) << "factors before a merged DoRA";
}

TEST_F(EngineTest, AMeasureIsTheNormOfTheDeltaAgainstTheWeight) {
  const auto measure = engine_->MeasureAdapter({.adapter = "turbo_bare"});
  ASSERT_TRUE(measure.ok()) << measure.status();
  EXPECT_GT(measure->relative_strength, 0);
  int64_t modules = 0;
  for (const auto& kind : measure->kinds) modules += kind.modules;
  EXPECT_EQ(modules, measure->resolved.modules);
  EXPECT_FALSE(engine_->MeasureAdapter({.adapter = "../lora/turbo_bare"}).ok());
}

TEST_F(EngineTest, ACancelledRunStopsAndReleasesEverything) {
  ASSERT_TRUE(Generate(SpecOf("t2va", {{"turbo_bare", "", 1}}, 2)).ok());
  const LedgerSnapshot before = Ledger();
  CancellationToken cancel;
  cancel.Cancel(absl::CancelledError("by the test"));
  const auto answer = Generate(SpecOf("t2va", {{"turbo_bare", "", 1}}, 2), cancel);
  EXPECT_EQ(answer.status().code(), absl::StatusCode::kCancelled) << answer.status();
  EXPECT_EQ(Ledger().owners, before.owners);
}

TEST_F(EngineTest, BadTensorsAreRefusedAndHarmNothing) {
  const Answer want = *Generate(SpecOf("t2va", {}, 1));
  const auto refused = [&](const std::function<void(Conditions&)>& spoil) {
    GenerationSpec spec = SpecOf("t2va", {}, 1);
    spoil(spec.conditions);
    const absl::Status status = Generate(std::move(spec)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    return ReasonOf(status);
  };
  const auto tensor = [](Conditions& c, const std::string& name) -> HostTensor& {
    return *std::find_if(c.tensors.begin(), c.tensors.end(), [&](const HostTensor& t) { return t.name == name; });
  };
  EXPECT_EQ(refused([&](Conditions& c) { tensor(c, "text").shape[1] -= 1; }), reason::kBadTensor);
  EXPECT_EQ(refused([&](Conditions& c) { tensor(c, "text").data.pop_back(); }), reason::kBadTensor);
  EXPECT_EQ(refused([&](Conditions& c) { tensor(c, "text").dtype = DType::kI64; }), reason::kBadTensor);
  EXPECT_EQ(refused([&](Conditions& c) { c.tensors.clear(); }), reason::kBadTensor);
  EXPECT_EQ(refused([&](Conditions& c) { c.tensors.push_back(c.tensors.front()); }), reason::kBadTensor);
  EXPECT_EQ(refused([&](Conditions& c) { tensor(c, "text_token_tags").data[0] = 2; }), reason::kBadTensor);
  EXPECT_EQ(refused([&](Conditions& c) {
              const float nan = std::nanf("");
              std::memcpy(tensor(c, "text").data.data(), &nan, sizeof(nan));
            }),
            reason::kNotFinite);
  EXPECT_EQ(refused([&](Conditions& c) { c.layout.latent_height = 3; }), reason::kBadLayout);
  EXPECT_EQ(refused([&](Conditions& c) { c.layout.text_tokens = 1 << 30; }), reason::kBadLayout);
  ExpectSameBits(*Generate(SpecOf("t2va", {}, 1)), want);
}

TEST_F(EngineTest, AnAdapterInUseIsNotUnloaded) {
  auto run = engine_->StartGeneration(SpecOf("t2va", {{"edges_fp32", "", 1}}, 2));
  ASSERT_TRUE(run.ok());
  const std::string digest = (*run)->stack().front().digest;
  EXPECT_EQ(ReasonOf(engine_->UnloadAdapter(digest).status()), reason::kInUse);
  EXPECT_GT(engine_->Memory().avoided_resident, ByteCount(0));
  run->reset();
  EXPECT_TRUE(engine_->UnloadAdapter(digest).ok());
  EXPECT_EQ(engine_->UnloadAdapter(digest).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(engine_->Memory().avoided_resident, ByteCount(0));
}

}  // namespace
}  // namespace h3
