#include <limits>

#include "tests/unit/rpc/scheduler_fixture.h"

namespace h3 {
namespace {

using Event = v1::GenerateResponse;

SchedulerOptions SmallQueue() {
  SchedulerOptions options;
  options.queue_capacity = 2;
  return options;
}

class SchedulerGenerateTest : public SchedulerFixture {
 protected:
  SchedulerGenerateTest() : SchedulerFixture(SmallQueue()) {}

  // A request that runs and stays at its first step.
  std::unique_ptr<GenerateStream> Occupy(Worker& worker, grpc::ClientContext* context) {
    worker.engine.HoldSteps();
    auto stream = Start(context, Header());
    EXPECT_TRUE(worker.engine.WaitForBegun(1));
    return stream;
  }
  // A request that waits; its Accepted.
  std::unique_ptr<GenerateStream> Enqueue(grpc::ClientContext* context, v1::GenerateRequest header,
                                          v1::Accepted* accepted = nullptr) {
    auto stream = Start(context, header);
    Event event;
    EXPECT_TRUE(ReadUntil(*stream, Event::kAccepted, event));
    if (accepted != nullptr) *accepted = event.accepted();
    return stream;
  }
};

TEST_F(SchedulerGenerateTest, RelaysARunFromAcceptedToCompleted) {
  StartWorker();
  const auto context = NewContext();
  const auto stream = Start(context.get(), Header(2, "lora/style_bf16", -0.5));
  std::string order;
  v1::Accepted accepted;
  v1::Completed completed;
  size_t bytes = 0;
  Event event;
  while (stream->Read(&event)) {
    const char kind = event.has_accepted()   ? 'A'
                      : event.has_progress() ? 'p'
                      : event.has_result()   ? 'R'
                      : event.has_chunk()    ? 'c'
                                             : 'C';
    if (order.empty() || order.back() != kind) order += kind;
    if (event.has_accepted()) accepted = event.accepted();
    if (event.has_chunk()) bytes += event.chunk().data().size();
    if (event.has_completed()) completed = event.completed();
  }
  ASSERT_TRUE(FromGrpc(stream->Finish()).ok());
  EXPECT_EQ(order, "ApRcC");
  EXPECT_EQ(bytes, 64u + 8u);
  EXPECT_EQ(completed.worker(), "w");
  EXPECT_EQ(completed.step_seconds_size(), 2);
  EXPECT_EQ(accepted.task(), v1::TASK_T2VA);
  EXPECT_EQ(accepted.base_fingerprint(), "fingerprint-of-fake");
  EXPECT_EQ(accepted.video_sigmas_size(), 3);
  EXPECT_FALSE(accepted.request_id().empty());
  ASSERT_EQ(accepted.stack_size(), 1);
  EXPECT_EQ(accepted.stack(0).digest().size(), 64u);
  EXPECT_EQ(accepted.stack(0).strength(), -0.5);
  ASSERT_GT(accepted.stack(0).scales_size(), 0);
  EXPECT_FALSE(accepted.stack(0).scales(0).source().empty());
  ASSERT_EQ(accepted.warnings_size(), 1) << "a base of unknown partition serves and says so";
  EXPECT_EQ(Metric("h3_requests_total", "OK"), 1);
  EXPECT_EQ(Metric("h3_output_bytes_total", "t2va"), 64 + 8);
  EXPECT_EQ(Metric("h3_queue_wait_seconds", "normal"), 1);
  EXPECT_TRUE(Eventually([&] { return core->Active() == 0; }));
  // It went through each phase and is in none.
  const std::map<std::string, double> each = {{"queue", 1}, {"prepare", 1}, {"denoise", 1}, {"stream", 1}};
  EXPECT_TRUE(Eventually([&] { return Metrics("h3_request_phase_seconds", "phase") == each; }));
  EXPECT_EQ(Metrics("h3_requests_in_flight", "phase"), (std::map<std::string, double>{{"prepare", 0}, {"denoise", 0}, {"stream", 0}}));
}

TEST_F(SchedulerGenerateTest, ARequestIsInThePhaseThatItsWorkerTells) {
  using InFlight = std::map<std::string, double>;
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto run = Occupy(worker, context.get());
  const auto in_flight = [&] { return Metrics("h3_requests_in_flight", "phase"); };
  EXPECT_TRUE(Eventually([&] { return in_flight() == InFlight{{"prepare", 1}, {"denoise", 0}, {"stream", 0}}; }));
  worker.engine.AllowSteps(1);
  EXPECT_TRUE(Eventually([&] { return in_flight() == InFlight{{"prepare", 0}, {"denoise", 1}, {"stream", 0}}; }));
  context->TryCancel();
  EXPECT_EQ(Drain(*run).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Eventually([&] { return in_flight() == InFlight{{"prepare", 0}, {"denoise", 0}, {"stream", 0}}; }));
  EXPECT_EQ(Metric("h3_request_phase_seconds", "denoise"), 0) << "it did not go through it";
}

TEST_F(SchedulerGenerateTest, AClientThatLeavesIsCountedAsCancelledWhereverItsRequestIs) {
  constexpr int kClients = 30;
  Worker& worker = StartWorker();
  worker.engine.HoldSteps();
  for (int i = 0; i < kClients; ++i) {
    const auto running = NewContext(), sending = NewContext();
    const auto run = Start(running.get(), Header());
    EXPECT_TRUE(worker.engine.WaitForBegun(i + 1));
    const auto half = generation->Generate(sending.get());
    half->Write(Header());
    sending->TryCancel();
    EXPECT_EQ(Drain(*half).code(), absl::StatusCode::kCancelled);
    running->TryCancel();
    EXPECT_EQ(Drain(*run).code(), absl::StatusCode::kCancelled);
    ASSERT_TRUE(worker.engine.WaitForIdle());
  }
  EXPECT_TRUE(Eventually([&] { return core->Active() == 0; }));
  EXPECT_TRUE(Eventually([&] { return Metric("h3_requests_total", "CANCELLED") >= kClients; }));
  for (const char* code : {"UNAVAILABLE", "INVALID_ARGUMENT", "OK"}) EXPECT_EQ(Metric("h3_requests_total", code), 0) << code;
  EXPECT_EQ(Metric("h3_admission_rejections_total", "invalid_request"), 0);
}

TEST_F(SchedulerGenerateTest, TheWorkerGetsThePinnedStackAndEveryByte) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  v1::GenerateRequest header = Header(1, "lora/turbo_bare", 0.8);
  const auto stream = Start(context.get(), header);
  ASSERT_TRUE(Drain(*stream).ok());
  const GenerationSpec spec = *worker.engine.last_generation();
  ASSERT_EQ(spec.conditions.stack.size(), 1u);
  EXPECT_EQ(spec.conditions.stack[0].adapter, "lora/turbo_bare");
  EXPECT_EQ(spec.conditions.stack[0].digest.size(), 64u);
  ASSERT_EQ(spec.conditions.tensors.size(), 2u);
  EXPECT_EQ(spec.conditions.tensors[0].data, Text()[0]);
}

TEST_F(SchedulerGenerateTest, BadHeadersAreRefusedBeforeAChunkIsSent) {
  Worker& worker = StartWorker();
  struct Case {
    const char* reason;
    absl::StatusCode code;
    v1::GenerateRequest header;
  };
  std::vector<Case> cases;
  const auto add = [&](const char* reason, absl::StatusCode code, v1::GenerateRequest header) {
    cases.push_back({reason, code, std::move(header)});
    return cases.back().header.mutable_header();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  add("BAD_STRENGTH", kInvalid, Header(2, "lora/turbo_bare", std::numeric_limits<double>::quiet_NaN()));
  add("BAD_STRENGTH", kInvalid, Header(2, "lora/turbo_bare", 1e30));
  add("BAD_STRENGTH", kInvalid, Header(2, "lora/turbo_bare"))->mutable_stack(0)->clear_strength();
  add("UNKNOWN_ADAPTER", absl::StatusCode::kNotFound, Header(2, "lora/nobody"));
  add("UNKNOWN_ADAPTER", kInvalid, Header(2, "../golden/lora/turbo_bare"));
  add("UNKNOWN_ADAPTER", absl::StatusCode::kNotFound, Header(2, "sha256:" + std::string(64, 'a')));
  add("SHAPE_MISMATCH", kInvalid, Header(2, "reject/wrong_in"));
  add("BAD_LAYOUT", kInvalid, Header())->mutable_layout()->set_latent_height(3);
  add("BAD_LAYOUT", kInvalid, Header())->set_task(v1::TASK_REF2VA);
  add("BAD_TENSOR", kInvalid, Header())->mutable_tensors(0)->set_shape(0, 8);
  add("BAD_TENSOR", kInvalid, Header())->mutable_tensors()->RemoveLast();
  add("BAD_REQUEST", kInvalid, Header())->mutable_sampling()->clear_start();
  add("BAD_REQUEST", kInvalid, Header(0));
  add("BASE_MISMATCH", absl::StatusCode::kFailedPrecondition, Header())->set_model("another");
  v1::TensorSpec& huge = *add("BAD_TENSOR", kInvalid, Header())->mutable_tensors(0);
  huge.set_shape(0, 62'500'000);
  huge.set_bytes(10'000'000'000);
  for (const Case& each : cases) {
    const absl::Status status = RefusalOf(each.header);
    EXPECT_EQ(ReasonOf(status), each.reason) << status;
    EXPECT_EQ(status.code(), each.code) << status;
  }
  EXPECT_EQ(worker.engine.begun(), 0);
  EXPECT_EQ(core->Active(), 0u);
  const auto context = NewContext();
  EXPECT_TRUE(Drain(*Start(context.get(), Header())).ok()) << "the next request is unaffected";
}

TEST_F(SchedulerGenerateTest, AFullQueueRefusesWithARetryHint) {
  Worker& worker = StartWorker();
  const auto running = NewContext(), first = NewContext(), second = NewContext(), third = NewContext();
  const auto run = Occupy(worker, running.get());
  v1::Accepted accepted;
  const auto one = Enqueue(first.get(), Header());
  const auto two = Enqueue(second.get(), Header(), &accepted);
  EXPECT_EQ(accepted.queue_position(), 1u);
  const absl::Status refused = Drain(*Start(third.get(), Header()));
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused), "QUEUE_FULL");
  EXPECT_EQ(DetailsOf(refused).count("retry_seconds"), 1u);
  EXPECT_EQ(Metric("h3_admission_rejections_total", "queue_full"), 1);
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
  EXPECT_TRUE(Drain(*one).ok());
  EXPECT_TRUE(Drain(*two).ok());
}

TEST_F(SchedulerGenerateTest, HighPriorityRunsBeforeWhatWaits) {
  Worker& worker = StartWorker();
  const auto running = NewContext(), low = NewContext(), high = NewContext();
  const auto run = Occupy(worker, running.get());
  v1::GenerateRequest header = Header(5);
  header.mutable_header()->set_priority(v1::PRIORITY_LOW);
  const auto slow = Enqueue(low.get(), header);
  header = Header(6);
  header.mutable_header()->set_priority(v1::PRIORITY_HIGH);
  v1::Accepted accepted;
  const auto fast = Enqueue(high.get(), header, &accepted);
  EXPECT_EQ(accepted.queue_position(), 0u);
  Event event;
  core->TellPlaces();
  ASSERT_TRUE(ReadUntil(*slow, Event::kProgress, event));
  while (event.progress().queue_position() != 1) ASSERT_TRUE(ReadUntil(*slow, Event::kProgress, event));
  worker.engine.AllowSteps(3);  // The run ends.
  ASSERT_TRUE(worker.engine.WaitForBegun(4));
  EXPECT_EQ(worker.engine.last_generation()->schedule.evaluations(), 6);
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
  EXPECT_TRUE(Drain(*fast).ok());
  EXPECT_TRUE(Drain(*slow).ok());
}

TEST_F(SchedulerGenerateTest, AClientThatDoesNotReadKeepsNobodyElseWaiting) {
  Worker& worker = StartWorker();
  const auto silent = NewContext(), next = NewContext();
  const auto unread = Start(silent.get(), Header(50));
  ASSERT_TRUE(worker.engine.WaitForBegun(51));
  EXPECT_TRUE(Drain(*Start(next.get(), Header())).ok());
  // It has lost nothing but old progress.
  Event event;
  EXPECT_TRUE(ReadUntil(*unread, Event::kResult, event));
  EXPECT_TRUE(ReadUntil(*unread, Event::kCompleted, event));
  EXPECT_TRUE(Drain(*unread).ok());
}

TEST_F(SchedulerGenerateTest, CancelledInTheQueueItLeavesAtOnceAndNeverStarts) {
  Worker& worker = StartWorker();
  const auto running = NewContext(), waiting = NewContext();
  const auto run = Occupy(worker, running.get());
  const auto queued = Enqueue(waiting.get(), Header(9));
  waiting->TryCancel();
  EXPECT_EQ(Drain(*queued).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Eventually([&] { return core->dispatcher().queued() == 0; }));
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
  EXPECT_NE(worker.engine.last_generation()->schedule.evaluations(), 9);
  EXPECT_EQ(Metric("h3_cancellations_total", "client"), 1);
}

TEST_F(SchedulerGenerateTest, AThousandCancelledInTheQueueDelayNobody) {
  Worker& worker = StartWorker();
  const auto running = NewContext();
  const auto run = Occupy(worker, running.get());
  for (int i = 0; i < 1000; ++i) {
    const auto context = NewContext();
    const auto stream = Start(context.get(), Header());
    context->TryCancel();
    ASSERT_FALSE(Drain(*stream).ok());
  }
  EXPECT_TRUE(Eventually([&] { return core->Active() == 1; }));
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
  const auto context = NewContext();
  EXPECT_TRUE(Drain(*Start(context.get(), Header())).ok());
  EXPECT_TRUE(Eventually([&] { return core->Active() == 0; }));
}

TEST_F(SchedulerGenerateTest, ADeadlineThatPassesInTheQueueRemovesTheRequest) {
  Worker& worker = StartWorker();
  const auto running = NewContext(), waiting = NewContext(absl::Milliseconds(300));
  const auto run = Occupy(worker, running.get());
  const auto queued = Enqueue(waiting.get(), Header());
  EXPECT_EQ(Drain(*queued).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Eventually([&] { return core->dispatcher().queued() == 0; }));
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
}

TEST_F(SchedulerGenerateTest, CancellingARunStopsTheDevice) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto run = Occupy(worker, context.get());
  context->TryCancel();
  EXPECT_EQ(Drain(*run).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(worker.engine.WaitForIdle());
  EXPECT_TRUE(Eventually([&] { return core->Active() == 0; }));
  worker.engine.AllowSteps(100);
  const auto next = NewContext();
  EXPECT_TRUE(Drain(*Start(next.get(), Header())).ok());
}

// Reads until a progress that `wanted` likes; false when the stream ends before.
template <typename Wanted>
bool ReadUntilProgress(GenerateStream& stream, const Wanted& wanted) {
  Event event;
  while (stream.Read(&event)) {
    if (event.has_progress() && wanted(event.progress())) return true;
  }
  return false;
}
auto Attempt(uint32_t attempt) {
  return [=](const v1::Progress& progress) { return progress.phase() == v1::PHASE_QUEUED && progress.attempt() == attempt; };
}
auto Preparing(uint32_t attempt) {
  return [=](const v1::Progress& progress) { return progress.phase() == v1::PHASE_PREPARE && progress.attempt() == attempt; };
}
auto Step(uint32_t attempt, uint32_t step) {
  return [=](const v1::Progress& progress) { return progress.step() == step && progress.attempt() == attempt; };
}

TEST_F(SchedulerGenerateTest, ARunThatLosesItsWorkerIsRunAgainBeforeWhatWaits) {
  Worker& worker = StartWorker();
  const auto context = NewContext(), one = NewContext(), two = NewContext();
  const auto run = Occupy(worker, context.get());
  const auto first = Enqueue(one.get(), Header(5));
  const auto second = Enqueue(two.get(), Header(6));  // The queue is full.
  ASSERT_TRUE(ReadUntilProgress(*run, Preparing(0)));
  Lose(worker);
  ASSERT_TRUE(ReadUntilProgress(*run, Attempt(1)));
  EXPECT_TRUE(Eventually([&] { return core->dispatcher().queued() == 3; }));
  EXPECT_EQ(core->buffered_bytes(), 3 * 1176);
  EXPECT_EQ(Metrics("h3_requests_in_flight", "phase"), (std::map<std::string, double>{{"prepare", 0}, {"denoise", 0}, {"stream", 0}}));

  Worker& next = StartWorker("again", /*held=*/true);
  ASSERT_TRUE(next.engine.WaitForBegun(1));
  const GenerationSpec spec = *next.engine.last_generation();
  EXPECT_EQ(spec.schedule.evaluations(), 2) << "it has kept its place";
  EXPECT_EQ(spec.seed, 7u);
  ASSERT_EQ(spec.conditions.tensors.size(), 2u);
  EXPECT_EQ(spec.conditions.tensors[0].data, Text()[0]);
  next.engine.AllowSteps(100);
  std::string data;
  v1::Completed completed;
  Event event;
  while (run->Read(&event)) {
    if (event.has_progress()) {
      EXPECT_EQ(event.progress().attempt(), 1u);
    }
    if (event.has_chunk() && event.chunk().tensor() == 0) data += event.chunk().data();
    if (event.has_completed()) completed = event.completed();
  }
  EXPECT_TRUE(FromGrpc(run->Finish()).ok());
  ASSERT_EQ(data.size(), 64u);
  for (size_t i = 0; i < data.size(); ++i) ASSERT_EQ(data[i], testing::FakeEngine::ResultByte(i));
  EXPECT_EQ(completed.worker(), "again");
  EXPECT_TRUE(Drain(*first).ok());
  EXPECT_TRUE(Drain(*second).ok());
  EXPECT_EQ(Metrics("h3_requests_retried_total", "").at(""), 1);
  EXPECT_EQ(Metrics("h3_requests_poisonous_total", "").at(""), 0);
  EXPECT_EQ(Metric("h3_requests_total", "OK"), 3);
  EXPECT_EQ(Metric("h3_queue_wait_seconds", "normal"), 3);
  EXPECT_EQ(core->buffered_bytes(), 0);
  EXPECT_TRUE(Eventually([&] { return core->Active() == 0; }));
}

TEST_F(SchedulerGenerateTest, AnotherWorkerThatIsFreeTakesItAtOnce) {
  Worker& one = StartWorker("one", /*held=*/true);
  Worker& two = StartWorker("two", /*held=*/true);
  const auto context = NewContext();
  const auto run = Start(context.get(), Header());
  ASSERT_TRUE(Eventually([&] { return one.engine.begun() + two.engine.begun() == 1; }));
  Worker& lost = one.engine.begun() == 1 ? one : two;
  Worker& other = &lost == &one ? two : one;
  Lose(lost);
  EXPECT_TRUE(ReadUntilProgress(*run, Attempt(1)));
  other.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
}

TEST_F(SchedulerGenerateTest, ARunIsNotTriedForEver) {
  const auto context = NewContext();
  std::unique_ptr<GenerateStream> run;
  for (uint32_t attempt = 0; attempt < 3; ++attempt) {
    Worker& worker = StartWorker(absl::StrCat("w", attempt), /*held=*/true);
    if (run == nullptr) run = Start(context.get(), Header(20));
    worker.engine.AllowSteps(1 + 3 * attempt);
    ASSERT_TRUE(ReadUntilProgress(*run, Step(attempt, 3 * attempt)));
    Lose(worker);
  }
  const absl::Status status = Drain(*run);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ReasonOf(status), "WORKER_LOST");
  EXPECT_EQ(Metrics("h3_requests_retried_total", "").at(""), 2);
  EXPECT_EQ(Metrics("h3_requests_poisonous_total", "").at(""), 0);
  EXPECT_EQ(Metric("h3_requests_total", "UNAVAILABLE"), 1);
  EXPECT_TRUE(Eventually([&] { return core->Active() == 0 && core->buffered_bytes() == 0; }));
}

TEST_F(SchedulerGenerateTest, ARequestThatKillsASecondWorkerAtTheSameStepIsRefused) {
  const auto context = NewContext(), waiting = NewContext();
  Worker& first = StartWorker("first", /*held=*/true);
  const auto run = Start(context.get(), Header());
  ASSERT_TRUE(ReadUntilProgress(*run, Preparing(0)));
  const auto queued = Enqueue(waiting.get(), Header(3));
  Lose(first);
  Worker& second = StartWorker("second", /*held=*/true);
  ASSERT_TRUE(ReadUntilProgress(*run, Preparing(1)));
  Lose(second);
  const absl::Status status = Drain(*run);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  EXPECT_EQ(ReasonOf(status), "REQUEST_KILLS_WORKERS");
  EXPECT_EQ(DetailsOf(status)["worker"], "second");
  EXPECT_EQ(Metrics("h3_requests_poisonous_total", "").at(""), 1);
  StartWorker("third");
  EXPECT_TRUE(Drain(*queued).ok()) << "the others go on";
  EXPECT_TRUE(Eventually([&] { return core->Active() == 0 && core->buffered_bytes() == 0; }));
}

TEST_F(SchedulerGenerateTest, CancelledWhileItWaitsForAnotherWorkerItLeavesTheQueue) {
  Worker& worker = StartWorker();
  const auto context = NewContext(), next = NewContext();
  const auto run = Occupy(worker, context.get());
  Lose(worker);
  ASSERT_TRUE(ReadUntilProgress(*run, Attempt(1)));
  context->TryCancel();
  EXPECT_EQ(Drain(*run).code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(Eventually([&] { return core->dispatcher().queued() == 0 && core->Active() == 0 && core->buffered_bytes() == 0; }));
  Worker& again = StartWorker("again");
  EXPECT_TRUE(Drain(*Start(next.get(), Header(5))).ok());
  EXPECT_EQ(again.engine.last_generation()->schedule.evaluations(), 5);
  EXPECT_EQ(core->dispatcher().running(), 0u);
}

TEST_F(SchedulerGenerateTest, ItsDeadlineHoldsWhileItWaitsForAnotherWorker) {
  Worker& worker = StartWorker();
  const auto context = NewContext(absl::Seconds(1));
  const auto run = Occupy(worker, context.get());
  Lose(worker);
  EXPECT_EQ(Drain(*run).code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(Eventually([&] { return core->dispatcher().queued() == 0 && core->Active() == 0; }));
}

// Clients that leave at any moment of a change of workers: nothing is left of them.
TEST_F(SchedulerGenerateTest, ClientsThatLeaveWhileWorkersAreLostLeaveNothingBehind) {
  for (int i = 0; i < 20; ++i) {
    Worker& worker = StartWorker(absl::StrCat("w", i), /*held=*/true);
    const auto context = NewContext();
    const auto run = Start(context.get(), Header());
    ASSERT_TRUE(worker.engine.WaitForBegun(1));
    std::thread leaving([&] {
      absl::SleepFor(absl::Microseconds(100 * i));
      context->TryCancel();
    });
    Lose(worker);
    EXPECT_EQ(Drain(*run).code(), absl::StatusCode::kCancelled);
    leaving.join();
    ASSERT_TRUE(Eventually([&] { return core->Active() == 0 && core->dispatcher().queued() + core->dispatcher().running() == 0; }));
  }
  EXPECT_EQ(core->buffered_bytes(), 0);
}

class SchedulerWithoutRetriesTest : public SchedulerFixture {
 protected:
  SchedulerWithoutRetriesTest() : SchedulerFixture({.retries = 0}) {}
};

TEST_F(SchedulerWithoutRetriesTest, AWorkerThatIsLostEndsItsRunWithARetryableReasonWithinTwoSeconds) {
  Worker& worker = StartWorker("w", /*held=*/true);
  const auto context = NewContext(), waiting = NewContext();
  const auto run = Start(context.get(), Header());
  ASSERT_TRUE(worker.engine.WaitForBegun(1));
  const auto queued = Start(waiting.get(), Header());
  ASSERT_TRUE(Eventually([&] { return core->dispatcher().queued() == 1; }));
  const absl::Time lost = absl::Now();
  Lose(worker);
  const absl::Status status = Drain(*run);
  EXPECT_LT(absl::Now() - lost, absl::Seconds(2));
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ(ReasonOf(status), "WORKER_LOST");
  EXPECT_EQ(core->dispatcher().queued(), 1u) << "what has not started waits for the next worker";
  StartWorker("again");
  EXPECT_TRUE(Drain(*queued).ok());
}

TEST_F(SchedulerGenerateTest, ARefusalOfTheWorkerReachesTheClientWithItsReason) {
  Worker& worker = StartWorker();
  worker.engine.RefuseNext(Refuse(absl::StatusCode::kInvalidArgument, "NOT_FINITE", "text holds NaN", {{"tensor", "text"}}));
  const auto context = NewContext();
  const absl::Status status = Drain(*Start(context.get(), Header()));
  EXPECT_EQ(ReasonOf(status), "NOT_FINITE");
  EXPECT_EQ(DetailsOf(status)["tensor"], "text");
  EXPECT_EQ(Metric("h3_admission_rejections_total", "invalid_request"), 1);
}

TEST_F(SchedulerGenerateTest, RefusedAdaptersAreCountedByWhatIsWrongWithThem) {
  Worker& worker = StartWorker();
  EXPECT_EQ(ReasonOf(RefusalOf(Header(2, "reject/wrong_in"))), "SHAPE_MISMATCH");
  EXPECT_EQ(ReasonOf(RefusalOf(Header(2, "lora/nobody"))), "UNKNOWN_ADAPTER");
  worker.engine.RefuseNext(Refuse(absl::StatusCode::kInvalidArgument, "NOT_FINITE", "NaN", {{"adapter", "lora/turbo_bare"}}));
  const auto context = NewContext();
  EXPECT_EQ(ReasonOf(Drain(*Start(context.get(), Header(2, "lora/turbo_bare")))), "NOT_FINITE");
  EXPECT_EQ(Metric("h3_adapter_validation_failures_total", "shape_mismatch"), 1);
  EXPECT_EQ(Metric("h3_adapter_validation_failures_total", "not_finite"), 1);
  EXPECT_EQ(Metrics("h3_adapter_validation_failures_total", "").at(""), 2) << "nothing is wrong with an adapter that there is not";
  EXPECT_EQ(Metric("h3_admission_rejections_total", "invalid_adapter"), 3);
  EXPECT_GT(core->adapters_registered(), 0);
}

TEST_F(SchedulerGenerateTest, TwoWorkersRunTwoRequestsAtOnce) {
  Worker& one = StartWorker("one");
  Worker& two = StartWorker("two");
  one.engine.HoldSteps();
  two.engine.HoldSteps();
  const auto first = NewContext(), second = NewContext();
  const auto a = Start(first.get(), Header());
  const auto b = Start(second.get(), Header());
  EXPECT_TRUE(one.engine.WaitForBegun(1));
  EXPECT_TRUE(two.engine.WaitForBegun(1));
  one.engine.AllowSteps(100);
  two.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*a).ok());
  EXPECT_TRUE(Drain(*b).ok());
}

TEST_F(SchedulerGenerateTest, ADrainingServerRefusesNewWorkAndFinishesWhatItHas) {
  Worker& worker = StartWorker();
  const auto context = NewContext();
  const auto run = Occupy(worker, context.get());
  core->Drain();
  const absl::Status refused = RefusalOf(Header());
  EXPECT_EQ(refused.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(refused), "DRAINING");
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
}

TEST_F(SchedulerGenerateTest, WithoutAWorkerItSaysWhereToLook) {
  const absl::Status status = RefusalOf(Header());
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), "WORKER_LOST");
}

SchedulerOptions SmallBuffer() {
  SchedulerOptions options;
  options.max_buffered_bytes = 2000;
  return options;
}

class SchedulerBufferTest : public SchedulerFixture {
 protected:
  SchedulerBufferTest() : SchedulerFixture(SmallBuffer()) {}
};

TEST_F(SchedulerBufferTest, UploadsThatWouldFillTheMemoryAreRefusedUntilOthersHaveTheirResults) {
  Worker& worker = StartWorker();
  const auto context = NewContext(), next = NewContext();
  auto slow = generation->Generate(context.get());  // Announces 1176 bytes and keeps them for itself.
  slow->Write(Header());
  ASSERT_TRUE(Eventually([&] { return core->buffered_bytes() == 1176; }));
  const absl::Status refused = RefusalOf(Header());
  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReasonOf(refused), "QUEUE_FULL");
  worker.engine.HoldSteps();
  SendText(*slow);
  ASSERT_TRUE(worker.engine.WaitForBegun(1));
  EXPECT_EQ(core->buffered_bytes(), 1176) << "it may have to be sent to another worker";
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*slow).ok());
  EXPECT_EQ(core->buffered_bytes(), 0);
  EXPECT_TRUE(Drain(*Start(next.get(), Header())).ok());
}

}  // namespace
}  // namespace h3
