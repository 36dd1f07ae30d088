// One engine over the small full model of tests/golden, and what its tests ask of it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "server/vram/ledger.h"
#include "server/worker/engine.h"
#include "tests/testing/golden.h"
#include "tests/testing/test_device.h"

namespace h3 {

using testing::GoldenInput;
using testing::GoldenPath;

using Stack = std::vector<StackEntry>;
using Answer = std::vector<HostTensor>;

class EngineTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    engine_ = MakeEngine({.model = GoldenPath("full/model.safetensors"), .adapters = GoldenPath("lora"), .device = testing::TestDevice()}).value().release();
  }
  static void TearDownTestSuite() { delete engine_; }

  static Conditions ConditionsOf(const GoldenInput& input, const Stack& stack, bool targets) {
    Conditions conditions{.layout = input.request.layout, .stack = stack};
    for (const auto& [name, tensor] : input.tensors) {
      if (name == "text" || name == "text_token_tags" || name.starts_with("condition_") || (targets && name.starts_with("target_"))) {
        conditions.tensors.push_back(tensor);
      }
    }
    return conditions;
  }
  static GenerationSpec SpecOf(const std::string& input, const Stack& stack, int64_t evaluations, std::optional<uint64_t> seed = 7) {
    GenerationSpec spec{.conditions = ConditionsOf(testing::ReadGoldenInput(input), stack, !seed.has_value()), .seed = seed};
    spec.schedule = MakeSchedule({.evaluations = evaluations}).value();
    return spec;
  }
  static absl::StatusOr<Answer> Generate(GenerationSpec spec, const CancellationToken& cancel = {}) {
    return GenerateOn(*engine_, std::move(spec), cancel);
  }
  static absl::StatusOr<Answer> GenerateOn(Engine& engine, GenerationSpec spec, const CancellationToken& cancel = {}) {
    auto run = engine.StartGeneration(std::move(spec));
    if (!run.ok()) return run.status();
    for (;;) {
      const auto done = (*run)->Advance(cancel);
      if (!done.ok()) return done.status();
      if (*done) return (*run)->TakeResult();
    }
  }
  static LedgerSnapshot Ledger() { return engine_->Memory().ledger; }

  static inline Engine* engine_ = nullptr;
};

inline void ExpectSameBits(const Answer& a, const Answer& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].data, b[i].data) << a[i].name;
}

inline double Difference(const Answer& a, const Answer& b) {
  return std::max(testing::RelativeL2(testing::Values(a[0]), testing::Values(b[0])), testing::RelativeL2(testing::Values(a[1]), testing::Values(b[1])));
}

}  // namespace h3
