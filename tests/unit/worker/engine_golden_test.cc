// The engine against the golden set: every case of cases.json, every container.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "server/base/error.h"
#include "server/worker/engine.h"
#include "tests/testing/golden.h"
#include "tests/testing/test_device.h"

namespace h3 {
namespace {

using testing::GoldenCase;
using testing::GoldenPath;

// Worst of all cases as measured: 4.0e-7 in float32.
constexpr double kTolerance = 1e-6;

bool IsSent(const std::string& name) {
  return name == "text" || name == "text_token_tags" || name.starts_with("condition_");
}

std::vector<double> Floats(const HostTensor& tensor) { return testing::Values(tensor); }

struct Answer {
  std::vector<double> video, audio;
};

absl::StatusOr<Answer> RunCase(Engine& engine, const GoldenCase& golden) {
  const testing::GoldenInput input = testing::ReadGoldenInput(golden.input);
  Conditions conditions{.layout = input.request.layout, .stack = golden.stack};
  for (const auto& [name, tensor] : input.tensors) {
    const bool start = golden.evaluations > 0 && !golden.seed.has_value() && name.starts_with("target_");
    if (IsSent(name) || start) conditions.tensors.push_back(tensor);
  }
  std::vector<HostTensor> result;
  if (golden.evaluations > 0) {
    GenerationSpec spec{.conditions = std::move(conditions), .seed = golden.seed};
    spec.schedule = MakeSchedule({.evaluations = golden.evaluations}).value();
    auto run = engine.StartGeneration(std::move(spec));
    if (!run.ok()) return run.status();
    for (;;) {
      const auto done = (*run)->Advance({});
      if (!done.ok()) return done.status();
      if (*done) break;
    }
    auto taken = (*run)->TakeResult();
    if (!taken.ok()) return taken.status();
    result = std::move(*taken);
  } else {
    auto session = engine.OpenSession(std::move(conditions), {}, {});
    if (!session.ok()) return session.status();
    const double base = *input.request.base_sigma;
    auto velocity = (*session)->Evaluate({.t_video = static_cast<float>(1.0 - ShiftSigma(base, kDefaultVideoShift)),
                                          .t_audio = static_cast<float>(1.0 - ShiftSigma(base, kDefaultAudioShift)),
                                          .video = input.tensors.at("target_video"),
                                          .audio = input.tensors.at("target_audio_rows"),
                                          .include_condition_rows = true},
                                         {});
    if (!velocity.ok()) return velocity.status();
    result = std::move(*velocity);
  }
  return Answer{Floats(result[0]), Floats(result[1])};
}

std::unique_ptr<Engine> LoadModel(const std::string& model, const std::string& dtype = "auto") {
  EngineOptions options{.model = GoldenPath(model), .adapters = GoldenPath("lora"), .device = testing::TestDevice(), .dtype = dtype};
  if (model == "pruned/model.safetensors") options.silu_grid = GoldenPath("pruned/silu_temb_grid.safetensors");
  auto engine = MakeEngine(options);
  EXPECT_TRUE(engine.ok()) << engine.status();
  return std::move(*engine);
}

// The worst relative L2 of both streams.
double Error(const Answer& answer, const GoldenCase& golden) {
  const auto expected = testing::ReadTensors(GoldenPath("expected/" + golden.name + ".safetensors"));
  return std::max(testing::RelativeL2(answer.video, Floats(expected.at("video"))),
                  testing::RelativeL2(answer.audio, Floats(expected.at("audio"))));
}

class EngineGoldenTest : public ::testing::TestWithParam<const char*> {};

TEST_P(EngineGoldenTest, EveryCaseOfItsModelHasTheExpectedAnswer) {
  const std::string path = GetParam();
  const std::unique_ptr<Engine> engine = LoadModel(path);
  double worst = 0;
  int ran = 0;
  for (const GoldenCase& golden : testing::GoldenCases()) {
    if (!path.starts_with(golden.model)) continue;
    SCOPED_TRACE(golden.name);
    const auto answer = RunCase(*engine, golden);
    ++ran;
    EXPECT_TRUE(answer.ok()) << answer.status();
    if (!answer.ok()) continue;
    const double error = Error(*answer, golden);
    EXPECT_LE(error, kTolerance);
    worst = std::max(worst, error);
  }
  EXPECT_GT(ran, 10);
  std::printf("%s: %d cases, worst relative L2 %.2e\n", path.c_str(), ran, worst);
}

INSTANTIATE_TEST_SUITE_P(Containers, EngineGoldenTest,
                         ::testing::Values("full/model.safetensors", "full-sharded", "full-diffusers", "pruned/model.safetensors"),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace_if(name.begin(), name.end(), [](char c) { return !std::isalnum(static_cast<unsigned char>(c)); }, '_');
                           return name;
                         });

}  // namespace
}  // namespace h3
