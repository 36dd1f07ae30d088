#include <thread>

#include "tests/unit/rpc/worker_fixture.h"

namespace h3 {
namespace {

class WorkerSessionTest : public WorkerFixture {};

TEST_F(WorkerSessionTest, AnswersEvaluationsInOrderUntilHalfClose) {
  const auto context = NewContext();
  const auto stream = OpenSession(context.get());
  for (uint32_t i = 0; i < 200; ++i) {
    SendEvaluation(*stream, 0.25);
    const v1::EvaluationResult result = ReadEvaluation(*stream);
    ASSERT_EQ(result.index(), i);
    ASSERT_EQ(result.tensors(0).name(), "video");
  }
  stream->WritesDone();
  EXPECT_TRUE(End(*stream).ok());
  EXPECT_TRUE(engine.WaitForIdle());
  EXPECT_EQ(Metric("h3_denoise_steps_total", "outcome").at("ok"), 200);
  EXPECT_TRUE(Eventually([&] { return Requests("OK") == 1; }));
}

TEST_F(WorkerSessionTest, AClientThatLeavesIsCountedAsCancelled) {
  constexpr int kClients = 50;
  for (int i = 0; i < kClients; ++i) {
    const auto context = NewContext();
    const auto stream = OpenSession(context.get());
    context->TryCancel();
    EXPECT_EQ(End(*stream).code(), absl::StatusCode::kCancelled);
  }
  EXPECT_TRUE(Eventually([&] { return Requests("CANCELLED") == kClients; }));
  EXPECT_EQ(Requests("OK"), 0);
  EXPECT_TRUE(Eventually([&] { return Metric("h3_cancel_latency_seconds").at("") == kClients; }));
}

TEST_F(WorkerSessionTest, EvaluationsSentAheadAreAnsweredOneByOne) {
  const auto context = NewContext();
  const auto stream = OpenSession(context.get());
  for (int i = 0; i < 10; ++i) SendEvaluation(*stream, 0.1 * i);
  stream->WritesDone();
  for (int i = 0; i < 10; ++i) EXPECT_NEAR(ReadEvaluation(*stream).timesteps().video(), 0.1 * i, 1e-6);
  EXPECT_TRUE(End(*stream).ok());
}

TEST_F(WorkerSessionTest, AnEvaluationSaysWhatTheEngineGets) {
  const auto context = NewContext();
  const auto stream = OpenSession(context.get());
  v1::EvaluateRequest request = Evaluation(0);
  v1::Evaluation& evaluation = *request.mutable_evaluation();
  evaluation.set_base_sigma(0.5);  // Replaces the timesteps; shifted by 12 and 3.
  evaluation.set_index(17);
  evaluation.add_factors(0.25);
  stream->Write(request);
  SendChunks(*stream, {std::string(8, 'v'), std::string(8, 'a')});
  ReadEvaluation(*stream);
  const EvaluationSpec spec = *engine.last_evaluation();
  EXPECT_NEAR(spec.t_video, 1 - 6.0 / 6.5, 1e-6);
  EXPECT_NEAR(spec.t_audio, 1 - 1.5 / 2.0, 1e-6);
  EXPECT_EQ(spec.index, 17);
  EXPECT_EQ(spec.factors, std::vector<double>{0.25});
  EXPECT_EQ(spec.video.data, std::string(8, 'v'));
  EXPECT_EQ(spec.audio.data, std::string(8, 'a'));
}

TEST_F(WorkerSessionTest, TakesTurnsWithARunningGeneration) {
  engine.HoldSteps();
  engine.AllowSteps(2);  // The preparation of a run and its first evaluation.
  const auto run_context = NewContext();
  const auto run = StartRun(run_context.get(), 1000);
  ASSERT_TRUE(engine.WaitForBegun(3));
  const auto context = NewContext();
  absl::Notification answered;
  std::thread client([&] {
    const auto stream = OpenSession(context.get());
    SendEvaluation(*stream, 0.5);
    ReadEvaluation(*stream);
    answered.Notify();
  });
  // One piece of work at a time, until the session has its answer: long before the run has its 1000.
  int64_t given = 0;
  for (; !answered.HasBeenNotified() && given < 900; ++given) {
    const int64_t begun = engine.begun();
    engine.AllowSteps(1);
    ASSERT_TRUE(engine.WaitForBegun(begun + 1));
    answered.WaitForNotificationWithTimeout(absl::Milliseconds(20));
  }
  client.join();
  EXPECT_TRUE(answered.HasBeenNotified());
  EXPECT_LT(given, 900);
  run_context->TryCancel();
  EXPECT_EQ(End(*run).code(), absl::StatusCode::kCancelled);
}

TEST_F(WorkerSessionTest, AnIdleSessionIsFreedWhenItsClientIsGone) {
  const auto context = NewContext();
  const auto stream = OpenSession(context.get());
  context->TryCancel();
  EXPECT_EQ(End(*stream).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(engine.WaitForIdle());
}

TEST_F(WorkerSessionTest, AClientThatLeavesDuringAnEvaluationStopsIt) {
  engine.HoldSteps();
  const auto context = NewContext();
  const auto stream = OpenSession(context.get());
  SendEvaluation(*stream, 0.5);
  ASSERT_TRUE(engine.WaitForBegun(1));
  context->TryCancel();
  EXPECT_EQ(End(*stream).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(engine.WaitForIdle());
}

TEST_F(WorkerSessionTest, MessagesOutOfTurnAreRefusedAndTheSessionFreed) {
  const auto expect = [&](const char* what, absl::string_view reason, const std::function<void(EvaluateStream&)>& talk) {
    SCOPED_TRACE(what);
    const auto context = NewContext();
    const auto stream = OpenSession(context.get());
    talk(*stream);
    const absl::Status status = End(*stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_EQ(ReasonOf(status), reason) << status;
    EXPECT_TRUE(engine.WaitForIdle());
  };
  v1::EvaluateRequest chunk;
  chunk.mutable_chunk()->set_data("1234");
  expect("chunk", reason::kBadRequest, [&](EvaluateStream& s) { s.Write(chunk); });
  expect("second header", reason::kBadRequest, [](EvaluateStream& s) { s.Write(EvaluateHeader()); });
  expect("two evaluations at once", reason::kBadRequest,
         [](EvaluateStream& s) { s.Write(Evaluation(0.5)) && s.Write(Evaluation(0.5)); });
  expect("timestep", reason::kBadRequest, [](EvaluateStream& s) { s.Write(Evaluation(1.5)); });
  expect("tensors cut short", reason::kBadTensor, [](EvaluateStream& s) {
    s.Write(Evaluation(0.5));
    s.WritesDone();
  });
  expect("a tensor without a use", reason::kBadTensor, [](EvaluateStream& s) {
    v1::EvaluateRequest request = Evaluation(0.5);
    *request.mutable_evaluation()->add_tensors() = Spec("mask", 2);
    s.Write(request);
    SendChunks(s, {std::string(8, 'v'), std::string(8, 'a'), std::string(8, 'm')});
  });
}

TEST_F(WorkerSessionTest, ABadHeaderDoesNotWaitForABusyDevice) {
  const BusyDevice busy(device);
  const auto context = NewContext();
  auto stream = stub->Evaluate(context.get());
  v1::EvaluateRequest request = EvaluateHeader();
  request.mutable_header()->mutable_tensors(0)->set_bytes(3);
  stream->Write(request);
  const absl::Status status = End(*stream);
  EXPECT_EQ(ReasonOf(status), reason::kBadTensor) << status;
}

TEST_F(WorkerSessionTest, ARefusedStackArrivesWithItsReason) {
  engine.RefuseNext(
      Refuse(absl::StatusCode::kFailedPrecondition, reason::kAdalnNeedsGrid, "needs a grid", {{"adapter", "turbo"}}));
  const auto context = NewContext();
  auto stream = stub->Evaluate(context.get());
  stream->Write(EvaluateHeader());
  SendChunks(*stream, {std::string(8, 't')});
  const absl::Status status = End(*stream);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReasonOf(status), reason::kAdalnNeedsGrid);
  EXPECT_EQ(DetailsOf(status).at("adapter"), "turbo");
}

}  // namespace
}  // namespace h3
