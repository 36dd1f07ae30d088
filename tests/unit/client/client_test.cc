#include "client/client.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "tests/unit/client/fake_server.h"

namespace h3::client {
namespace {

using ::h3::testing::AnnounceVector;
using ::h3::testing::EvaluateStream;
using ::h3::testing::FakeServer;
using ::h3::testing::GenerateStream;
using ::h3::testing::WriteChunks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

// Bytes that differ from place to place.
std::string Pattern(size_t size, char seed) {
  std::string bytes(size, '\0');
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<char>(static_cast<size_t>(seed) + i * 31 + i / 4096);
  return bytes;
}

TensorView F32(std::string name, const std::string& data) {
  return {.name = std::move(name), .dtype = v1::DTYPE_F32, .shape = {static_cast<int64_t>(data.size() / 4)}, .data = data};
}

TEST(ClientTest, GenerateSendsAllBytesAndReturnsEventsInOrderAndTheResult) {
  FakeServer server;
  std::string text_received, noise_received;
  v1::GenerateHeader header_received;
  const std::string video = Pattern(5 << 19, 'v'), audio = Pattern(64, 'a');  // 2.5 MiB: three chunks.
  server.on_generate = [&](grpc::ServerContext&, GenerateStream& stream) -> absl::Status {
    v1::GenerateRequest request;
    stream.Read(&request);
    header_received = request.header();
    TensorAssembler assembler(header_received.tensors());
    while (stream.Read(&request)) {
      if (absl::Status added = assembler.Add(request.chunk()); !added.ok()) return added;
    }
    if (absl::Status complete = assembler.CheckComplete(); !complete.ok()) return complete;
    const std::vector<std::string> data = assembler.Take();
    text_received = data[0];
    noise_received = data[1];
    v1::GenerateResponse response;
    response.mutable_accepted()->set_request_id("r1");
    stream.Write(response);
    for (uint32_t step = 1; step <= 2; ++step) {
      response.mutable_progress()->set_step(step);
      stream.Write(response);
    }
    AnnounceVector("video", video, response.mutable_result()->mutable_tensors());
    AnnounceVector("audio", audio, response.mutable_result()->mutable_tensors());
    stream.Write(response);
    WriteChunks<v1::GenerateResponse>(stream, {video, audio});
    response.mutable_completed()->set_peak_bytes(77);
    stream.Write(response);
    return absl::OkStatus();
  };
  const std::string text = Pattern((1 << 20) + 4, 't'), noise = Pattern(3 << 20, 'n');
  v1::GenerateHeader header;
  header.mutable_sampling()->set_seed(7);
  std::vector<std::string> events;
  const auto result = server.Connect()->Generate(
      header, {F32("text", text), F32("target_video", noise)},
      {.accepted = [&](const v1::Accepted& accepted) { events.push_back(accepted.request_id()); },
       .progress = [&](const v1::Progress& progress) { events.push_back(absl::StrCat("step ", progress.step())); },
       .result = [&](const v1::ResultHeader& result) { events.push_back(absl::StrCat(result.tensors_size(), " tensors")); }});

  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(header_received.sampling().seed(), 7u);
  EXPECT_EQ(header_received.tensors(0).name(), "text");
  EXPECT_EQ(text_received, text);
  EXPECT_EQ(noise_received, noise);
  EXPECT_THAT(events, ElementsAre("r1", "step 1", "step 2", "2 tensors"));
  ASSERT_EQ(result->tensors.size(), 2u);
  EXPECT_EQ(result->tensors[0].data, video);
  EXPECT_EQ(result->tensors[1].name, "audio");
  EXPECT_EQ(result->tensors[1].data, audio);
  EXPECT_THAT(result->tensors[1].shape, ElementsAre(16));
  EXPECT_EQ(result->completed.peak_bytes(), 77u);
}

TEST(ClientTest, ARefusalBeforeTheTensorsKeepsItsCodeReasonAndDetails) {
  FakeServer server;
  server.on_generate = [](grpc::ServerContext&, GenerateStream& stream) {
    v1::GenerateRequest request;
    stream.Read(&request);
    return RefuseArgument("BAD_STRENGTH", "stack[1] (style): strength 1e30 is outside -100 .. 100", {{"field", "stack[1]"}});
  };
  const std::string large(64 << 20, 'x');  // More than any window: the client must notice that nobody reads.
  const auto result = server.Connect()->Generate({}, {F32("text", large)});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ReasonOf(result.status()), "BAD_STRENGTH");
  EXPECT_THAT(DetailsOf(result.status()), ElementsAre(Pair("field", "stack[1]")));
  EXPECT_EQ(result.status().message(), "stack[1] (style): strength 1e30 is outside -100 .. 100");
}

// Progress without end, until the client is gone.
absl::Status EndlessProgress(GenerateStream& stream, absl::Notification& gone) {
  v1::GenerateResponse response;
  response.mutable_accepted();
  while (stream.Write(response)) response.mutable_progress()->set_steps(100);
  // A write that fails says that the client has left; IsCancelled may tell it later.
  gone.Notify();
  return absl::CancelledError("client gone");
}

TEST(ClientTest, CancelFromAnotherThreadEndsTheRunOnBothSides) {
  FakeServer server;
  absl::Notification running, gone;
  server.on_generate = [&](grpc::ServerContext&, GenerateStream& stream) {
    return EndlessProgress(stream, gone);
  };
  Canceller canceller;
  std::thread interrupter([&] {
    running.WaitForNotification();
    canceller.Cancel();
  });
  const auto result = server.Connect()->Generate({}, {},
                                                 {.progress =
                                                      [&](const v1::Progress&) {
                                                        if (!running.HasBeenNotified()) running.Notify();
                                                      }},
                                                 {.cancel = &canceller});
  interrupter.join();
  EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(ReasonOf(result.status()), "CANCELLED");
  EXPECT_TRUE(gone.WaitForNotificationWithTimeout(absl::Seconds(10)));
}

TEST(ClientTest, ACallThatBeginsAfterCancelEndsAtOnce) {
  FakeServer server;
  server.on_unload = [](const auto&, auto&) { return absl::OkStatus(); };
  Canceller canceller;
  canceller.Cancel();
  const auto client = server.Connect();
  EXPECT_EQ(client->UnloadAdapter("style", {.cancel = &canceller}).status().code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(client->UnloadAdapter("style").ok());
}

TEST(ClientTest, TheTimeoutReachesTheServerAndEndsTheRun) {
  FakeServer server;
  absl::Notification gone;
  server.on_generate = [&](grpc::ServerContext&, GenerateStream& stream) {
    return EndlessProgress(stream, gone);
  };
  const auto result = server.Connect()->Generate({}, {}, {}, {.timeout = absl::Milliseconds(50)});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ReasonOf(result.status()), "DEADLINE_EXCEEDED");
  EXPECT_TRUE(gone.WaitForNotificationWithTimeout(absl::Seconds(10)));
}

TEST(ClientTest, AServerThatIsNotThereIsUnreachableByName) {
  Client client("unix:/nonexistent/h3.sock");
  const absl::Status status = client.GetStatus().status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), "UNREACHABLE");
  EXPECT_THAT(std::string(status.message()), HasSubstr("unix:/nonexistent/h3.sock"));
}

TEST(ClientTest, WhereNothingListensTheMessageSaysHowToStartAServerOrNameAnother) {
  for (const char* address : {"127.0.0.1:1", "unix:/nonexistent/h3.sock"}) {
    const absl::Status status = Client(address).GetStatus().status();
    EXPECT_EQ(ReasonOf(status), "UNREACHABLE");
    EXPECT_EQ(DetailsOf(status)["server"], address);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat("nothing listens at ", address, "; start a server there (h3-scheduler --model PATH")));
    EXPECT_THAT(std::string(status.message()), HasSubstr("--server or H3_SERVER"));
  }
}

// Streams that no correct server sends.
struct BrokenStream {
  std::string name;
  std::vector<v1::GenerateResponse> events;
};

std::vector<BrokenStream> BrokenStreams() {
  v1::GenerateResponse accepted, progress, result, chunk, long_chunk, completed;
  accepted.mutable_accepted();
  progress.mutable_progress();
  AnnounceVector("video", "12345678", result.mutable_result()->mutable_tensors());
  chunk.mutable_chunk()->set_data("1234");
  long_chunk.mutable_chunk()->set_data("1234567890");
  completed.mutable_completed();
  v1::GenerateResponse lying = result;
  lying.mutable_result()->mutable_tensors(0)->set_bytes(uint64_t{1} << 60);
  return {{"ProgressBeforeAccepted", {progress}},
          {"AcceptedTwice", {accepted, accepted}},
          {"ChunkBeforeResult", {accepted, chunk}},
          {"ResultTwice", {accepted, result, result}},
          {"BytesThatWereNotAnnounced", {accepted, result, long_chunk}},
          {"BytesMissing", {accepted, result, chunk, completed}},
          {"SizeThatIsNotTheShapes", {accepted, lying}},
          {"EndBeforeCompleted", {accepted, result, chunk}},
          {"Nothing", {}}};
}

class BrokenStreamTest : public ::testing::TestWithParam<BrokenStream> {};

TEST_P(BrokenStreamTest, IsReportedAsTheServersFault) {
  FakeServer server;
  server.on_generate = [](grpc::ServerContext&, GenerateStream& stream) {
    for (const v1::GenerateResponse& event : GetParam().events) stream.Write(event);
    return absl::OkStatus();
  };
  const auto result = server.Connect()->Generate({}, {});
  EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal) << result.status();
  EXPECT_EQ(ReasonOf(result.status()), "PROTOCOL");
}

INSTANTIATE_TEST_SUITE_P(All, BrokenStreamTest, ::testing::ValuesIn(BrokenStreams()),
                         [](const auto& info) { return info.param.name; });

// Answers each evaluation with its own rows and point; refuses sigma 2.
absl::Status EchoSession(EvaluateStream& stream) {
  v1::EvaluateRequest request;
  v1::EvaluateResponse response;
  stream.Read(&request);
  TensorAssembler conditions(request.header().tensors());
  while (!conditions.complete() && stream.Read(&request)) {
    if (absl::Status added = conditions.Add(request.chunk()); !added.ok()) return added;
  }
  response.mutable_accepted()->set_request_id("s1");
  stream.Write(response);
  response.mutable_ready()->set_prepare_seconds(0.25);
  stream.Write(response);
  for (uint32_t index = 0; stream.Read(&request); ++index) {
    const v1::Evaluation evaluation = request.evaluation();
    if (evaluation.sigma() == 2) return RefuseArgument("BAD_REQUEST", "sigma 2 is not in [0, 1]", {{"field", "sigma"}});
    TensorAssembler rows(evaluation.tensors());
    while (!rows.complete() && stream.Read(&request)) {
      if (absl::Status added = rows.Add(request.chunk()); !added.ok()) return added;
    }
    const std::vector<std::string> data = rows.Take();
    response.Clear();
    response.mutable_result()->set_index(index);
    response.mutable_result()->mutable_timesteps()->set_video(1 - evaluation.sigma());
    for (size_t i = 0; i < data.size(); ++i)
      AnnounceVector(i == 0 ? "video" : "audio", data[i], response.mutable_result()->mutable_tensors());
    stream.Write(response);
    WriteChunks<v1::EvaluateResponse>(stream, data);
  }
  return absl::OkStatus();
}

v1::Evaluation AtSigma(double sigma) {
  v1::Evaluation evaluation;
  evaluation.set_sigma(sigma);
  return evaluation;
}

TEST(SessionTest, EvaluationsAreAnsweredOneByOneOverOneStream) {
  FakeServer server;
  server.on_evaluate = [](grpc::ServerContext&, EvaluateStream& stream) { return EchoSession(stream); };
  const auto client = server.Connect();
  const std::string text = Pattern(3 << 20, 't');
  const auto session = client->OpenSession({}, {F32("text", text)});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ((*session)->accepted().request_id(), "s1");
  EXPECT_EQ((*session)->ready().prepare_seconds(), 0.25);
  for (uint32_t i = 0; i < 3; ++i) {
    const std::string video = Pattern((1 << 20) + 8, static_cast<char>(i)), audio = Pattern(16, static_cast<char>(i + 1));
    const auto output = (*session)->Evaluate(AtSigma(0.25), {F32("target_video_rows", video), F32("target_audio_rows", audio)});
    ASSERT_TRUE(output.ok()) << output.status();
    EXPECT_EQ(output->result.index(), i);
    EXPECT_EQ(output->result.timesteps().video(), 0.75);
    ASSERT_EQ(output->tensors.size(), 2u);
    EXPECT_EQ(output->tensors[0].data, video);
    EXPECT_EQ(output->tensors[1].data, audio);
  }
  EXPECT_TRUE((*session)->Close().ok());
  EXPECT_EQ((*session)->Evaluate(AtSigma(0.25), {}).status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(SessionTest, ARefusedEvaluationEndsTheSessionWithItsReason) {
  FakeServer server;
  server.on_evaluate = [](grpc::ServerContext&, EvaluateStream& stream) { return EchoSession(stream); };
  const auto client = server.Connect();
  const auto session = client->OpenSession({}, {});
  ASSERT_TRUE(session.ok()) << session.status();
  EXPECT_EQ(ReasonOf((*session)->Evaluate(AtSigma(2), {}).status()), "BAD_REQUEST");
  const absl::Status again = (*session)->Evaluate(AtSigma(0.5), {}).status();
  EXPECT_EQ(ReasonOf(again), "BAD_REQUEST");
  EXPECT_THAT(DetailsOf(again), ElementsAre(Pair("field", "sigma")));
}

TEST(SessionTest, ARefusedStackFailsToOpenWithItsReason) {
  FakeServer server;
  server.on_evaluate = [](grpc::ServerContext&, EvaluateStream&) {
    return Refuse(absl::StatusCode::kNotFound, "UNKNOWN_ADAPTER", "no adapter style", {{"adapter", "style"}});
  };
  const auto session = server.Connect()->OpenSession({}, {});
  EXPECT_EQ(session.status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(session.status()), "UNKNOWN_ADAPTER");
}

TEST(SessionTest, DroppingASessionTellsTheServer) {
  FakeServer server;
  absl::Notification gone;
  server.on_evaluate = [&](grpc::ServerContext& context, EvaluateStream& stream) {
    const absl::Status status = EchoSession(stream);
    if (context.IsCancelled()) gone.Notify();
    return status;
  };
  const auto client = server.Connect();
  { ASSERT_TRUE(client->OpenSession({}, {}).ok()); }
  EXPECT_TRUE(gone.WaitForNotificationWithTimeout(absl::Seconds(10)));
}

TEST(ClientTest, WatchMemoryShowsEachMessageUntilToldToStop) {
  FakeServer server;
  server.on_watch = [](grpc::ServerContext&, grpc::ServerWriter<v1::WatchMemoryResponse>& writer) {
    v1::WatchMemoryResponse response;
    v1::DeviceMemory& device = *response.add_devices();
    do {
      device.set_used_bytes(device.used_bytes() + 1);
    } while (writer.Write(response));
    return absl::CancelledError("client gone");
  };
  std::vector<uint64_t> used;
  const absl::Status status = server.Connect()->WatchMemory(absl::Seconds(1), [&](const v1::WatchMemoryResponse& response) {
    used.push_back(response.devices(0).used_bytes());
    return used.size() < 3;
  });
  EXPECT_TRUE(status.ok()) << status;
  EXPECT_THAT(used, ElementsAre(1, 2, 3));
}

}  // namespace
}  // namespace h3::client
