// The commands of h3ctl against a server in this process.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "client/cli/app.h"
#include "client/cli/evaluate_command.h"
#include "client/cli/exit_code.h"
#include "client/cli/generate_command.h"
#include "client/cli/generate_view.h"
#include "client/cli/operations_command.h"
#include "tests/testing/golden.h"
#include "tests/unit/client/command_test.h"

namespace h3::ctl {
namespace {

namespace fs = std::filesystem;
using ::h3::testing::AnnounceVector;
using ::h3::testing::EvaluateStream;
using ::h3::testing::GenerateStream;
using ::h3::testing::GoldenPath;
using ::h3::testing::ServeGoodRun;
using ::h3::testing::WriteChunks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Json = nlohmann::json;

const std::string kVideo("\x00\x00\x80\x3f\x00\x00\x00\x40", 8), kAudio("\x00\x00\x40\x40", 4);

class CommandsTest : public testing::CommandTest {};

TEST_F(CommandsTest, GenerateWritesTheResultAndOneJsonObjectPerEvent) {
  server_.on_generate = [](grpc::ServerContext&, GenerateStream& stream) { return ServeGoodRun(stream, kVideo, kAudio); };
  const std::string request = GoldenPath("inputs/t2va.safetensors"), output = Output();
  const absl::Status status =
      Run({"generate", "--request", request.c_str(), "--evaluations", "1", "--seed", "7", "--output", output.c_str()});
  ASSERT_TRUE(status.ok()) << status;
  const auto tensors = testing::ReadTensors(output);
  EXPECT_EQ(tensors.at("video").data, kVideo);
  EXPECT_EQ(tensors.at("audio").data, kAudio);
  std::vector<std::string> events;
  for (const Json& line : Lines()) events.push_back(line["event"]);
  EXPECT_THAT(events, ElementsAre("accepted", "progress", "result", "completed"));
  EXPECT_EQ(Lines()[1]["phase"], "denoise");
  EXPECT_EQ(Lines()[1]["steps"], 1);
  EXPECT_EQ(Lines()[3]["output"], output);
}

TEST_F(CommandsTest, GenerateSendsWhatTheFlagsAndTheFileSay) {
  v1::GenerateHeader header;
  server_.on_generate = [&](grpc::ServerContext&, GenerateStream& stream) {
    v1::GenerateRequest request;
    stream.Read(&request);
    header = request.header();
    return ServeGoodRun(stream, kVideo, kAudio);
  };
  const std::string request = GoldenPath("inputs/fl2va_first_last.safetensors"), output = Output();
  const absl::Status status = Run({"generate", "--request", request.c_str(), "--lora", "turbo=1", "--lora",
                                   "style=-0.5,audio=0", "--noise-from-request", "--sigmas", "1,0.5,0", "--video-shift", "7",
                                   "--priority", "high", "--request-id", "mine", "--output", output.c_str()});
  ASSERT_TRUE(status.ok()) << status;
  ASSERT_EQ(header.stack_size(), 2);
  EXPECT_EQ(header.stack(0).adapter(), "turbo");
  EXPECT_EQ(header.stack(1).strength(), -0.5);
  EXPECT_TRUE(header.sampling().noise_from_request());
  EXPECT_THAT(header.sampling().video_sigmas(), ElementsAre(1, 0.5, 0));
  EXPECT_EQ(header.sampling().video_shift(), 7);  // The flag's.
  EXPECT_EQ(header.sampling().audio_shift(), 3);  // The file's.
  EXPECT_EQ(header.priority(), v1::PRIORITY_HIGH);
  EXPECT_EQ(header.request_id(), "mine");
  std::vector<std::string> names;
  for (const v1::TensorSpec& spec : header.tensors()) names.push_back(spec.name());
  EXPECT_THAT(names, ElementsAre("condition_video.0", "condition_video.1", "text", "text_token_tags", "target_audio_rows",
                                 "target_video"));
}

TEST_F(CommandsTest, WithASeedTheNoiseOfTheFileIsNotSent) {
  v1::GenerateHeader header;
  server_.on_generate = [&](grpc::ServerContext&, GenerateStream& stream) {
    v1::GenerateRequest request;
    stream.Read(&request);
    header = request.header();
    return ServeGoodRun(stream, kVideo, kAudio);
  };
  const std::string request = GoldenPath("inputs/t2va.safetensors"), output = Output();
  ASSERT_TRUE(Run({"generate", "--request", request.c_str(), "--evaluations", "4", "--schedule", "normal", "--seed", "1234",
                   "--output", output.c_str()})
                  .ok());
  EXPECT_EQ(header.sampling().seed(), 1234u);
  EXPECT_EQ(header.sampling().evaluations(), 4u);
  EXPECT_EQ(header.sampling().schedule(), v1::SCHEDULE_NORMAL);
  EXPECT_EQ(header.tensors_size(), 2);  // text, text_token_tags.
}

TEST_F(CommandsTest, ARefusedRunWritesNoFile) {
  server_.on_generate = [](grpc::ServerContext&, GenerateStream&) {
    return Refuse(absl::StatusCode::kResourceExhausted, "QUEUE_FULL", "the queue is full", {{"retry_seconds", "3"}});
  };
  const std::string request = GoldenPath("inputs/t2va.safetensors"), output = Output();
  const absl::Status status =
      Run({"generate", "--request", request.c_str(), "--evaluations", "1", "--seed", "7", "--output", output.c_str()});
  EXPECT_EQ(ExitCode(status), 4);
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");
  EXPECT_TRUE(fs::is_empty(folder_));
}

TEST_F(CommandsTest, AnOutputThatCannotBeWrittenIsWrongUsageBeforeTheServerIsAsked) {
  const std::string request = GoldenPath("inputs/t2va.safetensors");
  const std::vector<std::pair<std::string, std::string>> outputs = {
      {"/nonexistent/out.safetensors", "there is no folder /nonexistent"},
      {folder_.string(), "that is a folder"},
      {"", "the name of a file"}};
  for (const char* command : {"generate", "evaluate"}) {
    for (const auto& [output, message] : outputs) {
      std::vector<const char*> args = {command, "--request", request.c_str(), "--output", output.c_str()};
      if (std::string(command) == "generate") args.insert(args.end(), {"--evaluations", "1", "--seed", "7"});
      const absl::Status status = Run(args);
      EXPECT_EQ(ExitCode(status), 2) << status;  // And not the fake's UNIMPLEMENTED.
      EXPECT_EQ(ReasonOf(status), "USAGE") << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(message));
    }
  }
}

TEST_F(CommandsTest, AResultOnStandardOutputHasItAloneAndTheEventsGoToStandardError) {
  server_.on_generate = [](grpc::ServerContext&, GenerateStream& stream) { return ServeGoodRun(stream, kVideo, kAudio); };
  const std::string request = GoldenPath("inputs/t2va.safetensors"), copy = Output();
  ::testing::internal::CaptureStdout();
  const absl::Status status =
      Run({"generate", "--request", request.c_str(), "--evaluations", "1", "--seed", "7", "--output", "-"});
  const std::string bytes = ::testing::internal::GetCapturedStdout();
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(out_.str(), "");
  EXPECT_THAT(err_.str(), HasSubstr(R"("event":"completed")"));
  std::ofstream(copy, std::ios::binary) << bytes;
  EXPECT_EQ(testing::ReadTensors(copy).at("video").data, kVideo);
  EXPECT_EQ(testing::ReadTensors(copy).at("audio").data, kAudio);
}

TEST_F(CommandsTest, EvaluateAsksForTheFilesPointAndWritesTheVelocities) {
  v1::EvaluateHeader header;
  v1::Evaluation evaluation;
  server_.on_evaluate = [&](grpc::ServerContext&, EvaluateStream& stream) -> absl::Status {
    v1::EvaluateRequest request;
    v1::EvaluateResponse response;
    stream.Read(&request);
    header = request.header();
    response.mutable_accepted();
    stream.Write(response);
    auto& ready = *response.mutable_ready()->add_stack();
    ready.set_adapter("style");
    ready.add_auto_strength_ratios()->set_ratio(0.5);
    stream.Write(response);
    while (stream.Read(&request)) {
      if (request.has_evaluation()) evaluation = request.evaluation();
      if (!request.has_chunk() || request.chunk().tensor() != 1 || evaluation.tensors_size() == 0) continue;
      AnnounceVector("video", kVideo, response.mutable_result()->mutable_tensors());  // The last chunk has come.
      AnnounceVector("audio", kAudio, response.mutable_result()->mutable_tensors());
      stream.Write(response);
      WriteChunks<v1::EvaluateResponse>(stream, {kVideo, kAudio});
    }
    return absl::OkStatus();
  };
  const std::string request = GoldenPath("inputs/t2va.safetensors"), output = Output();
  const absl::Status status =
      Run({"evaluate", "--request", request.c_str(), "--lora", "style=0.8", "--output", output.c_str()});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(header.include_condition_rows());
  EXPECT_EQ(header.stack(0).adapter(), "style");
  EXPECT_EQ(header.tensors_size(), 2);
  EXPECT_EQ(evaluation.base_sigma(), 0.62);
  EXPECT_EQ(evaluation.tensors(0).name(), "target_audio_rows");
  EXPECT_EQ(evaluation.tensors(1).name(), "target_video");
  EXPECT_EQ(testing::ReadTensors(output).at("video").data, kVideo);
  std::vector<std::string> events;
  for (const Json& line : Lines()) events.push_back(line["event"]);
  EXPECT_THAT(events, ElementsAre("accepted", "ready", "completed"));
  EXPECT_EQ(Lines()[1]["stack"][0]["auto_strength_ratios"][0]["ratio"], 0.5);
}

TEST_F(CommandsTest, APresetStandsForTheStack) {
  v1::GenerateHeader header;
  server_.on_generate = [&](grpc::ServerContext&, GenerateStream& stream) {
    v1::GenerateRequest request;
    stream.Read(&request);
    header = request.header();
    return ServeGoodRun(stream, kVideo, kAudio);
  };
  const std::string request = GoldenPath("inputs/t2va.safetensors"), output = Output();
  const absl::Status status = Run({"generate", "--request", request.c_str(), "--preset", "anime", "--evaluations", "1",
                                   "--seed", "7", "--output", output.c_str()});
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(header.preset(), "anime");
  EXPECT_EQ(header.stack_size(), 0);

  v1::EvaluateHeader evaluate;
  server_.on_evaluate = [&](grpc::ServerContext&, EvaluateStream& stream) {
    v1::EvaluateRequest request;
    stream.Read(&request);
    evaluate = request.header();
    return RefuseArgument("ENOUGH", "seen");
  };
  EXPECT_EQ(ReasonOf(Run({"evaluate", "--request", request.c_str(), "--preset", "anime", "--output", output.c_str()})),
            "ENOUGH");
  EXPECT_EQ(evaluate.preset(), "anime");
}

TEST_F(CommandsTest, EvaluateTakesItsPointFromTheFlagsBeforeTheFile) {
  const auto file = RequestFile::Open(GoldenPath("inputs/t2va.safetensors"));
  ASSERT_TRUE(file.ok());
  EXPECT_EQ(MakeEvaluation({.sigma = 0.9}, *file)->sigma(), 0.9);
  const auto timesteps = MakeEvaluation({.video_t = 0.1, .audio_t = 0.2}, *file);
  EXPECT_EQ(timesteps->timesteps().video(), 0.1);
  EXPECT_EQ(timesteps->timesteps().audio(), 0.2);
  EXPECT_EQ(ExitCode(MakeEvaluation({.video_t = 0.1}, *file).status()), 2);
  EXPECT_EQ(ExitCode(MakeEvaluation({.sigma = 0.9, .video_t = 0.1, .audio_t = 0.2}, *file).status()), 2);
}

TEST_F(CommandsTest, WatchingMemoryPrintsOneJsonObjectALineUntilInterrupted) {
  server_.on_watch = [](grpc::ServerContext&, grpc::ServerWriter<v1::WatchMemoryResponse>& writer) {
    v1::WatchMemoryResponse response;
    v1::DeviceMemory& device = *response.add_devices();
    device.set_device("cpu");
    device.set_total_bytes(uint64_t{1} << 53);
    device.mutable_owners()->set_base_weights(5);
    while (writer.Write(response)) {
    }
    return absl::CancelledError("client gone");
  };
  class InterruptAfterOneLine final : public std::stringbuf {
   public:
    explicit InterruptAfterOneLine(client::Canceller& interrupt) : interrupt_(interrupt) {}
    int sync() override {
      interrupt_.Cancel();
      return 0;
    }

   private:
    client::Canceller& interrupt_;
  } buffer(interrupt_);
  std::ostream out(&buffer);
  Context context = {.client = *client_, .interrupt = interrupt_, .out = out, .err = err_};
  EXPECT_TRUE(RunMemory(/*watch=*/true, context).ok());  // Ctrl-C is how a watch ends.
  const std::string text = buffer.str();
  const Json first = Json::parse(text.substr(0, text.find('\n')));
  const Json& device = first["devices"][0];
  EXPECT_EQ(device["device"], "cpu");
  EXPECT_EQ(device["total_bytes"], uint64_t{1} << 53);
  EXPECT_EQ(device["owners"]["base_weights"], 5);
  EXPECT_EQ(device["owners"]["unattributed"], 0);
  EXPECT_EQ(device["adapters"], Json::array());
  EXPECT_EQ(device["base_mutations"], 0);
}

TEST(CommandLineTest, MistakesAreWrongUsage) {
  const auto usage = [](std::vector<const char*> args) {
    args.insert(args.begin(), "h3ctl");
    return ExitCode(ParseCommandLine(static_cast<int>(args.size()), args.data()).status());
  };
  EXPECT_EQ(usage({}), 2);
  EXPECT_EQ(usage({"frobnicate"}), 2);
  EXPECT_EQ(usage({"generate", "--request", "r"}), 2);
  EXPECT_EQ(usage({"generate", "--request", "r", "--output", "o", "--evaluations", "many"}), 2);
  EXPECT_EQ(usage({"generate", "--request", "r", "--output", "o", "--evaluations", "1", "--seed", "1", "--noise-from-request"}),
            2);
  EXPECT_EQ(usage({"generate", "--request", "r", "--output", "o", "--evaluations", "1", "--schedule", "cosine"}), 2);
  EXPECT_EQ(usage({"adapters"}), 2);
  EXPECT_EQ(usage({"adapters", "load"}), 2);
  for (const char* command : {"generate", "evaluate"}) {
    EXPECT_EQ(usage({command, "--request", "r", "--output", "o", "--preset", "anime"}), 0);
    EXPECT_EQ(usage({command, "--request", "r", "--output", "o", "--preset", "anime", "--lora", "style=1"}), 2) << command;
  }
  EXPECT_EQ(usage({"adapters", "check"}), 2);
  EXPECT_EQ(usage({"adapters", "upload", "style"}), 2);
  EXPECT_EQ(usage({"adapters", "set", "style", "--qkv-layout", "mixed"}), 2);
  EXPECT_EQ(usage({"presets"}), 2);
  EXPECT_EQ(usage({"presets", "set", "anime"}), 2);
  EXPECT_EQ(usage({"presets", "set", "anime", "--lora", "style=1", "--expected-revision", "-1"}), 2);
  EXPECT_EQ(usage({"status"}), 0);
}

TEST(CommandLineTest, TheServerComesFromTheFlagElseTheEnvironmentElseTheDefault) {
  const auto server = [](std::vector<const char*> args) {
    args.insert(args.begin(), "h3ctl");
    return ParseCommandLine(static_cast<int>(args.size()), args.data())->server;
  };
  EXPECT_EQ(server({"status"}), "127.0.0.1:50051");
  setenv("H3_SERVER", "unix:/run/h3.sock", 1);
  EXPECT_EQ(server({"status"}), "unix:/run/h3.sock");
  EXPECT_EQ(server({"status", "--server", "host:1"}), "host:1");
  unsetenv("H3_SERVER");
}

TEST(ProgressLineTest, ShowsQueueThenStepsAndTimeLeft) {
  v1::Progress progress;
  progress.set_phase(v1::PHASE_QUEUED);
  progress.set_queue_position(2);
  progress.set_eta_seconds(95);
  EXPECT_EQ(ProgressLine(progress), "queued, 2 before this one  1:35 left");
  progress.set_phase(v1::PHASE_DENOISE);
  progress.set_step(3);
  progress.set_steps(8);
  EXPECT_EQ(ProgressLine(progress), "[===========>                  ]  3/8  37 %  1:35 left");
  progress.set_step(8);
  progress.set_eta_seconds(0);
  EXPECT_EQ(ProgressLine(progress), "[==============================]  8/8  100 %");
  progress.set_step(9);  // A server's mistake must not break the line.
  EXPECT_THAT(ProgressLine(progress), HasSubstr("8/8"));
}

TEST(RatiosTextTest, ShowsLeastMedianAndMostOfEachLevelledAdapter) {
  v1::Completed completed;
  completed.add_stack()->set_adapter("turbo");
  v1::ResolvedAdapter& style = *completed.add_stack();
  style.set_adapter("style");
  for (const double ratio : {1.5, 0.3, 0.98, 0.9, 1.2}) style.add_auto_strength_ratios()->set_ratio(ratio);
  EXPECT_EQ(RatiosText(completed.stack()), "auto-strength of style: x 0.3 / 0.98 / 1.5 (least, median, most of 5 modules)\n");
  style.clear_auto_strength_ratios();
  EXPECT_EQ(RatiosText(completed.stack()), "");
}

TEST(MemoryTextTest, ShowsEveryOwnerAndTheirSum) {
  v1::DeviceMemory device;
  device.set_used_bytes(1234567);
  device.mutable_owners()->set_adapters(1234567);
  device.set_avoided_resident_bytes(uint64_t{38220} << 20);
  v1::AdapterMemory& adapter = *device.add_adapters();
  adapter.set_name("style");
  adapter.set_bytes(1234567);
  const std::string text = MemoryText(device);
  for (const char* owner : {"base_weights", "adapters", "materialized", "caches", "activations", "workspace", "staging",
                            "runtime_context", "allocator_cache", "unattributed", "= used", "style", "38220.0 MiB"}) {
    EXPECT_THAT(text, HasSubstr(owner));
  }
  EXPECT_THAT(text, HasSubstr("1,234,567"));
}

}  // namespace
}  // namespace h3::ctl
