// `h3ctl adapters check | upload | set | list` against a server in this process.
#include "client/cli/adapters_command.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <optional>

#include "client/cli/adapter_report.h"
#include "client/cli/exit_code.h"
#include "tests/unit/client/command_test.h"

namespace h3::ctl {
namespace {

using ::h3::testing::UploadReader;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;

v1::AdapterReport GoodReport() {
  v1::AdapterReport report;
  report.set_name("style");
  report.set_digest("0123456789abcdef");
  report.set_file_bytes(592 << 20);
  report.set_format("kohya");
  report.set_producer("sd-scripts 0.9");
  v1::EffectiveScale& scale = *report.add_scales();
  scale.set_module_kind("attn.qkv_proj");
  scale.set_modules(52);
  scale.set_rank(16);
  scale.set_alpha(8);
  scale.set_scale(0.5);
  scale.set_source("alpha tensor");
  report.set_modules(208);
  report.set_bytes(600 << 20);
  report.set_arithmetic_percent(2.3125);
  report.set_relative_strength(0.0125);
  v1::KindStrength& kind = *report.add_strengths();
  kind.set_module_kind("mlp.fc1");
  kind.set_modules(50);
  kind.set_relative_strength(0.02);
  report.set_partition(v1::PARTITION_REF2VA);
  (*report.mutable_schedule_hints())["steps"] = "8";
  (*report.mutable_schedule_hints())["shift"] = "7";
  report.add_ignored_sections("text_encoder");
  report.add_warnings("alpha was guessed");
  report.mutable_settings()->set_alpha(8);
  report.mutable_settings()->set_fc1_order(v1::FC1_ORDER_GATE_FIRST);
  report.mutable_verdict()->set_loads(true);
  report.set_checked_by("worker-0");
  return report;
}

v1::AdapterReport BadReport() {
  v1::AdapterReport report = GoodReport();
  v1::Verdict& verdict = *report.mutable_verdict();
  verdict.set_loads(false);
  verdict.set_code("INVALID_ARGUMENT");
  verdict.set_reason("UNSUPPORTED_DORA");
  verdict.set_message("blocks.0.attn.qkv_proj: dora_scale has 3 columns");
  (*verdict.mutable_details())["tensor"] = "blocks.0.attn.qkv_proj";
  report.clear_checked_by();
  return report;
}

class AdaptersCommandTest : public testing::CommandTest {
 protected:
  // Answers an upload of any size with `report`, and keeps its header.
  void ServeUpload(v1::AdapterReport report, std::string replaced = "") {
    server_.on_upload = [this, report, replaced](grpc::ServerContext&, UploadReader& reader,
                                                 v1::UploadAdapterResponse& response) {
      v1::UploadAdapterRequest request;
      reader.Read(&request);
      upload_ = request.header();
      while (reader.Read(&request)) {
      }
      *response.mutable_report() = report;
      response.set_replaced(replaced);
      return absl::OkStatus();
    };
  }
  std::string MakeFile() {
    const std::string path = (folder_ / "local.safetensors").string();
    std::ofstream(path) << "bytes";
    return path;
  }

  std::optional<v1::UploadHeader> upload_;
};

TEST_F(AdaptersCommandTest, CheckOfANamePrintsTheVerdictFirstAndThenWhatIsKnown) {
  std::string name;
  server_.on_check = [&](const v1::CheckAdapterRequest& request, v1::CheckAdapterResponse& response) {
    name = request.name();
    *response.mutable_report() = GoodReport();
    return absl::OkStatus();
  };
  const absl::Status status = Run({"adapters", "check", "style"});
  EXPECT_EQ(ExitCode(status), 0) << status;
  EXPECT_EQ(name, "style");
  const std::string text = out_.str();
  EXPECT_THAT(text, StartsWith("would load\n"));
  for (const char* part :
       {"kohya, written by sd-scripts 0.9", "592.0 MiB  sha256:0123456789abcdef", "208", "600.0 MiB", "2.31 %", "1.25 %",
        "2 % in mlp.fc1 (50 modules)", "ref2va", "alpha=8 fc1=gate-first", "shift=7, steps=8", "every value, by worker-0",
        "attn.qkv_proj", "alpha tensor", "text_encoder", "warning: alpha was guessed"}) {
    EXPECT_THAT(text, HasSubstr(part));
  }
}

TEST_F(AdaptersCommandTest, AVerdictThatSaysNoIsARefusalWithTheReportOnStdout) {
  server_.on_check = [](const v1::CheckAdapterRequest&, v1::CheckAdapterResponse& response) {
    *response.mutable_report() = BadReport();
    return absl::OkStatus();
  };
  absl::Status status = Run({"adapters", "check", "style"});
  EXPECT_EQ(ExitCode(status), 3);
  EXPECT_THAT(out_.str(), AllOf(StartsWith("would not load: UNSUPPORTED_DORA blocks.0.attn.qkv_proj: dora_scale"),
                                HasSubstr("kohya"), HasSubstr("header alone")));
  out_.str("");
  status = Run({"--json", "adapters", "check", "style"});
  EXPECT_EQ(ExitCode(status), 3);
  const auto error = nlohmann::json::parse(ErrorJson(status));  // As main prints it.
  EXPECT_EQ(error["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(error["reason"], "UNSUPPORTED_DORA");
  EXPECT_EQ(error["details"]["tensor"], "blocks.0.attn.qkv_proj");
  const auto report = Lines().at(0);
  EXPECT_EQ(report["format"], "kohya");
  EXPECT_EQ(report["verdict"]["loads"], false);
  EXPECT_EQ(report["verdict"]["details"]["tensor"], "blocks.0.attn.qkv_proj");
  EXPECT_EQ(report["schedule_hints"], nlohmann::json({{"steps", "8"}, {"shift", "7"}}));
  EXPECT_EQ(report["settings"]["fc1_order"], "gate_first");
}

TEST_F(AdaptersCommandTest, TheVerdictsCodeDecidesTheExitCode) {
  v1::Verdict verdict;
  for (const char* code : {"INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "A_CODE_OF_TOMORROW", ""}) {
    verdict.set_code(code);
    EXPECT_EQ(ExitCode(VerdictStatus(verdict)), 3) << code;
  }
  verdict.set_code("RESOURCE_EXHAUSTED");
  EXPECT_EQ(ExitCode(VerdictStatus(verdict)), 4);
}

TEST_F(AdaptersCommandTest, CheckOfALocalFileSendsItAndKeepsNothing) {
  v1::AdapterReport report = BadReport();
  report.clear_name();
  ServeUpload(report);
  const std::string path = MakeFile();
  EXPECT_EQ(ExitCode(Run({"adapters", "check", path.c_str()})), 3);
  ASSERT_TRUE(upload_.has_value());
  EXPECT_TRUE(upload_->check_only());
  EXPECT_THAT(upload_->name(), IsEmpty());
  EXPECT_THAT(out_.str(), AllOf(StartsWith("would not load: UNSUPPORTED_DORA"), HasSubstr(path)));
}

TEST_F(AdaptersCommandTest, UploadSaysWhatItReplacedAndTheVerdict) {
  ServeUpload(GoodReport(), "fedcba");
  const std::string path = MakeFile();
  absl::Status status = Run({"adapters", "upload", "style", path.c_str()});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(upload_->name(), "style");
  EXPECT_FALSE(upload_->check_only());
  EXPECT_THAT(out_.str(),
              StartsWith("uploaded style  sha256:0123456789abcdef  592.0 MiB  in place of sha256:fedcba\nwould load\n"));
  EXPECT_THAT(out_.str(), Not(HasSubstr("\x1b")));  // No progress in a pipe.

  out_.str("");
  ServeUpload(BadReport(), "0123456789abcdef");
  status = Run({"adapters", "upload", "style", path.c_str()});
  EXPECT_EQ(ExitCode(status), 0) << status;  // Kept all the same.
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("was there already"), HasSubstr("would not load: UNSUPPORTED_DORA"),
                                HasSubstr("it is kept, but requests with it will be refused")));
}

TEST_F(AdaptersCommandTest, UploadShowsProgressOnATerminal) {
  terminal_ = true;
  ServeUpload(GoodReport());
  const std::string path = MakeFile();
  ASSERT_TRUE(Run({"adapters", "upload", "style", path.c_str()}).ok());
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("hashing [===="), HasSubstr("\r\x1b[Kuploaded style")));
}

TEST_F(AdaptersCommandTest, ARefusedUploadKeepsItsReason) {
  server_.on_upload = [](grpc::ServerContext&, UploadReader&, v1::UploadAdapterResponse&) {
    return Refuse(absl::StatusCode::kResourceExhausted, "DISK_FULL", "no room");
  };
  const std::string path = MakeFile();
  const absl::Status status = Run({"adapters", "upload", "style", path.c_str()});
  EXPECT_EQ(ReasonOf(status), "DISK_FULL");
  EXPECT_EQ(ExitCode(status), 4);
  EXPECT_EQ(ReasonOf(Run({"adapters", "upload", "style", "/nonexistent"})), "NO_SUCH_FILE");
}

// What is kept for the only adapter, as a server keeps it.
struct Kept {
  v1::AdapterSettings settings;
  std::vector<v1::SetAdapterRequest> requests;

  absl::Status Set(const v1::SetAdapterRequest& request, v1::SetAdapterResponse& response) {
    requests.push_back(request);
    if (request.reset()) settings.Clear();
    settings.MergeFrom(request.settings());
    response.set_digest("0123");
    *response.mutable_settings() = settings;
    return absl::OkStatus();
  }
};

TEST_F(AdaptersCommandTest, SetNeedsAnOption) {
  EXPECT_EQ(ExitCode(Run({"adapters", "set", "style"})), 2);
  EXPECT_EQ(ExitCode(Run({"adapters", "set", "style", "--alpha", "much"})), 2);
}

TEST_F(AdaptersCommandTest, SetSendsOnlyWhatIsGivenAndPrintsWhatIsKept) {
  Kept kept;
  kept.settings.set_partition(v1::PARTITION_REF2VA);
  server_.on_set = [&](const auto& request, auto& response) { return kept.Set(request, response); };
  ASSERT_TRUE(Run({"adapters", "set", "style", "--alpha", "8", "--qkv-layout", "interleaved"}).ok());
  ASSERT_EQ(kept.requests.size(), 1u);
  EXPECT_EQ(kept.requests[0].name(), "style");
  EXPECT_FALSE(kept.requests[0].reset());
  v1::AdapterSettings given;
  given.set_alpha(8);
  given.set_qkv_layout(v1::QKV_LAYOUT_INTERLEAVED);
  EXPECT_EQ(kept.requests[0].settings().SerializeAsString(), given.SerializeAsString());
  EXPECT_EQ(out_.str(), "style  sha256:0123  kept: alpha=8 qkv=interleaved partition=ref2va\n");
}

TEST_F(AdaptersCommandTest, ResetForgetsAll) {
  Kept kept;
  kept.settings.set_alpha(8);
  server_.on_set = [&](const auto& request, auto& response) { return kept.Set(request, response); };
  ASSERT_TRUE(Run({"adapters", "set", "style", "--reset"}).ok());
  EXPECT_EQ(kept.requests.size(), 1u);
  EXPECT_THAT(out_.str(), HasSubstr("nothing is kept"));
}

TEST_F(AdaptersCommandTest, AutoForgetsOneSettingAndKeepsTheOthers) {
  Kept kept;
  kept.settings.set_alpha(8);
  kept.settings.set_qkv_layout(v1::QKV_LAYOUT_STACKED);
  kept.settings.set_partition(v1::PARTITION_REF2VA);
  kept.settings.set_peft_config("{}");
  server_.on_set = [&](const auto& request, auto& response) { return kept.Set(request, response); };
  ASSERT_TRUE(Run({"adapters", "set", "style", "--qkv-layout", "auto", "--fc1-order", "up-first"}).ok());
  ASSERT_EQ(kept.requests.size(), 2u);
  EXPECT_EQ(kept.requests[1].name(), "sha256:0123");  // The content that was asked about.
  EXPECT_THAT(kept.requests[1].settings().peft_config(), IsEmpty());
  EXPECT_EQ(SettingsText(kept.settings), "alpha=8 fc1=up-first partition=ref2va");
}

TEST_F(AdaptersCommandTest, ListShowsSettingsAndWhereANameComesFrom) {
  server_.on_list = [](const v1::ListAdaptersRequest&, v1::ListAdaptersResponse& response) {
    response.add_adapters()->set_name("plain");
    v1::Adapter& style = *response.add_adapters();
    style.set_name("style");
    style.set_uploaded(true);
    *style.mutable_settings() = GoodReport().settings();
    return absl::OkStatus();
  };
  ASSERT_TRUE(Run({"adapters", "list"}).ok());
  EXPECT_THAT(out_.str(), AllOf(HasSubstr("directory  -\n"), HasSubstr("upload     alpha=8 fc1=gate-first\n")));
}

}  // namespace
}  // namespace h3::ctl
