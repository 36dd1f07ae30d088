#include <fstream>
#include <iterator>

#include "server/base/sha256.h"
#include "tests/unit/rpc/scheduler_fixture.h"

namespace h3 {
namespace {

class SchedulerAdaptersTest : public SchedulerFixture {
 protected:
  v1::Adapter Listed(const std::string& name) {
    const auto context = NewContext();
    v1::ListAdaptersResponse response;
    EXPECT_TRUE(adapters->ListAdapters(context.get(), {}, &response).ok());
    for (const v1::Adapter& adapter : response.adapters()) {
      if (adapter.name() == name) return adapter;
    }
    ADD_FAILURE() << name << " is not listed";
    return {};
  }
  absl::Status Load(const std::string& name, v1::LoadAdapterResponse* response) {
    const auto context = NewContext();
    v1::LoadAdapterRequest request;
    request.set_name(name);
    return FromGrpc(adapters->LoadAdapter(context.get(), request, response));
  }
  absl::Status Unload(const std::string& name, v1::UnloadAdapterResponse* response) {
    const auto context = NewContext();
    v1::UnloadAdapterRequest request;
    request.set_name(name);
    return FromGrpc(adapters->UnloadAdapter(context.get(), request, response));
  }
};

TEST_F(SchedulerAdaptersTest, ListsWhatTheDirectoryHoldsAndKnowsADigestOnceAFileWasRead) {
  StartWorker();
  EXPECT_GT(Listed("lora/turbo_bare").file_bytes(), 0u);
  EXPECT_EQ(Listed("lora/turbo_bare").digest(), "");
  v1::LoadAdapterResponse loaded;
  ASSERT_TRUE(Load("lora/turbo_bare", &loaded).ok());
  EXPECT_EQ(Listed("lora/turbo_bare").digest(), loaded.adapter().digest());
}

TEST_F(SchedulerAdaptersTest, LoadsAndUnloadsOnEveryWorker) {
  StartWorker("one");
  StartWorker("two");
  v1::LoadAdapterResponse loaded;
  ASSERT_TRUE(Load("lora/turbo_bare", &loaded).ok());
  EXPECT_EQ(loaded.adapter().digest().size(), 64u);
  EXPECT_TRUE(loaded.adapter().resident());
  EXPECT_EQ(loaded.resolved().adapter(), "lora/turbo_bare");
}

TEST_F(SchedulerAdaptersTest, ContentIsFoundByItsDigestBeforeAnyoneNamedItsFile) {
  StartWorker();
  std::ifstream file(testing::GoldenPath("lora/style_bf16.safetensors"), std::ios::binary);
  const std::string digest = Sha256Hex(std::string(std::istreambuf_iterator<char>(file), {}));
  v1::LoadAdapterResponse loaded;
  ASSERT_TRUE(Load("sha256:" + digest, &loaded).ok());
  EXPECT_EQ(loaded.adapter().digest(), digest);
}

TEST_F(SchedulerAdaptersTest, RefusalsNameTheAdapterAndNoPath) {
  StartWorker();
  for (const std::string name : {"lora/nobody", "../golden/lora/turbo_bare", "/etc/passwd", "sha256:zz"}) {
    v1::LoadAdapterResponse loaded;
    const absl::Status status = Load(name, &loaded);
    EXPECT_EQ(ReasonOf(status), "UNKNOWN_ADAPTER") << status;
    EXPECT_EQ(status.message().find("tests/golden"), absl::string_view::npos) << status;
  }
  v1::UnloadAdapterResponse unloaded;
  EXPECT_EQ(Unload("lora/turbo_bare", &unloaded).code(), absl::StatusCode::kNotFound) << "it is not resident";
}

class SchedulerOperationsTest : public SchedulerFixture {};

TEST_F(SchedulerOperationsTest, StatusTellsTheQueueAndEveryWorker) {
  Worker& worker = StartWorker();
  worker.engine.HoldSteps();
  const auto first = NewContext(), second = NewContext();
  const auto run = Start(first.get(), Header());
  ASSERT_TRUE(worker.engine.WaitForBegun(1));
  const auto queued = Start(second.get(), Header());
  ASSERT_TRUE(Eventually([&] { return core->dispatcher().queued() == 1; }));
  const auto context = NewContext();
  v1::GetStatusResponse status;
  ASSERT_TRUE(operations->GetStatus(context.get(), {}, &status).ok());
  EXPECT_EQ(status.queued(), 1u);
  EXPECT_EQ(status.running(), 1u);
  ASSERT_EQ(status.workers_size(), 1);
  EXPECT_EQ(status.workers(0).worker(), "w");
  EXPECT_EQ(status.workers(0).state(), v1::WORKER_STATE_READY);
  EXPECT_EQ(status.workers(0).base_fingerprint(), "fingerprint-of-fake");
}

TEST_F(SchedulerOperationsTest, StatusShowsNoWorkThatIsOverOrOnAWorkerThatIsLost) {
  Worker& worker = StartWorker();
  const auto status = [&] {
    const auto context = NewContext();
    v1::GetStatusResponse response;
    EXPECT_TRUE(operations->GetStatus(context.get(), {}, &response).ok());
    EXPECT_EQ(response.workers_size(), 1);
    return response.workers_size() == 1 ? response.workers(0) : v1::WorkerStatus();
  };
  // Known at once, not with the next heartbeat.
  worker.engine.HoldSteps();
  const auto first = NewContext();
  const auto run = Start(first.get(), Header(1));
  ASSERT_TRUE(worker.engine.WaitForBegun(1));
  EXPECT_EQ(status().running(), 1u);
  worker.engine.AllowSteps(100);
  EXPECT_TRUE(Drain(*run).ok());
  EXPECT_TRUE(Eventually([&] { return status().running() == 0; }));

  worker.engine.HoldSteps();
  const auto second = NewContext();
  const auto lost = Start(second.get(), Header(1));
  ASSERT_TRUE(Eventually([&] { return status().running() == 1; }));
  links.at("w")->Disconnect("killed");
  const v1::WorkerStatus gone = status();
  EXPECT_EQ(gone.state(), v1::WORKER_STATE_LOST);
  EXPECT_EQ(gone.device(), "cpu");  // What it is stays known.
  EXPECT_EQ(gone.running(), 0u);
}

TEST_F(SchedulerOperationsTest, MemoryIsFreshAndDoesNotWaitForTheDevice) {
  Worker& worker = StartWorker();
  worker.engine.HoldSteps();
  const auto running = NewContext();
  const auto run = Start(running.get(), Header());
  ASSERT_TRUE(worker.engine.WaitForBegun(1));
  const auto context = NewContext(absl::Seconds(5));
  v1::GetMemoryResponse memory;
  ASSERT_TRUE(operations->GetMemory(context.get(), {}, &memory).ok());
  ASSERT_EQ(memory.devices_size(), 1);
  EXPECT_EQ(memory.devices(0).worker(), "w");
  EXPECT_EQ(memory.devices(0).owners().base_weights(), static_cast<uint64_t>(MiB(1).value()));
}

TEST_F(SchedulerOperationsTest, WatchingMemoryRepeatsUntilTheClientLeaves) {
  StartWorker();
  const auto context = NewContext();
  v1::WatchMemoryRequest request;
  request.set_interval_seconds(0.1);
  const auto watch = operations->WatchMemory(context.get(), request);
  v1::WatchMemoryResponse response;
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(watch->Read(&response));
  context->TryCancel();
  EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
}

TEST_F(SchedulerOperationsTest, AnAbsurdWatchIntervalIsRefused) {
  const auto context = NewContext();
  v1::WatchMemoryRequest request;
  request.set_interval_seconds(1e9);
  const auto watch = operations->WatchMemory(context.get(), request);
  EXPECT_EQ(ReasonOf(FromGrpc(watch->Finish())), "BAD_REQUEST");
}

TEST_F(SchedulerOperationsTest, ALostWorkerIsReportedAndComesBack) {
  Worker& worker = StartWorker();
  worker.server->Shutdown(std::chrono::system_clock::now());
  EXPECT_TRUE(Eventually([&] { return core->workers()[0]->state() == v1::WORKER_STATE_LOST; }));
  EXPECT_FALSE(core->AnyReady());
  StartWorker();  // Under the same name and address.
  EXPECT_TRUE(core->AnyReady());
}

TEST_F(SchedulerFixture, MemoryThatIsTwoHeartbeatsOldIsNotShownAsFresh) {
  StartWorker("one");
  const absl::Time heard = core->workers().front()->heard();
  const auto fresh = core->WorkerReports(heard + absl::Milliseconds(1900));
  ASSERT_EQ(fresh.size(), 1u);
  EXPECT_EQ(fresh.front().worker, "one");
  EXPECT_EQ(fresh.front().state, "ready");
  ASSERT_TRUE(fresh.front().memory.has_value());
  EXPECT_EQ(fresh.front().memory->total, GiB(1));
  // Later than whatever heartbeat may have come since.
  EXPECT_FALSE(core->WorkerReports(absl::Now() + absl::Milliseconds(2100)).front().memory.has_value());
}

}  // namespace
}  // namespace h3
