#include <cmath>
#include <functional>

#include "tests/unit/rpc/worker_fixture.h"

namespace h3 {
namespace {

using ::testing::HasSubstr;

class WorkerGenerateTest : public WorkerFixture {};

class WorkerLargeResultTest : public WorkerFixture {
 protected:
  static constexpr int64_t kBytes = (20 << 20) + 12;
  WorkerLargeResultTest() : WorkerFixture(kBytes) {}
};

TEST_F(WorkerGenerateTest, TellsEventsInTheDocumentedOrder) {
  const auto context = NewContext();
  auto stream = stub->Generate(context.get());
  v1::GenerateRequest header = GenerateHeader(3);
  v1::StackEntry& entry = *header.mutable_header()->add_stack();
  entry.set_adapter("style");
  entry.set_strength(-0.5);
  stream->Write(header);
  SendChunks(*stream, {std::string(8, 't')});
  stream->WritesDone();
  const auto events = ReadAll(*stream);
  ASSERT_TRUE(End(*stream).ok());

  std::string order;
  std::vector<uint32_t> steps;
  for (const v1::GenerateResponse& event : events) {
    order += event.has_accepted() ? 'A' : event.has_progress() ? 'p' : event.has_result() ? 'R' : event.has_chunk() ? 'c' : 'C';
    if (event.has_progress() && event.progress().phase() == v1::PHASE_DENOISE) {
      steps.push_back(event.progress().step());
      EXPECT_EQ(event.progress().steps(), 3u);
    }
  }
  EXPECT_EQ(order, "pAppppRccC");
  EXPECT_THAT(steps, ::testing::ElementsAre(0, 1, 2, 3));
  const v1::Accepted& accepted = events[1].accepted();
  EXPECT_EQ(accepted.video_sigmas_size(), 4);
  EXPECT_EQ(accepted.audio_sigmas_size(), 4);
  EXPECT_EQ(accepted.base_fingerprint(), "fingerprint-of-fake");
  ASSERT_EQ(accepted.stack_size(), 1);
  EXPECT_EQ(accepted.stack(0).digest(), "digest-of-style");
  EXPECT_EQ(accepted.stack(0).strength(), -0.5);
  const v1::Completed& completed = events.back().completed();
  EXPECT_EQ(completed.step_seconds_size(), 3);
  EXPECT_EQ(completed.peak_bytes(), static_cast<uint64_t>(MiB(3).value()));
  EXPECT_EQ(completed.avoided_resident_bytes(), static_cast<uint64_t>(MiB(2).value()));
  EXPECT_EQ(engine.last_generation()->seed, 7u);
  EXPECT_EQ(Metric("h3_denoise_steps_total", "task", "outcome").at("t2va ok"), 3);
  EXPECT_EQ(Metric("h3_denoise_step_seconds", "size", "adapters").at("xs 1"), 3);
  EXPECT_EQ(Metric("h3_lora_strength").at(""), 1);
  EXPECT_EQ(Metric("h3_lora_effective_rank").at(""), 1);
  EXPECT_EQ(Requests("OK"), 1);
}

TEST_F(WorkerGenerateTest, PutsChunkedTensorsTogether) {
  const auto context = NewContext();
  auto stream = stub->Generate(context.get());
  std::string text(static_cast<size_t>(2 * kChunkBytes + 400), '\0');
  for (size_t i = 0; i < text.size(); ++i) text[i] = testing::FakeEngine::ResultByte(i + 3);
  stream->Write(GenerateHeader(1, static_cast<int64_t>(text.size()) / 4));
  SendChunks(*stream, {text});
  ReadAll(*stream);
  ASSERT_TRUE(End(*stream).ok());
  const std::vector<HostTensor> tensors = engine.last_generation()->conditions.tensors;
  ASSERT_EQ(tensors.size(), 1u);
  EXPECT_EQ(tensors[0].name, "text");
  EXPECT_TRUE(tensors[0].data == text);
}

TEST_F(WorkerLargeResultTest, ASlowReaderKeepsNeitherTheDeviceNorTheRun) {
  const auto context = NewContext();
  const auto stream = StartRun(context.get(), 2);
  ASSERT_TRUE(engine.WaitForBegun(3));
  ASSERT_TRUE(engine.WaitForIdle());  // Released although nothing has been read.
  const auto other = NewContext();
  v1::WorkerLoadAdapterRequest load;
  load.set_name("style");
  v1::WorkerLoadAdapterResponse loaded;
  ASSERT_TRUE(stub->LoadAdapter(other.get(), load, &loaded).ok());

  std::string video;
  for (const v1::GenerateResponse& event : ReadAll(*stream)) {
    if (!event.has_chunk()) continue;
    EXPECT_LE(event.chunk().data().size(), static_cast<size_t>(kChunkBytes));
    if (event.chunk().tensor() == 0) video += event.chunk().data();
  }
  ASSERT_TRUE(End(*stream).ok());
  ASSERT_EQ(video.size(), static_cast<size_t>(kBytes));
  for (size_t i = 0; i < video.size(); ++i) ASSERT_EQ(video[i], testing::FakeEngine::ResultByte(i)) << i;
}

TEST_F(WorkerLargeResultTest, AClientThatLeavesDuringTheResultIsForgotten) {
  const auto context = NewContext();
  const auto stream = StartRun(context.get(), 1);
  ASSERT_TRUE(engine.WaitForIdle());
  ASSERT_TRUE(engine.WaitForBegun(2));
  v1::GenerateResponse response;
  ASSERT_TRUE(stream->Read(&response));
  context->TryCancel();
  EXPECT_EQ(End(*stream).code(), absl::StatusCode::kCancelled);
  const auto other = NewContext();
  const auto next = StartRun(other.get(), 1);
  ReadAll(*next);
  EXPECT_TRUE(End(*next).ok());
}

TEST_F(WorkerGenerateTest, ABadHeaderIsRefusedBeforeAChunkIsRead) {
  struct Case {
    const char* name;
    v1::GenerateRequest header;
    absl::StatusCode code;
    absl::string_view reason;
  };
  std::vector<Case> cases;
  const auto add = [&](const char* name, absl::string_view reason, absl::StatusCode code,
                       const std::function<void(v1::GenerateHeader&)>& spoil) {
    cases.push_back({name, GenerateHeader(2), code, reason});
    spoil(*cases.back().header.mutable_header());
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  add("bytes", reason::kBadTensor, kInvalid, [](auto& h) { h.mutable_tensors(0)->set_bytes(9); });
  add("overflow", reason::kBadTensor, kInvalid, [](auto& h) { h.mutable_tensors(0)->set_shape(0, int64_t{1} << 62); });
  add("dtype", reason::kBadTensor, kInvalid, [](auto& h) { h.mutable_tensors(0)->set_dtype(static_cast<v1::DType>(99)); });
  add("twice", reason::kBadTensor, kInvalid, [](auto& h) { *h.add_tensors() = h.tensors(0); });
  add("huge", reason::kBadTensor, kInvalid,
      [](auto& h) { *h.mutable_tensors(0) = Spec("text", kMaxRequestBytes / 4 + 1); });
  add("nan strength", reason::kBadStrength, kInvalid, [](auto& h) {
    h.add_stack()->set_adapter("a");
    h.mutable_stack(0)->set_strength(std::nan(""));
  });
  add("large strength", reason::kBadStrength, kInvalid, [](auto& h) {
    h.add_stack()->set_adapter("a");
    h.mutable_stack(0)->set_strength(1e30);
  });
  add("no strength", reason::kBadStrength, kInvalid, [](auto& h) { h.add_stack()->set_adapter("a"); });
  add("no evaluations", reason::kBadRequest, kInvalid, [](auto& h) { h.mutable_sampling()->set_evaluations(0); });
  add("no start", reason::kBadRequest, kInvalid, [](auto& h) { h.mutable_sampling()->clear_start(); });
  add("keyframe", reason::kBadLayout, kInvalid, [](auto& h) { h.mutable_layout()->add_keyframes(v1::KEYFRAME_UNSPECIFIED); });
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const auto context = NewContext();
    auto stream = stub->Generate(context.get());
    stream->Write(c.header);  // No chunk, no half-close: the answer must not wait for them.
    v1::GenerateResponse response;
    EXPECT_FALSE(stream->Read(&response));
    const absl::Status status = End(*stream);
    EXPECT_EQ(status.code(), c.code) << status;
    EXPECT_EQ(ReasonOf(status), c.reason) << status;
  }
  EXPECT_FALSE(engine.last_generation().has_value());
  EXPECT_EQ(Requests("INVALID_ARGUMENT"), static_cast<double>(cases.size()));
}

TEST_F(WorkerGenerateTest, AStreamOutOfOrderIsRefused) {
  struct Case {
    const char* name;
    std::function<void(GenerateStream&)> talk;
    absl::string_view reason;
    const char* message;
  };
  v1::GenerateRequest chunk;
  chunk.mutable_chunk()->set_data(std::string(4, 'x'));
  v1::GenerateRequest late = chunk;
  late.mutable_chunk()->set_offset(4);
  v1::GenerateRequest long_chunk;
  long_chunk.mutable_chunk()->set_data(std::string(12, 'x'));
  const std::vector<Case> cases = {
      {"nothing", [](GenerateStream& s) { s.WritesDone(); }, reason::kBadRequest, "before its header"},
      {"chunk first", [&](GenerateStream& s) { s.Write(chunk); }, reason::kBadRequest, "before the header"},
      {"empty message", [](GenerateStream& s) { s.Write(v1::GenerateRequest()); }, reason::kBadRequest, "empty message"},
      {"two headers", [](GenerateStream& s) { s.Write(GenerateHeader(1)) && s.Write(GenerateHeader(1)); }, reason::kBadRequest,
       "second header"},
      {"gap", [&](GenerateStream& s) { s.Write(GenerateHeader(1)) && s.Write(late); }, reason::kBadTensor, "is next"},
      {"too much", [&](GenerateStream& s) { s.Write(GenerateHeader(1)) && s.Write(long_chunk); }, reason::kBadTensor,
       "past its end"},
      {"too little",
       [&](GenerateStream& s) {
         s.Write(GenerateHeader(1)) && s.Write(chunk);
         s.WritesDone();
       },
       reason::kBadTensor, "only 4 of 8 bytes came"},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.name);
    const auto context = NewContext();
    auto stream = stub->Generate(context.get());
    c.talk(*stream);
    const absl::Status status = End(*stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ReasonOf(status), c.reason);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
  }
  EXPECT_FALSE(engine.last_generation().has_value());
}

TEST_F(WorkerGenerateTest, AnEnginesRefusalArrivesWithReasonAndDetails) {
  engine.RefuseNext(Refuse(absl::StatusCode::kNotFound, reason::kUnknownAdapter, "no adapter nosuch", {{"adapter", "nosuch"}}));
  const auto context = NewContext();
  const auto stream = StartRun(context.get(), 1);
  for (const v1::GenerateResponse& event : ReadAll(*stream)) EXPECT_FALSE(event.has_accepted());
  const absl::Status status = End(*stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(ReasonOf(status), reason::kUnknownAdapter);
  EXPECT_EQ(DetailsOf(status).at("adapter"), "nosuch");
  EXPECT_EQ(Requests("NOT_FOUND"), 1);
}

TEST_F(WorkerGenerateTest, CancelStopsTheRunWithinTheRunningEvaluation) {
  engine.HoldSteps();
  engine.AllowSteps(3);
  const auto context = NewContext();
  const auto stream = StartRun(context.get(), 50);
  ASSERT_TRUE(engine.WaitForBegun(4));  // Three done, the fourth runs and has not been allowed to end.
  context->TryCancel();
  EXPECT_EQ(End(*stream).code(), absl::StatusCode::kCancelled);
  ASSERT_TRUE(engine.WaitForIdle());
  EXPECT_EQ(engine.begun(), 4);
  EXPECT_TRUE(Eventually([&] { return Metric("h3_cancel_latency_seconds").at("") == 1; }));
  EXPECT_EQ(Metric("h3_denoise_steps_total", "outcome"), (std::map<std::string, double>{{"ok", 2}, {"cancelled", 1}, {"failed", 0}}));
  EXPECT_EQ(Requests("CANCELLED"), 1);
}

TEST_F(WorkerGenerateTest, AClientThatLeavesWhileItSendsIsCountedAsCancelled) {
  constexpr int kClients = 50;
  for (int i = 0; i < kClients; ++i) {
    const auto context = NewContext();
    const auto stream = stub->Generate(context.get());
    stream->Write(GenerateHeader(1, 1000));
    context->TryCancel();
    EXPECT_EQ(End(*stream).code(), absl::StatusCode::kCancelled);
  }
  // Some left before the worker knew of them.
  EXPECT_TRUE(Eventually([&] { return service.Active() == 0; }));
  EXPECT_LE(Requests("CANCELLED"), kClients);
  EXPECT_EQ(Requests("INVALID_ARGUMENT"), 0);
  EXPECT_EQ(Requests("OK"), 0);
}

TEST_F(WorkerGenerateTest, AStepThatFailsIsCountedAsFailed) {
  engine.HoldSteps();
  engine.AllowSteps(2);
  const auto context = NewContext();
  const auto stream = StartRun(context.get(), 5);
  ASSERT_TRUE(engine.WaitForBegun(3));
  engine.Break(absl::InternalError("the device failed"));
  ReadAll(*stream);
  EXPECT_FALSE(End(*stream).ok());
  ASSERT_TRUE(engine.WaitForIdle());
  EXPECT_EQ(Metric("h3_denoise_steps_total", "outcome"), (std::map<std::string, double>{{"ok", 1}, {"cancelled", 0}, {"failed", 1}}));
  EXPECT_EQ(Metric("h3_cancel_latency_seconds").at(""), 0);
}

TEST_F(WorkerGenerateTest, ACallCancelledWhileItWaitsNeverReachesTheEngine) {
  auto busy = std::make_unique<BusyDevice>(device);
  const auto context = NewContext();
  const auto stream = StartRun(context.get(), 5);
  context->TryCancel();
  EXPECT_EQ(End(*stream).code(), absl::StatusCode::kCancelled);
  ASSERT_TRUE(Eventually([&] { return Requests("CANCELLED") == 1; }));  // Now the worker has heard of it.
  busy.reset();
  const BusyDevice passed(device);  // Behind the call's turn.
  EXPECT_FALSE(engine.last_generation().has_value());
}

TEST_F(WorkerGenerateTest, TheDeadlineStopsTheRun) {
  engine.HoldSteps();
  const auto context = NewContext(absl::Milliseconds(300));
  const auto stream = StartRun(context.get(), 50);
  ASSERT_TRUE(engine.WaitForBegun(1));
  EXPECT_EQ(End(*stream).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(engine.WaitForIdle());
}

TEST_F(WorkerGenerateTest, AFullDeviceQueueRefusesWithARetryHint) {
  const BusyDevice busy(device);
  for (size_t i = 0; i < kDeviceQueue; ++i) ASSERT_TRUE(device.Post([] {}));
  const auto context = NewContext();
  const auto stream = StartRun(context.get(), 1);
  ReadAll(*stream);
  const absl::Status status = End(*stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), reason::kQueueFull);
  EXPECT_EQ(DetailsOf(status).count("retry_seconds"), 1u);
}

}  // namespace
}  // namespace h3
