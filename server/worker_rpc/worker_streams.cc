// Generate and Evaluate of the Worker service.
#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/support/tensor_stream.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/stream_call.h"
#include "server/worker_rpc/worker_service.h"

namespace h3 {
namespace {

absl::Status QueueFull() {
  return Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "the worker's queue is full",
                {{"retry_seconds", "1"}});
}

std::vector<double> StrengthsOf(const std::vector<StackEntry>& stack) {
  std::vector<double> strengths;
  for (const StackEntry& entry : stack) strengths.push_back(entry.strength);
  return strengths;
}

// The sum over a stack of each adapter's largest rank.
double EffectiveRank(const std::vector<ResolvedAdapter>& stack) {
  int64_t sum = 0;
  for (const ResolvedAdapter& adapter : stack) {
    int64_t rank = 0;
    for (const EffectiveScale& scale : adapter.scales) rank = std::max(rank, scale.rank);
    sum += rank;
  }
  return static_cast<double>(sum);
}

StepKind KindOf(const Conditions& conditions) {
  return {std::string(TaskName(TaskOf(conditions.layout))), PackedRows(conditions.layout), conditions.stack.size()};
}

// What a call counts when it ends, and when its device is free after a cancel. Thread-safe.
class CallEnd {
 public:
  explicit CallEnd(WorkerMetrics& metrics) : metrics_(metrics) {}

  // Reading has ended: its client has said everything, or has left, which gRPC may tell later. What is concluded from now on counts when
  // the call is over.
  void HalfClosed() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    half_closed_ = true;
  }
  // The client has left.
  void Gone(const absl::Status& why) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    gone_at_ = absl::Now();
    if (device_free_) metrics_.cancel_latency_seconds.Observe(0);  // The end of its messages was heard first.
    CountLocked(why);
  }
  // The first counts.
  void Concluded(const absl::Status& status) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (!half_closed_) return CountLocked(status);
    if (!verdict_.has_value()) verdict_ = status;
  }
  void Over() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (verdict_.has_value()) CountLocked(*verdict_);
  }
  // What the call held on the device has been released.
  void DeviceFree() ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    device_free_ = true;
    if (gone_at_.has_value()) metrics_.cancel_latency_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - *gone_at_));
  }

 private:
  void CountLocked(const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    if (!counted_) metrics_.CountRequest(std::string(CodeName(status.code())));
    counted_ = true;
  }

  WorkerMetrics& metrics_;
  absl::Mutex mu_;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
  bool counted_ ABSL_GUARDED_BY(mu_) = false;
  bool device_free_ ABSL_GUARDED_BY(mu_) = false;
  std::optional<absl::Status> verdict_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Time> gone_at_ ABSL_GUARDED_BY(mu_);
};

// Chunks of tensors that stay alive until the last is written.
template <typename Response>
std::function<bool(Response&)> ChunksOf(std::vector<HostTensor> tensors) {
  struct State {
    std::vector<HostTensor> tensors;
    std::optional<ChunkReader> reader;
  };
  auto state = std::make_shared<State>();
  state->tensors = std::move(tensors);
  std::vector<absl::string_view> views;
  for (const HostTensor& tensor : state->tensors) views.emplace_back(tensor.data);
  state->reader.emplace(std::move(views));
  return [state](Response& response) { return state->reader->Next(*response.mutable_chunk()); };
}

class GenerateCall final : public StreamCall<v1::GenerateRequest, v1::GenerateResponse> {
 public:
  GenerateCall(WorkerService& service, grpc::CallbackServerContext* context)
      : StreamCall(context), service_(service), end_(service.metrics()) {
    ++service_.running();
  }

 private:
  void OnMessage(v1::GenerateRequest& request) override {
    const absl::Status status = Take(request);
    if (!status.ok()) {
      Conclude(status);
    } else if (!started_) {
      ReadMore();
    }
  }
  // Only while something is missing: nothing is read once the run is complete.
  void OnHalfClose() override {
    end_.HalfClosed();
    Conclude(assembler_.has_value() ? assembler_->CheckComplete()
                                    : RefuseArgument(reason::kBadRequest, "the call ended before its header"));
  }
  void OnGone(const absl::Status& why) override {
    end_.Gone(why);
    cancel_.Cancel(why);
  }
  void OnEnd() override {
    end_.Over();
    --service_.running();
  }

  absl::Status Take(v1::GenerateRequest& request) {
    if (request.has_header()) {
      if (assembler_.has_value()) return RefuseArgument(reason::kBadRequest, "a second header");
      H3_RETURN_IF_ERROR(service_.CheckServing());
      const v1::GenerateHeader& header = request.header();
      H3_RETURN_IF_ERROR(CheckTensorSpecs(header.tensors(), service_.options().max_request_bytes));
      H3_ASSIGN_OR_RETURN(spec_.conditions.layout, FromProto(header.layout()));
      H3_ASSIGN_OR_RETURN(spec_.conditions.stack, FromProto(header.stack()));
      H3_ASSIGN_OR_RETURN(spec_.schedule, ScheduleFromProto(header.sampling()));
      H3_RETURN_IF_ERROR(CheckStack(spec_.conditions.stack, spec_.schedule.evaluations()));
      if (header.sampling().has_seed()) spec_.seed = header.sampling().seed();
      assembler_.emplace(header.tensors());
    } else if (request.has_chunk()) {
      if (!assembler_.has_value()) return RefuseArgument(reason::kBadRequest, "a chunk before the header");
      H3_RETURN_IF_ERROR(assembler_->Add(request.chunk()));
    } else {
      return RefuseArgument(reason::kBadRequest, "an empty message");
    }
    if (assembler_->complete()) return Begin();
    return absl::OkStatus();
  }

  absl::Status Begin() {
    started_ = true;
    spec_.conditions.tensors = ToHostTensors(assembler_->specs(), assembler_->Take());
    auto self = std::static_pointer_cast<GenerateCall>(shared_from_this());
    return service_.device().Post([self] { self->StartOnDevice(); }) ? absl::OkStatus() : QueueFull();
  }

  // From here on the device thread.
  void StartOnDevice() {
    if (Stopped()) return;
    started_at_ = absl::Now();
    SendProgress(v1::PHASE_PREPARE, 0);
    service_.metrics().ObserveStack(StrengthsOf(spec_.conditions.stack));
    kind_ = KindOf(spec_.conditions);
    steps_ = spec_.schedule.evaluations();
    const Task task = TaskOf(spec_.conditions.layout);
    v1::GenerateResponse accepted;
    for (const float sigma : spec_.schedule.video) accepted.mutable_accepted()->add_video_sigmas(sigma);
    for (const float sigma : spec_.schedule.audio) accepted.mutable_accepted()->add_audio_sigmas(sigma);
    auto run = service_.engine().StartGeneration(std::move(spec_));
    if (!run.ok()) return End(run.status());
    run_ = std::move(*run);
    service_.metrics().ObserveEffectiveRank(EffectiveRank(run_->stack()));
    accepted.mutable_accepted()->set_task(ToProto(task));
    accepted.mutable_accepted()->set_partition(ToProto(service_.engine().model().partition));
    accepted.mutable_accepted()->set_base_fingerprint(service_.engine().model().fingerprint);
    for (const ResolvedAdapter& adapter : run_->stack()) *accepted.mutable_accepted()->add_stack() = ToProto(adapter);
    Send(std::move(accepted));
    Later();
  }

  void Later() {
    auto self = std::static_pointer_cast<GenerateCall>(shared_from_this());
    service_.device().Continue([self] { self->AdvanceOnDevice(); });
  }

  void AdvanceOnDevice() {
    if (Stopped()) return;
    const auto done = run_->Advance(cancel_);
    if (!done.ok()) {
      if (denoising_) service_.metrics().CountUnfinishedStep(kind_.task, cancel_.IsCancelled() ? "cancelled" : "failed");
      return End(done.status());
    }
    const auto step = static_cast<int64_t>(run_->timings().steps.size());
    if (step > 0) {
      service_.metrics().CountStep(kind_, absl::ToDoubleSeconds(run_->timings().steps.back()));
    } else {
      prepared_ = absl::Now();
    }
    denoising_ = true;
    SendProgress(v1::PHASE_DENOISE, step);
    if (!*done) return Later();

    v1::GenerateResponse completed;
    v1::Completed& summary = *completed.mutable_completed();
    const RunTimings timings = run_->timings();
    for (const ResolvedAdapter& adapter : run_->stack()) *summary.add_stack() = ToProto(adapter);
    auto tensors = run_->TakeResult();
    if (!tensors.ok()) return End(tensors.status());
    summary.set_prepare_seconds(absl::ToDoubleSeconds(timings.prepare));
    absl::Duration denoise;
    for (const absl::Duration step_time : timings.steps) {
      summary.add_step_seconds(absl::ToDoubleSeconds(step_time));
      denoise += step_time;
    }
    summary.set_denoise_seconds(absl::ToDoubleSeconds(denoise));
    summary.set_peak_bytes(static_cast<uint64_t>(run_->peak().value()));
    summary.set_planned_peak_bytes(static_cast<uint64_t>(run_->planned_peak().value()));
    summary.set_avoided_resident_bytes(static_cast<uint64_t>(run_->avoided_resident().value()));
    v1::GenerateResponse header;
    for (const HostTensor& tensor : *tensors) *header.mutable_result()->add_tensors() = SpecOf(tensor);
    Send(std::move(header));
    SendAll(ChunksOf<v1::GenerateResponse>(std::move(*tensors)));
    Send(std::move(completed));
    End(absl::OkStatus());
  }

  // True when nobody waits any more, or a fault has come: what the run holds is released, here on the device thread.
  bool Stopped() {
    absl::Status why = cancel_.Check("between evaluations");
    if (why.ok()) why = service_.CheckHealth();
    if (why.ok()) return false;
    End(why);
    return true;
  }

  void End(const absl::Status& status) {
    const bool held = run_ != nullptr;
    const absl::Duration took = held ? absl::Now() - started_at_ : absl::ZeroDuration();
    run_.reset();
    if (held) end_.DeviceFree();
    const absl::Status health = service_.CheckHealth();
    Conclude(health.ok() ? status : health);
    if (!held) return;
    // Between requests, when nobody waits for this one any more; the next one may.
    service_.engine().AuditBase(took / 100);
    service_.CheckHealth().IgnoreError();
  }

  // On any thread. The first counts.
  void Conclude(const absl::Status& status) {
    end_.Concluded(status);
    Close(status);
  }

  void SendProgress(v1::Phase phase, int64_t step) {
    v1::GenerateResponse response;
    v1::Progress& progress = *response.mutable_progress();
    progress.set_phase(phase);
    progress.set_step(static_cast<uint32_t>(step));
    progress.set_steps(static_cast<uint32_t>(steps_ > 0 ? steps_ : spec_.schedule.evaluations()));
    if (step > 0) {
      const double average = absl::ToDoubleSeconds(absl::Now() - prepared_) / static_cast<double>(step);
      progress.set_eta_seconds(average * static_cast<double>(steps_ - step));
    }
    Send(std::move(response));
  }

  WorkerService& service_;
  CancellationToken cancel_;
  std::optional<TensorAssembler> assembler_;
  GenerationSpec spec_;
  bool started_ = false;
  CallEnd end_;
  // On the device thread:
  std::unique_ptr<Generation> run_;
  int64_t steps_ = 0;
  StepKind kind_;
  bool denoising_ = false;
  absl::Time started_at_, prepared_;
};

class EvaluateCall final : public StreamCall<v1::EvaluateRequest, v1::EvaluateResponse> {
 public:
  EvaluateCall(WorkerService& service, grpc::CallbackServerContext* context)
      : StreamCall(context), service_(service), end_(service.metrics()) {
    ++service_.sessions();
  }

 private:
  void OnMessage(v1::EvaluateRequest& request) override {
    const absl::StatusOr<bool> more = Take(request);
    if (!more.ok()) return Fail(more.status());
    if (*more) ReadMore();
  }
  void OnHalfClose() override {
    end_.HalfClosed();
    if (!header_.has_value()) return Fail(RefuseArgument(reason::kBadRequest, "the call ended before its header"));
    if (assembler_.has_value()) return Fail(assembler_->CheckComplete());
    Release(absl::OkStatus());
  }
  void OnGone(const absl::Status& why) override {
    end_.Gone(why);
    cancel_.Cancel(why);
    Release(why);
  }
  void OnEnd() override {
    end_.Over();
    --service_.sessions();
  }

  // Whether more has to be read before the device has work. It reads on itself when it has done that, maybe before this
  // returns.
  absl::StatusOr<bool> Take(v1::EvaluateRequest& request) {
    if (request.has_header()) {
      if (header_.has_value()) return RefuseArgument(reason::kBadRequest, "a second header");
      H3_RETURN_IF_ERROR(service_.CheckServing());
      H3_RETURN_IF_ERROR(CheckTensorSpecs(request.header().tensors(), service_.options().max_request_bytes));
      H3_ASSIGN_OR_RETURN(conditions_.layout, FromProto(request.header().layout()));
      H3_ASSIGN_OR_RETURN(conditions_.stack, FromProto(request.header().stack()));
      H3_RETURN_IF_ERROR(CheckStack(conditions_.stack, 0));
      for (const v1::Timesteps& t : request.header().announced()) {
        if (!(t.video() >= 0 && t.video() <= 1 && t.audio() >= 0 && t.audio() <= 1)) {
          return RefuseArgument(reason::kBadRequest, "an announced timestep is outside 0 .. 1", {{"field", "announced"}});
        }
        announced_.emplace_back(static_cast<float>(t.video()), static_cast<float>(t.audio()));
      }
      header_ = request.header();
      assembler_.emplace(header_->tensors());
    } else if (request.has_evaluation()) {
      if (!ready_ || assembler_.has_value()) return RefuseArgument(reason::kBadRequest, "an evaluation out of turn");
      evaluation_ = request.evaluation();
      H3_RETURN_IF_ERROR(CheckTensorSpecs(evaluation_.tensors(), service_.options().max_request_bytes));
      H3_RETURN_IF_ERROR(TimestepsFromProto(evaluation_).status());
      assembler_.emplace(evaluation_.tensors());
    } else if (request.has_chunk()) {
      if (!assembler_.has_value()) return RefuseArgument(reason::kBadRequest, "a chunk that nothing announced");
      H3_RETURN_IF_ERROR(assembler_->Add(request.chunk()));
    } else {
      return RefuseArgument(reason::kBadRequest, "an empty message");
    }
    if (!assembler_->complete()) return true;
    std::vector<HostTensor> tensors = ToHostTensors(assembler_->specs(), assembler_->Take());
    assembler_.reset();
    auto self = std::static_pointer_cast<EvaluateCall>(shared_from_this());
    if (ready_) {
      // An evaluation of an open session is the continuation of accepted work.
      service_.device().Continue(
          [self, tensors = std::move(tensors)]() mutable { self->EvaluateOnDevice(std::move(tensors)); });
      return false;
    }
    conditions_.tensors = std::move(tensors);
    posted_ = true;  // Before the device has it: it may be done, and the next message here, before Post returns.
    if (service_.device().Post([self] { self->OpenOnDevice(); })) return false;
    posted_ = false;
    return QueueFull();
  }

  // The device thread.
  void OpenOnDevice() {
    if (cancel_.IsCancelled()) return;
    if (const absl::Status health = service_.CheckHealth(); !health.ok()) return End(health);
    const absl::Time begin = absl::Now();
    v1::EvaluateResponse response;
    response.mutable_accepted()->set_task(ToProto(TaskOf(conditions_.layout)));
    service_.metrics().ObserveStack(StrengthsOf(conditions_.stack));
    kind_ = KindOf(conditions_);
    auto session = service_.engine().OpenSession(std::move(conditions_), std::move(announced_), cancel_);
    if (!session.ok()) return End(session.status());
    session_ = std::move(*session);
    service_.metrics().ObserveEffectiveRank(EffectiveRank(session_->stack()));
    v1::Accepted& accepted = *response.mutable_accepted();
    accepted.set_partition(ToProto(service_.engine().model().partition));
    accepted.set_base_fingerprint(service_.engine().model().fingerprint);
    for (const ResolvedAdapter& adapter : session_->stack()) *accepted.add_stack() = ToProto(adapter);
    Send(std::move(response));
    v1::EvaluateResponse ready;
    ready.mutable_ready()->set_prepare_seconds(absl::ToDoubleSeconds(absl::Now() - begin));
    for (const ResolvedAdapter& adapter : session_->stack()) *ready.mutable_ready()->add_stack() = ToProto(adapter);
    Send(std::move(ready));
    ready_ = true;
    ReadMore();
  }

  void EvaluateOnDevice(std::vector<HostTensor> tensors) {
    if (cancel_.IsCancelled() || session_ == nullptr) return;
    if (const absl::Status health = service_.CheckHealth(); !health.ok()) return End(health);
    const absl::Time begin = absl::Now();
    EvaluationSpec spec{.index = evaluation_.has_index() ? evaluation_.index() : count_,
                        .factors = {evaluation_.factors().begin(), evaluation_.factors().end()},
                        .include_condition_rows = header_->include_condition_rows()};
    const auto timesteps = TimestepsFromProto(evaluation_);
    H3_CHECK(timesteps.ok());
    std::tie(spec.t_video, spec.t_audio) = *timesteps;
    for (HostTensor& tensor : tensors) {
      if (tensor.name == "target_video_rows" || tensor.name == "target_video") {
        spec.video = std::move(tensor);
      } else if (tensor.name == "target_audio_rows") {
        spec.audio = std::move(tensor);
      } else {
        return End(RefuseArgument(reason::kBadTensor, absl::StrCat("tensor ", tensor.name, ": an evaluation has no use for it"),
                                  {{"tensor", tensor.name}}));
      }
    }
    auto velocity = session_->Evaluate(spec, cancel_);
    if (!velocity.ok()) {
      // What is refused was not begun.
      if (!absl::IsInvalidArgument(velocity.status()))
        service_.metrics().CountUnfinishedStep(kind_.task, cancel_.IsCancelled() ? "cancelled" : "failed");
      return End(velocity.status());
    }
    const double seconds = absl::ToDoubleSeconds(absl::Now() - begin);
    service_.metrics().CountStep(kind_, seconds);
    v1::EvaluateResponse response;
    v1::EvaluationResult& result = *response.mutable_result();
    for (const HostTensor& tensor : *velocity) *result.add_tensors() = SpecOf(tensor);
    result.mutable_timesteps()->set_video(spec.t_video);
    result.mutable_timesteps()->set_audio(spec.t_audio);
    result.set_index(static_cast<uint32_t>(spec.index));
    result.set_seconds(seconds);
    Send(std::move(response));
    SendAll(ChunksOf<v1::EvaluateResponse>(std::move(*velocity)));
    ++count_;
    ReadMore();
  }

  void End(const absl::Status& status) {
    const bool held = session_ != nullptr;
    session_.reset();
    if (held) end_.DeviceFree();
    const absl::Status health = service_.CheckHealth();
    Conclude(health.ok() ? status : health);
  }

  // From reactions. A refusal does not wait for the device while the device knows nothing of this session.
  void Fail(const absl::Status& status) {
    cancel_.Cancel(status);
    if (posted_) {
      Release(status);
    } else {
      Conclude(status);
    }
  }

  // Frees the session on the device thread, then ends the call: who sees it end sees its memory free.
  void Release(const absl::Status& status) {
    auto self = std::static_pointer_cast<EvaluateCall>(shared_from_this());
    service_.device().Continue([self, status] { self->End(status); });
  }

  // On any thread. The first counts.
  void Conclude(const absl::Status& status) {
    end_.Concluded(status);
    Close(status);
  }

  WorkerService& service_;
  CancellationToken cancel_;
  std::optional<v1::EvaluateHeader> header_;
  std::optional<TensorAssembler> assembler_;
  Conditions conditions_;
  std::vector<std::pair<float, float>> announced_;
  v1::Evaluation evaluation_;
  bool posted_ = false;
  CallEnd end_;
  // Written by the device thread while no read is outstanding, and by reactions while the device has nothing of this session.
  bool ready_ = false;
  // On the device thread:
  std::unique_ptr<Session> session_;
  StepKind kind_;
  int64_t count_ = 0;
};

}  // namespace

grpc::ServerBidiReactor<v1::GenerateRequest, v1::GenerateResponse>* WorkerService::Generate(
    grpc::CallbackServerContext* context) {
  auto call = std::make_shared<GenerateCall>(*this, context);
  call->Start();
  return call.get();
}

grpc::ServerBidiReactor<v1::EvaluateRequest, v1::EvaluateResponse>* WorkerService::Evaluate(
    grpc::CallbackServerContext* context) {
  auto call = std::make_shared<EvaluateCall>(*this, context);
  call->Start();
  return call.get();
}

}  // namespace h3
