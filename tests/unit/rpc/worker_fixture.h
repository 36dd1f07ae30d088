// A worker service over a fake engine, called over real gRPC in this process.
#pragma once

#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <map>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "h3/v1/worker.grpc.pb.h"
#include "proto/support/status.h"
#include "proto/support/tensor_stream.h"
#include "server/base/serial_executor.h"
#include "server/worker_rpc/worker_service.h"
#include "tests/testing/fake_engine.h"
#include "tests/unit/metrics/samples.h"

namespace h3 {

constexpr int64_t kMaxRequestBytes = 64 << 20;
constexpr size_t kDeviceQueue = 4;

using GenerateStream = grpc::ClientReaderWriter<v1::GenerateRequest, v1::GenerateResponse>;
using EvaluateStream = grpc::ClientReaderWriter<v1::EvaluateRequest, v1::EvaluateResponse>;

// Every call has a deadline, so that a hanging server fails a test instead of stopping it.
inline std::unique_ptr<grpc::ClientContext> NewContext(absl::Duration timeout = absl::Seconds(30)) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + absl::ToChronoMilliseconds(timeout));
  return context;
}

// For what nothing announces. False after 20 seconds.
template <typename Predicate>
bool Eventually(const Predicate& predicate) {
  for (int i = 0; i < 20000; ++i) {
    if (predicate()) return true;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return false;
}

// Keeps a device thread busy while it lives. What the thread waits on is owned by both, since it may wake up last.
class BusyDevice {
 public:
  explicit BusyDevice(SerialExecutor& device) : state_(std::make_shared<State>()) {
    device.Continue([state = state_] {
      state->taken.Notify();
      state->release.WaitForNotification();
    });
    state_->taken.WaitForNotification();
  }
  ~BusyDevice() { state_->release.Notify(); }
  BusyDevice(const BusyDevice&) = delete;
  BusyDevice& operator=(const BusyDevice&) = delete;

 private:
  struct State {
    absl::Notification taken, release;
  };
  const std::shared_ptr<State> state_;
};

class WorkerFixture : public ::testing::Test {
 protected:
  explicit WorkerFixture(int64_t result_bytes = 64) : engine(result_bytes) {
    grpc::ServerBuilder builder;
    builder.RegisterService(&service);
    server = builder.BuildAndStart();
    stub = v1::Worker::NewStub(server->InProcessChannel(grpc::ChannelArguments()));
  }
  ~WorkerFixture() override { server->Shutdown(std::chrono::system_clock::now()); }

  static v1::TensorSpec Spec(const std::string& name, int64_t floats) {
    v1::TensorSpec spec;
    spec.set_name(name);
    spec.set_dtype(v1::DTYPE_F32);
    spec.add_shape(floats);
    spec.set_bytes(static_cast<uint64_t>(floats) * 4);
    return spec;
  }

  // A run of `evaluations` with one tensor, "text", of `text_floats`.
  static v1::GenerateRequest GenerateHeader(uint32_t evaluations, int64_t text_floats = 2) {
    v1::GenerateRequest request;
    v1::GenerateHeader& header = *request.mutable_header();
    header.mutable_layout()->set_text_tokens(1);
    header.mutable_sampling()->set_seed(7);
    header.mutable_sampling()->set_evaluations(evaluations);
    *header.add_tensors() = Spec("text", text_floats);
    return request;
  }
  static v1::EvaluateRequest EvaluateHeader() {
    v1::EvaluateRequest request;
    request.mutable_header()->mutable_layout()->set_text_tokens(1);
    *request.mutable_header()->add_tensors() = Spec("text", 2);
    return request;
  }
  static v1::EvaluateRequest Evaluation(double t) {
    v1::EvaluateRequest request;
    request.mutable_evaluation()->mutable_timesteps()->set_video(t);
    request.mutable_evaluation()->mutable_timesteps()->set_audio(t);
    *request.mutable_evaluation()->add_tensors() = Spec("target_video_rows", 2);
    *request.mutable_evaluation()->add_tensors() = Spec("target_audio_rows", 2);
    return request;
  }

  template <typename Stream>
  static bool SendChunks(Stream& stream, const std::vector<std::string>& data) {
    ChunkReader reader({data.begin(), data.end()});
    typename std::conditional_t<std::is_same_v<Stream, GenerateStream>, v1::GenerateRequest, v1::EvaluateRequest> request;
    while (reader.Next(*request.mutable_chunk())) {
      if (!stream.Write(request)) return false;
    }
    return true;
  }

  // Starts a run whose tensors have all been sent.
  std::unique_ptr<GenerateStream> StartRun(grpc::ClientContext* context, uint32_t evaluations) {
    auto stream = stub->Generate(context);
    stream->Write(GenerateHeader(evaluations));
    SendChunks(*stream, {std::string(8, 't')});
    return stream;
  }
  // Opens a session and reads until it is ready.
  std::unique_ptr<EvaluateStream> OpenSession(grpc::ClientContext* context) {
    auto stream = stub->Evaluate(context);
    stream->Write(EvaluateHeader());
    SendChunks(*stream, {std::string(8, 't')});
    v1::EvaluateResponse response;
    EXPECT_TRUE(stream->Read(&response) && response.has_accepted());
    EXPECT_TRUE(stream->Read(&response) && response.has_ready());
    return stream;
  }
  static void SendEvaluation(EvaluateStream& stream, double t) {
    stream.Write(Evaluation(t));
    SendChunks(stream, {std::string(8, 'v'), std::string(8, 'a')});
  }
  // Reads the answer to one evaluation of a fake with a small result.
  static v1::EvaluationResult ReadEvaluation(EvaluateStream& stream) {
    v1::EvaluateResponse response;
    EXPECT_TRUE(stream.Read(&response) && response.has_result()) << response.ShortDebugString();
    const v1::EvaluationResult result = response.result();
    for (int i = 0; i < result.tensors_size(); ++i) EXPECT_TRUE(stream.Read(&response) && response.has_chunk());
    return result;
  }

  static std::vector<v1::GenerateResponse> ReadAll(GenerateStream& stream) {
    std::vector<v1::GenerateResponse> responses;
    v1::GenerateResponse response;
    while (stream.Read(&response)) responses.push_back(response);
    return responses;
  }
  template <typename Stream>
  static absl::Status End(Stream& stream) {
    return FromGrpc(stream.Finish());
  }

  double Requests(const std::string& code) { return Metric("h3_worker_requests_total", "code").at(code); }
  std::map<std::string, double> Metric(const std::string& name, const std::string& first = "", const std::string& second = "") {
    return Samples(registry.Collect(), name, first, second);
  }

  testing::FakeEngine engine;
  SerialExecutor device{kDeviceQueue};
  prometheus::Registry registry;
  WorkerMetrics metrics{registry};
  absl::Notification faulted;
  absl::Status fault;  // Once `faulted`.
  WorkerService service{engine, device, metrics, {.max_request_bytes = kMaxRequestBytes, .on_fault = [this](absl::Status why) {
                                                    fault = std::move(why);
                                                    faulted.Notify();  // Twice would abort.
                                                  }}};
  std::unique_ptr<grpc::Server> server;
  std::unique_ptr<v1::Worker::Stub> stub;
};

}  // namespace h3
