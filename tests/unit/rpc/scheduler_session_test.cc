#include "tests/unit/rpc/scheduler_fixture.h"

namespace h3 {
namespace {

class SchedulerSessionFixture : public SchedulerFixture {
 protected:
  using SchedulerFixture::SchedulerFixture;

  std::unique_ptr<EvaluateStream> Open(grpc::ClientContext* context, v1::Accepted* accepted = nullptr) {
    auto stream = generation->Evaluate(context);
    stream->Write(SessionHeader("lora/turbo_bare", 0.8));
    SendText(*stream);
    v1::EvaluateResponse response;
    EXPECT_TRUE(stream->Read(&response) && response.has_accepted()) << response.ShortDebugString();
    if (accepted != nullptr) *accepted = response.accepted();
    EXPECT_TRUE(stream->Read(&response) && response.has_ready()) << response.ShortDebugString();
    return stream;
  }
  static void SendRows(EvaluateStream& stream, double t) {
    stream.Write(Evaluation(t));
    ChunkReader reader({"vvvvvvvv", "aaaaaaaa"});
    v1::EvaluateRequest request;
    while (reader.Next(*request.mutable_chunk())) stream.Write(request);
  }
  static v1::EvaluateRequest Evaluation(double t) {
    v1::EvaluateRequest request;
    request.mutable_evaluation()->mutable_timesteps()->set_video(t);
    request.mutable_evaluation()->mutable_timesteps()->set_audio(t);
    for (const char* name : {"target_video_rows", "target_audio_rows"}) {
      v1::TensorSpec& spec = *request.mutable_evaluation()->add_tensors();
      spec.set_name(name);
      spec.set_dtype(v1::DTYPE_F32);
      spec.add_shape(2);
      spec.set_bytes(8);
    }
    return request;
  }
  // The result of one evaluation and its two chunks.
  static v1::EvaluationResult ReadResult(EvaluateStream& stream) {
    v1::EvaluateResponse response;
    EXPECT_TRUE(stream.Read(&response) && response.has_result()) << response.ShortDebugString();
    const v1::EvaluationResult result = response.result();
    for (int i = 0; i < result.tensors_size(); ++i) EXPECT_TRUE(stream.Read(&response) && response.has_chunk());
    return result;
  }
  // What the next read and the end say.
  static absl::Status End(EvaluateStream& stream) {
    v1::EvaluateResponse response;
    EXPECT_FALSE(stream.Read(&response)) << response.ShortDebugString();
    return FromGrpc(stream.Finish());
  }
};

SchedulerOptions TwoSessions() {
  SchedulerOptions options;
  options.max_sessions_per_worker = 2;
  return options;
}

class SchedulerSessionTest : public SchedulerSessionFixture {
 protected:
  SchedulerSessionTest() : SchedulerSessionFixture(TwoSessions()) {}
};

TEST_F(SchedulerSessionTest, AnswersEvaluationsInOrderUntilTheClientHasSaidEverything) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  v1::Accepted accepted;
  const auto session = Open(context.get(), &accepted);
  ASSERT_EQ(accepted.stack_size(), 1);
  EXPECT_EQ(accepted.stack(0).digest().size(), 64u);
  for (int i = 0; i < 3; ++i) {
    SendRows(*session, 0.25 * i);
    const v1::EvaluationResult result = ReadResult(*session);
    EXPECT_EQ(result.index(), static_cast<uint32_t>(i));
    EXPECT_EQ(result.timesteps().video(), 0.25 * i);
  }
  session->WritesDone();
  EXPECT_TRUE(End(*session).ok());
  EXPECT_TRUE(worker.engine.WaitForIdle());
  EXPECT_TRUE(Eventually([&] { return core->sessions() == 0; }));
}

TEST_F(SchedulerSessionTest, ASessionDoesNotWaitForTheQueue) {
  StartWorker();
  const auto one = NewContext(), two = NewContext();
  const auto session = Open(one.get());
  EXPECT_TRUE(Drain(*Start(two.get(), Header())).ok()) << "an open session does not keep a request from running";
  SendRows(*session, 0.5);
  ReadResult(*session);
}

TEST_F(SchedulerSessionTest, MoreSessionsThanAWorkerHoldsAreRefusedUntilOneIsClosed) {
  StartWorker();
  const auto one = NewContext(), two = NewContext(), three = NewContext(), four = NewContext();
  const auto first = Open(one.get());
  const auto second = Open(two.get());
  const auto refused = generation->Evaluate(three.get());
  refused->Write(SessionHeader());
  const absl::Status status = End(*refused);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(status), "QUEUE_FULL");
  first->WritesDone();
  EXPECT_TRUE(End(*first).ok());
  ASSERT_TRUE(Eventually([&] { return core->sessions() == 1; }));
  Open(four.get())->WritesDone();
}

TEST_F(SchedulerSessionTest, AnEvaluationThatIsTooLargeEndsTheSession) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto session = Open(context.get());
  v1::EvaluateRequest huge = Evaluation(0.5);
  huge.mutable_evaluation()->mutable_tensors(0)->set_shape(0, 2'500'000'000);
  huge.mutable_evaluation()->mutable_tensors(0)->set_bytes(10'000'000'000);
  session->Write(huge);
  EXPECT_EQ(ReasonOf(End(*session)), "BAD_TENSOR");
  EXPECT_TRUE(worker.engine.WaitForIdle());
}

TEST_F(SchedulerSessionTest, ALostClientFreesItsSession) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto session = Open(context.get());
  context->TryCancel();
  EXPECT_EQ(End(*session).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(worker.engine.WaitForIdle());
  EXPECT_TRUE(Eventually([&] { return core->sessions() == 0; }));
}

TEST_F(SchedulerSessionTest, ALostWorkerEndsItsSessions) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto session = Open(context.get());
  worker.server->Shutdown(std::chrono::system_clock::now());
  const absl::Status status = End(*session);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ReasonOf(status), "WORKER_LOST");
}

SchedulerOptions ShortIdle() {
  SchedulerOptions options;
  options.session_idle = absl::Milliseconds(300);
  return options;
}

class SchedulerIdleSessionTest : public SchedulerSessionFixture {
 protected:
  SchedulerIdleSessionTest() : SchedulerSessionFixture(ShortIdle()) {}
};

TEST_F(SchedulerIdleSessionTest, AClientThatSaysNothingLosesItsSession) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto session = Open(context.get());
  const absl::Status status = End(*session);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded) << status;
  EXPECT_EQ(ReasonOf(status), "SESSION_IDLE");
  EXPECT_TRUE(worker.engine.WaitForIdle());
}

TEST_F(SchedulerIdleSessionTest, AClientThatWaitsForASlowAnswerIsNotIdle) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto session = Open(context.get());
  worker.engine.HoldSteps();
  const auto begun = worker.engine.begun();
  SendRows(*session, 0.5);
  ASSERT_TRUE(worker.engine.WaitForBegun(begun + 1));
  // The device is busy for three times as long as a session may be idle.
  const absl::Time until = absl::Now() + absl::Milliseconds(900);
  ASSERT_TRUE(Eventually([&] { return absl::Now() > until; }));
  worker.engine.AllowSteps(1);
  ReadResult(*session);
}

}  // namespace
}  // namespace h3
