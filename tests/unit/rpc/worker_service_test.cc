#include "tests/unit/rpc/worker_fixture.h"

namespace h3 {
namespace {

class WorkerServiceTest : public WorkerFixture {
 protected:
  absl::StatusOr<v1::ResolvedAdapter> Load(v1::Worker::Stub& worker, const std::string& name) {
    v1::WorkerLoadAdapterRequest request;
    request.set_name(name);
    v1::WorkerLoadAdapterResponse response;
    const auto context = NewContext();
    const absl::Status status = FromGrpc(worker.LoadAdapter(context.get(), request, &response));
    if (!status.ok()) return status;
    return response.resolved();
  }
  absl::StatusOr<uint64_t> Unload(const std::string& digest) {
    v1::WorkerUnloadAdapterRequest request;
    request.set_digest(digest);
    v1::WorkerUnloadAdapterResponse response;
    const auto context = NewContext();
    const absl::Status status = FromGrpc(stub->UnloadAdapter(context.get(), request, &response));
    if (!status.ok()) return status;
    return response.freed_bytes();
  }
  v1::WorkerSnapshot Snapshot() {
    v1::GetSnapshotResponse response;
    const auto context = NewContext();
    EXPECT_TRUE(stub->GetSnapshot(context.get(), {}, &response).ok());
    return response.snapshot();
  }
};

TEST_F(WorkerServiceTest, LoadsAndUnloadsAdaptersOnTheDeviceThread) {
  const auto loaded = Load(*stub, "style");
  ASSERT_TRUE(loaded.ok()) << loaded.status();
  EXPECT_EQ(loaded->digest(), "digest-of-style");
  ASSERT_EQ(Snapshot().resident_size(), 1);
  EXPECT_EQ(Snapshot().memory().owners().adapters(), 100u);
  const auto freed = Unload("digest-of-style");
  ASSERT_TRUE(freed.ok()) << freed.status();
  EXPECT_EQ(*freed, 100u);
  EXPECT_EQ(Snapshot().resident_size(), 0);
  EXPECT_EQ(ReasonOf(Unload("digest-of-style").status()), reason::kUnknownAdapter);
}

TEST_F(WorkerServiceTest, ASnapshotDoesNotWaitForABusyDevice) {
  engine.HoldSteps();
  const auto context = NewContext();
  const auto run = StartRun(context.get(), 5);
  ASSERT_TRUE(engine.WaitForBegun(1));
  const v1::WorkerSnapshot snapshot = Snapshot();
  EXPECT_EQ(snapshot.running(), 1u);
  EXPECT_EQ(snapshot.model().base_fingerprint(), "fingerprint-of-fake");
  EXPECT_EQ(snapshot.memory().owners().base_weights(), snapshot.memory().used_bytes());
  engine.AllowSteps(100);
  ReadAll(*run);
  EXPECT_TRUE(End(*run).ok());
  EXPECT_TRUE(Eventually([&] { return Snapshot().running() == 0; }));
}

TEST_F(WorkerServiceTest, WatchTellsTheStateAtOnceAndThenItsChanges) {
  const auto context = NewContext();
  const auto watch = stub->Watch(context.get(), {});
  v1::WatchResponse response;
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_FALSE(response.snapshot().draining());
  EXPECT_EQ(response.snapshot().model().name(), "fake");
  service.Drain();
  do {
    ASSERT_TRUE(watch->Read(&response));
  } while (!response.snapshot().draining());
  context->TryCancel();
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(WorkerServiceTest, ADrainingWorkerFinishesWhatRunsAndRefusesTheRest) {
  const auto session_context = NewContext();
  const auto session = OpenSession(session_context.get());
  engine.HoldSteps();
  const auto context = NewContext();
  const auto run = StartRun(context.get(), 2);
  ASSERT_TRUE(engine.WaitForBegun(1));
  service.Drain();

  const auto late_context = NewContext();
  const auto late = StartRun(late_context.get(), 1);
  absl::Status status = End(*late);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(ReasonOf(status), reason::kDraining);
  EXPECT_EQ(ReasonOf(Load(*stub, "style").status()), reason::kDraining);
  EXPECT_TRUE(Eventually([&] { return service.Active() == 2; }));  // The refused call has ended.

  engine.AllowSteps(100);
  const auto events = ReadAll(*run);
  ASSERT_FALSE(events.empty());
  EXPECT_TRUE(events.back().has_completed());
  EXPECT_TRUE(End(*run).ok());
  SendEvaluation(*session, 0.5);
  ReadEvaluation(*session);
  session->WritesDone();
  EXPECT_TRUE(End(*session).ok());
  EXPECT_TRUE(Eventually([&] { return service.Active() == 0; }));
}

TEST_F(WorkerServiceTest, AFaultFailsEverythingInFlightAndIsToldOnce) {
  engine.HoldSteps();
  const auto first_context = NewContext(), second_context = NewContext();
  const auto first = StartRun(first_context.get(), 5);
  ASSERT_TRUE(engine.WaitForBegun(1));
  const auto second = StartRun(second_context.get(), 5);
  engine.Break(absl::InternalError("the device is gone"));
  for (GenerateStream* stream : {first.get(), second.get()}) {
    ReadAll(*stream);
    const absl::Status status = End(*stream);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
    EXPECT_EQ(ReasonOf(status), reason::kWorkerLost);
  }
  ASSERT_TRUE(faulted.WaitForNotificationWithTimeout(absl::Seconds(20)));
  EXPECT_EQ(fault.message(), "the device is gone");
  EXPECT_EQ(ReasonOf(Load(*stub, "style").status()), reason::kWorkerLost);
  EXPECT_TRUE(engine.WaitForIdle());
}

// Trailers beyond 8 KiB would reach a client as another error. In-process channels have no such limit: this one is a socket.
TEST_F(WorkerServiceTest, TheLongestRefusalPassesARealConnection) {
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const auto listening = builder.BuildAndStart();
  ASSERT_NE(port, 0);
  const auto remote =
      v1::Worker::NewStub(grpc::CreateChannel("127.0.0.1:" + std::to_string(port), grpc::InsecureChannelCredentials()));
  std::string text;
  while (text.size() < 5000) text += "\xe9\xa2\xa8\xe6\xa0\xbc";  // A name in Chinese: three bytes a character.
  ErrorDetails details = {{"field", text}, {"retry_seconds", "1"}};
  for (int i = 0; i < 20; ++i) details["tensor." + std::to_string(i)] = text;
  engine.RefuseNext(Refuse(absl::StatusCode::kInvalidArgument, reason::kUnknownModule, text, details));
  const absl::Status status = Load(*remote, "style").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_EQ(ReasonOf(status), reason::kUnknownModule);
  EXPECT_EQ(status.message(), absl::string_view(text).substr(0, 1023));
  listening->Shutdown(std::chrono::system_clock::now());
}

}  // namespace
}  // namespace h3
