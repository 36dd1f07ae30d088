// Generate of a scheduler: check, resolve, receive, queue, relay.
#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/time/clock.h"
#include "server/rpc/stream_call.h"
#include "server/scheduler_rpc/client_stream.h"
#include "server/scheduler_rpc/relay.h"
#include "server/scheduler_rpc/scheduler_services.h"

namespace h3 {
namespace {

constexpr size_t kMaxRequestId = 128;

PriorityClass ToPriority(v1::Priority priority) {
  return priority == v1::PRIORITY_HIGH  ? PriorityClass::kHigh
         : priority == v1::PRIORITY_LOW ? PriorityClass::kLow
                                        : PriorityClass::kNormal;
}

const char* PriorityName(PriorityClass priority) {
  return priority == PriorityClass::kHigh ? "high" : priority == PriorityClass::kLow ? "low" : "normal";
}

class GenerateRelay;

// The call to the worker.
class WorkerGenerate final : public ClientStream<v1::GenerateRequest, v1::GenerateResponse> {
 public:
  WorkerGenerate(std::shared_ptr<GenerateRelay> relay, std::string worker)
      : relay_(std::move(relay)), worker_(std::move(worker)) {}

 private:
  void OnMessage(v1::GenerateResponse response) override;
  void OnEnd(const grpc::Status& status) override;

  const std::shared_ptr<GenerateRelay> relay_;
  const std::string worker_;
};

class GenerateRelay final : public StreamCall<v1::GenerateRequest, v1::GenerateResponse>, public Ticket {
 public:
  GenerateRelay(SchedulerCore& core, grpc::CallbackServerContext* context)
      : StreamCall(context), core_(core), start_(absl::Now()) {}

  // From the worker. Of progress a slow client gets the newest; results are passed on one by one, the next is read when this
  // one is written. The next request starts on the worker as soon as this one has computed, however slowly its client reads.
  void OnWorkerMessage(WorkerGenerate& stream, v1::GenerateResponse response) {
    begun_ = true;
    if (response.has_accepted()) {
      worker_accepted_ = true;
      return stream.ReadMore();  // Ours went out when the request was queued.
    }
    if (response.has_progress()) {
      if (response.progress().phase() == v1::PHASE_DENOISE) Enter(RequestPhase::kDenoise);
      step_ = response.progress().step();
      response.mutable_progress()->set_attempt(Attempt());
      SendNewest(std::move(response));
      return stream.ReadMore();
    }
    if (response.has_result()) {
      has_result_ = true;
      ForgetTensors();
      Enter(RequestPhase::kStream);
      core_.Finish(Id(), absl::ToDoubleSeconds(absl::Now() - assigned_at_));
    }
    if (response.has_completed()) {
      response.mutable_completed()->set_queued_seconds(absl::ToDoubleSeconds(assigned_at_ - queued_at_));
      response.mutable_completed()->set_worker(worker_->name());
    }
    const size_t bytes = response.chunk().data().size();
    // More is wanted only once this is being written: what drained before, a progress, must not let the next one overtake it.
    Send(std::move(response), [this, bytes] {
      if (bytes > 0) core_.metrics().CountOutput(std::string(TaskName(request_.task)), bytes);
      WantMore();
    });
  }
  void OnWorkerEnd(const absl::Status& status) {
    {
      absl::MutexLock lock(&relay_mu_);
      stream_ = nullptr;
    }
    // Before its place is given away: what waits must not be sent after it.
    if (absl::IsUnavailable(status) && !Gone()) worker_->Suspect(std::string(status.message()));
    if (!worker_accepted_ && !Gone()) core_.CountWorkerRefusal(status);
    LeaveWorker();
    const bool lost = ReasonOf(status) == reason::kWorkerLost && !has_result_ && !Gone();
    const absl::Status end = lost ? CheckRetry(status) : status;
    if (lost && end.ok()) return RunAgain(*worker_);
    core_.Finish(Id(), std::nullopt);  // Where there was no result.
    End(end);
  }

  // Ticket.
  void OnPlace(const Dispatcher::Place& place) override {
    {
      absl::MutexLock lock(&relay_mu_);
      if (last_position_ == place.position) return;
      last_position_ = place.position;
    }
    SendNewest(Queued(place));
  }
  bool OnAssigned(std::shared_ptr<WorkerLink> worker) override {
    assigned_at_ = absl::Now();
    const std::shared_ptr<v1::Worker::Stub> stub = worker->stub();
    auto self = std::static_pointer_cast<GenerateRelay>(shared_from_this());
    auto stream = std::make_shared<WorkerGenerate>(self, worker->name());
    worker_ = std::move(worker);
    worker_accepted_ = begun_ = false;
    step_ = 0;
    {
      absl::MutexLock lock(&relay_mu_);
      if (gone_) return false;
      if (stub != nullptr) stream_ = stream;
    }
    if (stub == nullptr) {  // Lost between the decision and now.
      core_.Requeue(Id(), *worker_, self);
      WithdrawIfGone();
      return true;
    }
    if (Attempt() == 0) {
      core_.metrics().ObserveQueueWait(PriorityName(ToPriority(header_.priority())),
                                       absl::ToDoubleSeconds(assigned_at_ - queued_at_));
    }
    Enter(RequestPhase::kPrepare);
    stream->context()->set_deadline(context()->deadline());
    stub->async()->Generate(stream->context(), stream.get());
    v1::GenerateRequest header;
    *header.mutable_header() = header_;
    stream->Send(std::move(header));
    SendChunks(*stream);
    stream->HalfClose();
    stream->Begin();
    return true;
  }

 private:
  void OnMessage(v1::GenerateRequest& request) override {
    const absl::Status status = Take(request);
    if (!status.ok()) Refused(status);
  }
  void OnHalfClose() override {
    if (submitted_) return;
    const absl::Status status = assembler_.has_value() ? assembler_->CheckComplete()
                                                       : RefuseArgument(reason::kBadRequest, "the call ended before its header");
    if (status.ok()) return;
    // Reading ends in this way too when the client has left, which OnGone may tell later: counted in OnEnd.
    half_closed_ = status;
    Close(status);
  }
  void OnGone(const absl::Status& why) override {
    std::shared_ptr<WorkerGenerate> stream;
    RequestId id = 0;
    {
      absl::MutexLock lock(&relay_mu_);
      gone_ = true;
      stream = stream_;
      id = id_;
    }
    core_.metrics().CountCancellation(why.code() == absl::StatusCode::kDeadlineExceeded ? "deadline" : "client");
    End(why);  // First: how the worker's call ends is not how this one did.
    if (stream != nullptr) {
      stream->Cancel();
    } else if (id != 0) {
      core_.Withdraw(id);
    }
  }
  void OnEnd() override {
    GiveBuffer();
    Refused(half_closed_);
    CountLeaving(/*ended=*/true);
    LeaveClient();
  }
  // A message has been passed on: the worker's next one is wanted.
  void OnDrained() override {
    std::shared_ptr<WorkerGenerate> stream;
    {
      absl::MutexLock lock(&relay_mu_);
      if (!want_more_) return;
      want_more_ = false;
      stream = stream_;
    }
    if (stream != nullptr) stream->ReadMore();
  }

  // Whether a request that lost its worker is run again; otherwise how it ends. Two losses in a row at the same step of it, each
  // after the worker had begun with it, are the request's own doing. Where workers are killed for other reasons it is hit at
  // different steps.
  absl::Status CheckRetry(const absl::Status& lost) {
    if (begun_) {
      const std::optional<uint32_t> before = std::exchange(lost_at_, step_);
      if (before.has_value() && std::max(*before, step_) - std::min(*before, step_) <= 1) {
        core_.metrics().requests_poisonous.Increment();
        return Refuse(absl::StatusCode::kFailedPrecondition, reason::kRequestKillsWorkers,
                      absl::StrCat("two workers in a row were lost at step ", step_, " of this request, the last one was ",
                                   worker_->name(), "; do not send it again, keep it for a report"),
                      {{"worker", worker_->name()}, {"step", absl::StrCat(step_)}});
      }
    }
    return Attempt() < core_.options().retries ? absl::OkStatus() : lost;
  }
  // From the start, on whichever worker is free next.
  void RunAgain(WorkerLink& lost) {
    {
      absl::MutexLock lock(&relay_mu_);
      ++attempt_;
      newest_.reset();
      last_position_ = 0;  // Or it is told another one.
    }
    core_.metrics().requests_retried.Increment();
    Enter(RequestPhase::kQueue);
    Send(Queued({}));  // Not in the place of other progress: the client shall see each attempt.
    core_.Requeue(Id(), lost, std::static_pointer_cast<GenerateRelay>(shared_from_this()));
    WithdrawIfGone();
  }
  // It may have left when there was nothing to withdraw.
  void WithdrawIfGone() {
    if (Gone()) core_.Withdraw(Id());
  }
  v1::GenerateResponse Queued(const Dispatcher::Place& place) {
    v1::GenerateResponse response;
    v1::Progress& progress = *response.mutable_progress();
    progress.set_phase(v1::PHASE_QUEUED);
    progress.set_queue_position(place.position);
    progress.set_steps(static_cast<uint32_t>(schedule_.evaluations()));
    progress.set_eta_seconds(place.eta_seconds);
    progress.set_attempt(Attempt());
    return response;
  }

  // Leaves when the request was admitted and the call has ended, whichever comes last: a client may go while it is admitted.
  void CountLeaving(bool ended) {
    {
      absl::MutexLock lock(&relay_mu_);
      (ended ? ended_ : admitted_) = true;
      if (!ended_ || !admitted_) return;
    }
    core_.Leave();
  }

  // The next phase; a call that has ended has none. The one before counts as gone through.
  void Enter(RequestPhase next) {
    absl::MutexLock lock(&relay_mu_);
    if (phase_ != next) ChangePhaseLocked(ended_ ? std::nullopt : std::optional(next), /*through=*/true);
  }
  // A request is in the worker's phases until its call to the worker has ended, and in the others until its client's has.
  void LeaveWorker() {
    absl::MutexLock lock(&relay_mu_);
    if (phase_ == RequestPhase::kPrepare || phase_ == RequestPhase::kDenoise) ChangePhaseLocked(std::nullopt, /*through=*/false);
  }
  void LeaveClient() {
    absl::MutexLock lock(&relay_mu_);
    if (phase_ == RequestPhase::kQueue || phase_ == RequestPhase::kStream) ChangePhaseLocked(std::nullopt, completed_);
  }
  void ChangePhaseLocked(std::optional<RequestPhase> next, bool through) ABSL_EXCLUSIVE_LOCKS_REQUIRED(relay_mu_) {
    const absl::Time now = absl::Now();
    if (phase_.has_value()) {
      core_.metrics().ChangeInFlight(*phase_, -1);
      if (through) core_.metrics().ObservePhase(*phase_, absl::ToDoubleSeconds(now - phase_since_));
    }
    if (next.has_value()) core_.metrics().ChangeInFlight(*next, 1);
    phase_ = next;
    phase_since_ = now;
  }

  // In the place of progress that the client has not read yet.
  void SendNewest(v1::GenerateResponse progress) {
    uint32_t attempt = 0;
    {
      absl::MutexLock lock(&relay_mu_);
      const bool queued = newest_.has_value();
      newest_ = std::move(progress);
      if (queued) return;
      attempt = attempt_;
    }
    SendAll([this, attempt](v1::GenerateResponse& out) {
      absl::MutexLock lock(&relay_mu_);
      if (!newest_.has_value() || attempt != attempt_) return false;  // What is newest has a turn of its own, later.
      out = std::move(*newest_);
      newest_.reset();
      return true;
    });
  }

  RequestId Id() {
    absl::MutexLock lock(&relay_mu_);
    return id_;
  }
  void WantMore() {
    absl::MutexLock lock(&relay_mu_);
    want_more_ = true;
  }
  bool Gone() {
    absl::MutexLock lock(&relay_mu_);
    return gone_;
  }
  uint32_t Attempt() {
    absl::MutexLock lock(&relay_mu_);
    return attempt_;
  }

  absl::Status Take(v1::GenerateRequest& request) {
    if (request.has_header()) {
      if (assembler_.has_value()) return RefuseArgument(reason::kBadRequest, "a second header");
      header_ = std::move(*request.mutable_header());
      H3_ASSIGN_OR_RETURN(schedule_, ScheduleFromProto(header_.sampling()));
      H3_ASSIGN_OR_RETURN(request_,
                          CheckRequest(core_, header_, header_.sampling().has_noise_from_request(), schedule_.evaluations()));
      if (!v1::Priority_IsValid(header_.priority()))
        return RefuseArgument(reason::kBadRequest, "an unknown priority", {{"field", "priority"}});
      if (header_.request_id().size() > kMaxRequestId)
        return RefuseArgument(reason::kBadRequest, "request_id is longer than 128 characters", {{"field", "request_id"}});
      const int64_t bytes = BytesOf(header_.tensors());
      H3_RETURN_IF_ERROR(core_.TakeBuffer(bytes));
      buffered_bytes_ = bytes;
      assembler_.emplace(header_.tensors());
      auto self = std::static_pointer_cast<GenerateRelay>(shared_from_this());
      core_.ResolveStack(header_.preset(), header_.stack(), schedule_.evaluations(), request_.base.facts,
                         [self](absl::StatusOr<PinnedStack> pinned) { self->OnResolved(std::move(pinned)); });
      return absl::OkStatus();
    }
    if (!request.has_chunk()) return RefuseArgument(reason::kBadRequest, "an empty message");
    if (!assembler_.has_value()) return RefuseArgument(reason::kBadRequest, "a chunk before the header");
    H3_RETURN_IF_ERROR(assembler_->Add(request.chunk()));
    if (assembler_->complete()) return Submit();
    ReadMore();
    return absl::OkStatus();
  }

  // On the file thread.
  void OnResolved(absl::StatusOr<PinnedStack> pinned) {
    if (!pinned.ok()) return Refused(pinned.status());
    *header_.mutable_stack() = std::move(pinned->entries);
    header_.clear_preset();
    resolved_ = std::move(pinned->resolved);
    if (assembler_->complete()) {
      if (const absl::Status status = Submit(); !status.ok()) Refused(status);
      return;
    }
    ReadMore();
  }

  absl::Status Submit() {
    submitted_ = true;
    queued_at_ = absl::Now();
    const RequestId id = core_.NextId();
    {
      absl::MutexLock lock(&relay_mu_);
      if (gone_) return absl::OkStatus();
      id_ = id;
    }
    if (header_.request_id().empty()) header_.set_request_id(absl::StrCat("r", id));
    v1::GenerateResponse response;
    v1::Accepted& accepted = *response.mutable_accepted();
    accepted.set_request_id(header_.request_id());
    DescribeBase(request_, resolved_, accepted);
    for (const float sigma : schedule_.video) accepted.add_video_sigmas(sigma);
    for (const float sigma : schedule_.audio) accepted.add_audio_sigmas(sigma);
    PendingRequest pending{.id = id,
                           .priority = ToPriority(header_.priority()),
                           .fingerprint = request_.base.fingerprint,
                           .work = PackedRows(request_.layout) * static_cast<double>(schedule_.evaluations()),
                           .enqueued = queued_at_};
    H3_RETURN_IF_ERROR(Price(pending));
    data_ = std::make_shared<const std::vector<std::string>>(assembler_->Take());
    auto self = std::static_pointer_cast<GenerateRelay>(shared_from_this());
    H3_RETURN_IF_ERROR(core_.Submit(std::move(pending), self,
                                    [&](const Dispatcher::Place& place) {
                                      accepted.set_queue_position(place.position);
                                      accepted.set_eta_seconds(place.eta_seconds);
                                      CountLeaving(/*ended=*/false);
                                      Enter(RequestPhase::kQueue);
                                      Send(std::move(response));
                                    }));
    WithdrawIfGone();
    return absl::OkStatus();
  }

  // What the request will take, from shapes; refused where no worker could ever give it.
  absl::Status Price(PendingRequest& pending) const {
    H3_ASSIGN_OR_RETURN(const std::vector<StackEntry> entries, FromProto(header_.stack()));
    std::vector<PlannedEntry> stack;
    std::set<std::string> seen;
    for (size_t i = 0; i < entries.size(); ++i) {
      stack.push_back({resolved_[i].shape.get(), &entries[i]});
      if (seen.insert(entries[i].digest).second) pending.adapters.push_back({entries[i].adapter, entries[i].digest, resolved_[i].bytes});
    }
    const BaseFacts& base = request_.base.facts;
    RequestPlan plan = PlanRequest(base.plan, base.plan_options, request_.layout, schedule_.evaluations(), stack);
    plan.adapters = ByteCount(0);  // By digest: the same content may be named twice.
    for (const NeededAdapter& adapter : pending.adapters) plan.adapters += adapter.bytes;
    pending.bytes = plan.peak();
    return core_.CheckFits(pending.fingerprint, plan);
  }

  void SendChunks(WorkerGenerate& stream) {
    auto reader = std::make_shared<ChunkReader>(std::vector<absl::string_view>(data_->begin(), data_->end()));
    stream.SendAll([reader, data = data_](v1::GenerateRequest& request) { return reader->Next(*request.mutable_chunk()); });
  }
  // It will not be run again: from here on it holds no buffer.
  void ForgetTensors() {
    data_.reset();
    GiveBuffer();
  }
  void GiveBuffer() { core_.GiveBuffer(buffered_bytes_.exchange(0)); }

  void Refused(const absl::Status& status) {
    if (status.ok()) return;
    if (!Counted()) core_.metrics().CountRejection(ReasonOf(status));
    End(status);
  }
  bool Counted() {
    absl::MutexLock lock(&relay_mu_);
    return counted_;
  }

  void End(const absl::Status& status) {
    {
      absl::MutexLock lock(&relay_mu_);
      if (counted_) return;
      counted_ = true;
      completed_ = status.ok();
    }
    const std::string task(TaskName(request_.task));
    core_.metrics().CountRequest(task, std::string(CodeName(status.code())));
    if (status.ok()) core_.metrics().ObserveDuration(task, absl::ToDoubleSeconds(absl::Now() - start_));
    Close(status);
  }

  SchedulerCore& core_;
  const absl::Time start_;
  v1::GenerateHeader header_;
  Schedule schedule_;
  CheckedRequest request_;
  std::optional<TensorAssembler> assembler_;
  std::vector<ResolvedAdapter> resolved_;
  std::shared_ptr<const std::vector<std::string>> data_;  // Until the first of the result: what may be sent to a worker again.
  std::atomic<int64_t> buffered_bytes_{0};
  bool submitted_ = false;
  absl::Time queued_at_, assigned_at_;
  std::shared_ptr<WorkerLink> worker_;  // From OnAssigned on.
  // In reactions of the worker's stream, which follow each other.
  bool begun_ = false, worker_accepted_ = false, has_result_ = false;
  uint32_t step_ = 0;                // Of this attempt.
  std::optional<uint32_t> lost_at_;  // Step of the last attempt that a worker had begun and was lost in.
  absl::Status half_closed_;            // Why the end of the client's messages ended the call.

  absl::Mutex relay_mu_;
  std::shared_ptr<WorkerGenerate> stream_ ABSL_GUARDED_BY(relay_mu_);
  RequestId id_ ABSL_GUARDED_BY(relay_mu_) = 0;
  uint32_t attempt_ ABSL_GUARDED_BY(relay_mu_) = 0;  // Workers lost so far.
  bool gone_ ABSL_GUARDED_BY(relay_mu_) = false;
  bool admitted_ ABSL_GUARDED_BY(relay_mu_) = false;
  bool ended_ ABSL_GUARDED_BY(relay_mu_) = false;
  std::optional<v1::GenerateResponse> newest_ ABSL_GUARDED_BY(relay_mu_);  // Progress that is still to be written.
  bool want_more_ ABSL_GUARDED_BY(relay_mu_) = false;
  bool counted_ ABSL_GUARDED_BY(relay_mu_) = false;
  bool completed_ ABSL_GUARDED_BY(relay_mu_) = false;
  std::optional<RequestPhase> phase_ ABSL_GUARDED_BY(relay_mu_);
  absl::Time phase_since_ ABSL_GUARDED_BY(relay_mu_);
  uint32_t last_position_ ABSL_GUARDED_BY(relay_mu_) = UINT32_MAX;
};

void WorkerGenerate::OnMessage(v1::GenerateResponse response) { relay_->OnWorkerMessage(*this, std::move(response)); }
void WorkerGenerate::OnEnd(const grpc::Status& status) { relay_->OnWorkerEnd(FromWorker(status, worker_)); }

}  // namespace

grpc::ServerBidiReactor<v1::GenerateRequest, v1::GenerateResponse>* GenerationService::Generate(
    grpc::CallbackServerContext* context) {
  auto relay = std::make_shared<GenerateRelay>(core_, context);
  relay->Start();
  return relay.get();
}

}  // namespace h3
