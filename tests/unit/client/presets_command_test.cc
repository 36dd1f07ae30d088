// `h3ctl presets` against a server in this process.
#include "client/cli/presets_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/cli/exit_code.h"
#include "client/cli/lora_spec.h"
#include "tests/unit/client/command_test.h"

namespace h3::ctl {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

v1::Preset Anime() {
  v1::Preset preset;
  preset.set_name("anime");
  preset.set_revision(3);
  preset.set_updated_seconds(86400);
  for (const char* spec : {"turbo=1", "my style=0.6,audio=0"}) {
    *preset.add_stack() = *ParseLoraSpec(spec);
    preset.mutable_stack()->rbegin()->set_digest("0123");
  }
  return preset;
}

class PresetsCommandTest : public testing::CommandTest {};

TEST_F(PresetsCommandTest, SetSendsTheStackAndTheRevisionThatIsExpected) {
  v1::SetPresetRequest received;
  server_.on_set_preset = [&](const v1::SetPresetRequest& request, v1::SetPresetResponse& response) {
    received = request;
    *response.mutable_preset() = Anime();
    return absl::OkStatus();
  };
  ASSERT_TRUE(Run({"presets", "set", "anime", "--lora", "turbo=1", "--lora", "my style=0.6,audio=0"}).ok());
  EXPECT_EQ(received.name(), "anime");
  EXPECT_FALSE(received.has_expected_revision());
  ASSERT_EQ(received.stack_size(), 2);
  EXPECT_EQ(received.stack(1).adapter(), "my style");
  EXPECT_EQ(received.stack(1).factors().audio(), 0);
  EXPECT_THAT(out_.str(), HasSubstr("anime  revision 3, set 1970-01-02 00:00:00 UTC\n"));
  ASSERT_TRUE(Run({"presets", "set", "anime", "--lora", "turbo=1", "--expected-revision", "0"}).ok());
  EXPECT_TRUE(received.has_expected_revision());
  EXPECT_EQ(received.expected_revision(), 0u);
  EXPECT_EQ(ExitCode(Run({"presets", "set", "anime", "--lora", "turbo"})), 2);
}

TEST_F(PresetsCommandTest, GetShowsOptionsThatAShellTakesAndDigests) {
  server_.on_get_preset = [](const v1::GetPresetRequest& request, v1::GetPresetResponse& response) {
    EXPECT_EQ(request.name(), "anime");
    *response.mutable_preset() = Anime();
    return absl::OkStatus();
  };
  ASSERT_TRUE(Run({"presets", "get", "anime"}).ok());
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("  --lora turbo=1                 sha256:0123\n"),
                                HasSubstr("  --lora 'my style=0.6,audio=0'  sha256:0123\n"), Not(HasSubstr("CHANGED"))));
}

TEST_F(PresetsCommandTest, AnAdapterThatChangedIsMarkedWithWhatToDo) {
  v1::Preset preset = Anime();
  preset.add_changed("my style");
  EXPECT_THAT(
      PresetText(preset),
      AllOf(HasSubstr("sha256:0123  CHANGED\n"),
            HasSubstr("  h3ctl presets set anime --lora turbo=1 --lora 'my style=0.6,audio=0' --expected-revision 3\n")));
}

TEST_F(PresetsCommandTest, ListShowsStacksAndWhatChanged) {
  server_.on_list_presets = [](const v1::ListPresetsRequest&, v1::ListPresetsResponse& response) {
    *response.add_presets() = Anime();
    response.mutable_presets(0)->add_changed("turbo");
    return absl::OkStatus();
  };
  ASSERT_TRUE(Run({"presets", "list"}).ok());
  EXPECT_THAT(out_.str(), HasSubstr("turbo=1 (changed)  my style=0.6,audio=0\n"));
  out_.str("");
  ASSERT_TRUE(Run({"--json", "presets", "list"}).ok());
  EXPECT_EQ(Lines().at(0)["presets"][0]["revision"], 3);
}

TEST_F(PresetsCommandTest, RemoveAsksForTheNameAndARefusalKeepsItsReason) {
  server_.on_remove_preset = [](const v1::RemovePresetRequest& request, v1::RemovePresetResponse&) {
    if (request.name() == "anime") return absl::OkStatus();
    return Refuse(absl::StatusCode::kNotFound, "UNKNOWN_PRESET", "there is no such preset");
  };
  EXPECT_TRUE(Run({"presets", "remove", "anime"}).ok());
  EXPECT_EQ(out_.str(), "removed anime\n");
  EXPECT_EQ(ReasonOf(Run({"presets", "remove", "other"})), "UNKNOWN_PRESET");
}

}  // namespace
}  // namespace h3::ctl
