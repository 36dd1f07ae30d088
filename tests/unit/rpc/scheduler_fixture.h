// The scheduler's services over workers with fake engines: real gRPC on every hop, the golden adapters.
#pragma once

#include <cstdlib>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/scheduler_rpc/scheduler_core.h"
#include "server/scheduler_rpc/scheduler_services.h"
#include "tests/testing/golden.h"
#include "tests/testing/temporary_directory.h"
#include "tests/unit/rpc/worker_fixture.h"

namespace h3 {

constexpr int64_t kSchedulerMaxRequest = 16 << 20;

class SchedulerFixture : public ::testing::Test {
 protected:
  explicit SchedulerFixture(SchedulerOptions options = {}) {
    options.adapters = testing::GoldenPath("");
    options.max_request_bytes = kSchedulerMaxRequest;
    // Threads of gRPC may still speak to a core when the test is over, as when the process ends: it is kept.
    static auto& kept = *new std::vector<std::unique_ptr<Kept>>;
    kept.push_back(std::make_unique<Kept>(std::move(options)));
    Kept& all = *kept.back();
    core = &all.core;
    registry = &all.registry;
    grpc::ServerBuilder builder;
    builder.RegisterService(&all.generation).RegisterService(&all.adapters).RegisterService(&all.presets).RegisterService(&all.operations);
    server = builder.BuildAndStart();
    const auto channel = server->InProcessChannel(grpc::ChannelArguments());
    generation = v1::Generation::NewStub(channel);
    adapters = v1::Adapters::NewStub(channel);
    presets = v1::Presets::NewStub(channel);
    operations = v1::Operations::NewStub(channel);
  }
  ~SchedulerFixture() override {
    for (auto& [name, worker] : workers) worker->engine.AllowSteps(1'000'000);
    server->Shutdown(std::chrono::system_clock::now());
    for (const auto& link : core->workers()) link->Disconnect("the test is over");
    for (auto& [name, worker] : workers) worker->server->Shutdown(std::chrono::system_clock::now());
  }

  struct Worker {
    testing::FakeEngine engine{64};
    SerialExecutor device{kDeviceQueue};
    prometheus::Registry registry;
    WorkerMetrics metrics{registry};
    WorkerService service{engine, device, metrics, {}};
    std::unique_ptr<grpc::Server> server;
  };

  // Starts a worker, or one that has been lost again, and waits until the scheduler uses it. `held`: with HoldSteps from the start.
  Worker& StartWorker(const std::string& name = "w", bool held = false) {
    auto worker = std::make_unique<Worker>();
    if (held) worker->engine.HoldSteps();
    const std::string address = absl::StrCat("unix:", sockets.path().string(), "/", name, ".sock");
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(&worker->service);
    worker->server = builder.BuildAndStart();
    std::shared_ptr<WorkerLink>& link = links[name];
    if (link == nullptr) {
      link = core->AddWorker(name);
      link->Connect(address);
    }
    EXPECT_TRUE(Eventually([&] { return link->state() == v1::WORKER_STATE_READY; }));
    return *(workers[name] = std::move(worker));
  }

  // As when its process dies.
  static void Lose(Worker& worker) {
    std::thread([&] { worker.server->Shutdown(std::chrono::system_clock::now()); }).join();
  }

  // tests/golden/inputs/t2va, from a seed.
  static v1::GenerateRequest Header(uint32_t evaluations = 2, const std::string& adapter = "", double strength = 1) {
    v1::GenerateRequest request;
    v1::GenerateHeader& header = *request.mutable_header();
    FillLayout(header);
    header.mutable_sampling()->set_seed(7);
    header.mutable_sampling()->set_evaluations(evaluations);
    if (!adapter.empty()) AddAdapter(header, adapter, strength);
    return request;
  }
  static v1::EvaluateRequest SessionHeader(const std::string& adapter = "", double strength = 1) {
    v1::EvaluateRequest request;
    FillLayout(*request.mutable_header());
    if (!adapter.empty()) AddAdapter(*request.mutable_header(), adapter, strength);
    return request;
  }
  static const std::vector<std::string>& Text() {
    static const auto& text = *new std::vector<std::string>{std::string(7 * 40 * 4, 't'), std::string(7 * 8, '\0')};
    return text;
  }

  template <typename Stream>
  static bool SendText(Stream& stream) {
    ChunkReader reader({Text().begin(), Text().end()});
    std::conditional_t<std::is_same_v<Stream, GenerateStream>, v1::GenerateRequest, v1::EvaluateRequest> request;
    while (reader.Next(*request.mutable_chunk())) {
      if (!stream.Write(request)) return false;
    }
    return true;
  }
  std::unique_ptr<GenerateStream> Start(grpc::ClientContext* context, const v1::GenerateRequest& header) {
    auto stream = generation->Generate(context);
    stream->Write(header);
    SendText(*stream);
    return stream;
  }
  // The refusal of a header, before any chunk was sent.
  absl::Status RefusalOf(const v1::GenerateRequest& header) {
    const auto context = NewContext();
    const auto stream = generation->Generate(context.get());
    stream->Write(header);
    v1::GenerateResponse response;
    EXPECT_FALSE(stream->Read(&response)) << response.ShortDebugString();
    return FromGrpc(stream->Finish());
  }
  // Reads until an event of that kind; false when the stream ends before.
  static bool ReadUntil(GenerateStream& stream, v1::GenerateResponse::EventCase kind, v1::GenerateResponse& event) {
    while (stream.Read(&event)) {
      if (event.event_case() == kind) return true;
    }
    return false;
  }
  static absl::Status Drain(GenerateStream& stream) {
    v1::GenerateResponse event;
    while (stream.Read(&event)) {
    }
    return FromGrpc(stream.Finish());
  }

  std::map<std::string, double> Metrics(const std::string& name, const std::string& first, const std::string& second = "") {
    return Samples(registry->Collect(), name, first, second);
  }
  // Of all series of a family that have the value in any label.
  double Metric(const std::string& name, const std::string& value) {
    double sum = 0;
    for (const char* label : {"code", "reason", "origin", "phase", "priority", "task"}) {
      const auto values = Metrics(name, label);
      if (const auto found = values.find(value); found != values.end()) sum += found->second;
    }
    return sum;
  }

  struct Kept {
    explicit Kept(SchedulerOptions options)
        : core(std::move(options), metrics, *StateStore::Open((state.path() / "state.sqlite").string()),
               *ContentStore::Create((state.path() / "blobs").string())) {}
    testing::TemporaryDirectory state;
    prometheus::Registry registry;
    SchedulerMetrics metrics{registry};
    SchedulerCore core;
    GenerationService generation{core};
    AdaptersService adapters{core};
    PresetsService presets{core};
    OperationsService operations{core};
  };

  testing::TemporaryDirectory sockets;
  std::map<std::string, std::unique_ptr<Worker>> workers;
  std::map<std::string, std::shared_ptr<WorkerLink>> links;
  SchedulerCore* core = nullptr;
  prometheus::Registry* registry = nullptr;
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<v1::Generation::Stub> generation;
  std::unique_ptr<v1::Adapters::Stub> adapters;
  std::unique_ptr<v1::Presets::Stub> presets;
  std::unique_ptr<v1::Operations::Stub> operations;

 private:
  template <typename H>
  static void FillLayout(H& header) {
    v1::Layout& layout = *header.mutable_layout();
    layout.set_text_tokens(7);
    layout.set_latent_frames(3);
    layout.set_latent_height(4);
    layout.set_latent_width(6);
    layout.set_audio_latents(5);
    v1::TensorSpec& text = *header.add_tensors();
    text.set_name("text");
    text.set_dtype(v1::DTYPE_F32);
    text.add_shape(7);
    text.add_shape(40);
    text.set_bytes(Text()[0].size());
    v1::TensorSpec& tags = *header.add_tensors();
    tags.set_name("text_token_tags");
    tags.set_dtype(v1::DTYPE_I64);
    tags.add_shape(7);
    tags.set_bytes(Text()[1].size());
  }
  template <typename H>
  static void AddAdapter(H& header, const std::string& adapter, double strength) {
    v1::StackEntry& entry = *header.add_stack();
    entry.set_adapter(adapter);
    entry.set_strength(strength);
  }
};

}  // namespace h3
