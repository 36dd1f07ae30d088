#include "client/cli/lora_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "client/cli/exit_code.h"

namespace h3::ctl {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::StackEntry Parsed(absl::string_view spec) {
  const auto entry = ParseLoraSpec(spec);
  EXPECT_TRUE(entry.ok()) << entry.status();
  return entry.value_or(v1::StackEntry());
}

TEST(LoraSpecTest, NameAndStrengthAreEnough) {
  const v1::StackEntry entry = Parsed("motion/slow=-0.5");
  EXPECT_EQ(entry.adapter(), "motion/slow");
  EXPECT_EQ(entry.strength(), -0.5);
  EXPECT_FALSE(entry.has_factors());
  EXPECT_FALSE(entry.has_auto_strength());
  EXPECT_FALSE(entry.has_alpha());
  EXPECT_EQ(entry.apply(), v1::APPLY_UNSPECIFIED);
}

TEST(LoraSpecTest, EveryOptionArrives) {
  const v1::StackEntry entry = Parsed(
      "style=0.8,video=1,text=0.5,audio=0,per-evaluation=1:0.5:0,auto-strength=0.3:1.5,alpha=4,leave-out=adaln,apply="
      "materialized");
  EXPECT_EQ(entry.factors().video(), 1);
  EXPECT_EQ(entry.factors().text(), 0.5);
  EXPECT_TRUE(entry.factors().has_audio());
  EXPECT_EQ(entry.factors().audio(), 0);
  EXPECT_THAT(entry.per_evaluation(), ElementsAre(1, 0.5, 0));
  EXPECT_EQ(entry.auto_strength().floor(), 0.3);
  EXPECT_EQ(entry.auto_strength().ceiling(), 1.5);
  EXPECT_EQ(entry.alpha(), 4);
  EXPECT_THAT(entry.leave_out(), ElementsAre("adaln"));
  EXPECT_EQ(entry.apply(), v1::APPLY_MATERIALIZED);
}

TEST(LoraSpecTest, ANameMayHoldEqualsSignsAndCommas) {
  EXPECT_EQ(Parsed("a=b=1").adapter(), "a=b");
  EXPECT_EQ(Parsed("style,v2=1,audio=0").adapter(), "style,v2");
  EXPECT_EQ(Parsed("sha256:abc=2").adapter(), "sha256:abc");
}

TEST(LoraSpecTest, FormattedEntriesParseToThemselves) {
  for (const char* spec :
       {"style=1", "motion/slow=-0.5", "a=b=1e-07", "style,v2=0.1,audio=0", "sha256:abc=2,apply=bypass", "style=1e+30",
        "style=0.30000000000000004,video=1,text=0.5,audio=0,per-evaluation=1:0.5:0,auto-strength=0.25:2,alpha=0.1,"
        "leave-out=adaln,apply=materialized"}) {
    const v1::StackEntry entry = Parsed(spec);
    EXPECT_EQ(FormatLoraSpec(entry), spec);
    EXPECT_EQ(Parsed(FormatLoraSpec(entry)).SerializeAsString(), entry.SerializeAsString()) << spec;
  }
}

TEST(LoraSpecTest, FormattingFillsInBoundsAndLeavesOutWhatASpecCannotSay) {
  v1::StackEntry entry;
  entry.set_adapter("style");
  entry.set_strength(0.8);
  entry.set_digest("abc");
  entry.mutable_factors();
  entry.mutable_auto_strength()->set_ceiling(2);
  entry.mutable_settings()->set_alpha(8);
  EXPECT_EQ(FormatLoraSpec(entry), "style=0.8,auto-strength=0.3:2");
}

TEST(LoraSpecTest, WhichNumbersAreAllowedIsForTheServerToSay) {
  EXPECT_TRUE(std::isnan(Parsed("style=nan").strength()));
  EXPECT_EQ(Parsed("style=1e30").strength(), 1e30);
}

struct BadSpec {
  const char* spec;
  const char* part;  // That the message must name.
};

class BadLoraSpecTest : public ::testing::TestWithParam<BadSpec> {};

TEST_P(BadLoraSpecTest, IsWrongUsageAndSaysWhatIsWrong) {
  const absl::Status status = ParseLoraSpec(GetParam().spec).status();
  EXPECT_EQ(ExitCode(status), 2) << GetParam().spec;
  EXPECT_THAT(std::string(status.message()), HasSubstr(GetParam().part));
}

INSTANTIATE_TEST_SUITE_P(All, BadLoraSpecTest,
                         ::testing::Values(BadSpec{"style", "=STRENGTH is missing"}, BadSpec{"", "=STRENGTH is missing"},
                                           BadSpec{"=1", "name is missing"}, BadSpec{"style=", "strength '' is not a number"},
                                           BadSpec{"style=high", "strength 'high'"}, BadSpec{"style=1,vidoe=0", "'vidoe'"},
                                           BadSpec{"style=1,audio=0,vidoe=1", "'vidoe'"}, BadSpec{"style=1,audio", "'1,audio'"},
                                           BadSpec{"style=1,audio=loud", "audio 'loud'"},
                                           BadSpec{"style=1,audio=0,audio=1", "twice"},
                                           BadSpec{"style=1,per-evaluation=1::2", "per-evaluation ''"},
                                           BadSpec{"style=1,auto-strength=0.3", "FLOOR:CEILING"},
                                           BadSpec{"style=1,leave-out=mlp", "'mlp'"},
                                           BadSpec{"style=1,apply=merge", "'merge'"}));

}  // namespace
}  // namespace h3::ctl
