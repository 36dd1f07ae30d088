// What an engine promises of its memory: admission before work, modulations and AdaLN weights where they were asked to be, a base that
// is looked at again.
#include <filesystem>
#include <fstream>

#include "server/base/error.h"
#include "server/base/tiling.h"
#include "tests/testing/temporary_directory.h"
#include "tests/unit/worker/engine_fixture.h"

namespace h3 {
namespace {

class EngineMemoryTest : public EngineTest {
 protected:
  static EngineOptions Full() { return {.model = GoldenPath("full/model.safetensors"), .adapters = GoldenPath("lora"), .device = testing::TestDevice()}; }
  static std::unique_ptr<Engine> Make(const EngineOptions& options) { return MakeEngine(options).value(); }
  static Stack TwoAdapters() { return {{"turbo_bare", "", 0.5}, {"style_bf16", "", 0.3}}; }
};

class Verified final : public EngineObserver {
 public:
  void AdapterLoaded(AdapterSource, absl::Duration, ByteCount) override {}
  void StackInPlace(StackChange, AdapterSource, absl::Duration, ByteCount) override {}
  void StackRefused(StackChange) override {}
  void OutOfMemory(absl::string_view) override { ++out_of_memory; }
  void BaseVerified(bool unchanged) override { ++(unchanged ? same : changed); }
  int same = 0, changed = 0, out_of_memory = 0;
};

// Every amount of memory either runs or is refused before it begins; none ends in the middle.
TEST_F(EngineMemoryTest, EveryBudgetRunsOrIsRefusedBeforeWork) {
  const ByteCount base = Ledger().of(Owner::kBaseWeights);
  const Answer expected = *Generate(SpecOf("t2va", TwoAdapters(), 2));
  int ran = 0, refused = 0;
  const LedgerSnapshot now = Ledger();
  const ByteCount others = now.used - now.of(Owner::kAllocatorCache);  // The other engine's: the ledger is the process's.
  for (int64_t extra = 0; extra <= 4096; extra += 128) {
    Verified observer;
    EngineOptions options = Full();
    options.device_memory = others + base + ByteCount(extra << 10);
    options.observer = &observer;
    const auto engine = MakeEngine(options);
    if (!engine.ok()) {
      ASSERT_EQ(ReasonOf(engine.status()), reason::kVramExceeded) << engine.status();
      ++refused;
      continue;
    }
    const auto answer = GenerateOn(**engine, SpecOf("t2va", TwoAdapters(), 2));
    EXPECT_EQ(observer.out_of_memory, 0) << extra << " KiB: admitted, and then there was not enough";
    EXPECT_EQ((*engine)->Memory().reserved, ByteCount(0));
    if (answer.ok()) {
      ExpectSameBits(*answer, expected);
      ++ran;
    } else {
      ASSERT_EQ(ReasonOf(answer.status()), reason::kVramExceeded) << answer.status();
      EXPECT_EQ(ran, 0) << extra << " KiB: less was enough";
      ++refused;
    }
  }
  EXPECT_GT(ran, 0);
  EXPECT_GT(refused, 0);
}

TEST_F(EngineMemoryTest, AdalnWeightsOnTheHostGiveTheSameBits) {
  EngineOptions options = Full();
  const Answer expected = *Generate(SpecOf("t2va", TwoAdapters(), 3));
  options.adaln_on_host = true;
  const auto engine = Make(options);
  for (int i = 0; i < 2; ++i) ExpectSameBits(*GenerateOn(*engine, SpecOf("t2va", TwoAdapters(), 3)), expected);
  const ModelInfo& here = engine->model();
  const ModelInfo& there = engine_->model();
  EXPECT_GT(here.host_weight_bytes, ByteCount(0));
  EXPECT_EQ(here.weight_bytes + here.host_weight_bytes, there.weight_bytes);
  EXPECT_EQ(here.fingerprint, there.fingerprint);
}

TEST_F(EngineMemoryTest, ModulationsAreKeptWithinTheirBudgetAndChangeNothing) {
  const int64_t line = ModulationLineBytes(engine_->model().geometry.blocks, engine_->model().geometry.hidden);
  EngineOptions none = Full(), few = Full();
  none.modulation_cache = ByteCount(0);
  few.modulation_cache = ByteCount(20 * line);
  const auto without = Make(none), with = Make(few);
  for (const int64_t evaluations : {4, 200, 4}) {
    const Answer expected = *GenerateOn(*without, SpecOf("t2va", {}, evaluations));
    ExpectSameBits(*GenerateOn(*with, SpecOf("t2va", {}, evaluations)), expected);
    const MemoryReport report = with->Memory();
    EXPECT_EQ(report.modulation_budget, few.modulation_cache);
    EXPECT_GT(report.reusable, ByteCount(0));
    EXPECT_LE(report.reusable, few.modulation_cache) << "no adapters and no merged copies: all of it is modulations";
    EXPECT_EQ(without->Memory().reusable, ByteCount(0));
  }
}

TEST_F(EngineMemoryTest, TheBaseIsReadAgainAndAChangeOfItIsSeen) {
  const testing::TemporaryDirectory folder;
  const std::filesystem::path copy = folder.path() / "model.safetensors";
  std::filesystem::copy_file(GoldenPath("full/model.safetensors"), copy);
  Verified observer;
  EngineOptions options = Full();
  options.model = copy.string();
  options.observer = &observer;
  const auto engine = Make(options);
  while (observer.same < 1000) engine->AuditBase(absl::ZeroDuration());
  EXPECT_TRUE(engine->Health().ok());
  std::fstream file(copy, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-5, std::ios::end);  // In the last tensor's data, wherever that one's turn is.
  file.put('\x55');
  file.close();
  for (int i = 0; i < 2000 && observer.changed == 0; ++i) engine->AuditBase(absl::ZeroDuration());
  EXPECT_EQ(observer.changed, 1);
  EXPECT_FALSE(engine->Health().ok());
  EXPECT_EQ(engine->Memory().base_mutations, 1);
  EXPECT_FALSE(GenerateOn(*engine, SpecOf("t2va", {}, 1)).ok());
}

}  // namespace
}  // namespace h3
