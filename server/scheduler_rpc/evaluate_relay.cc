// Evaluate of a scheduler: a session on one worker, relayed message by message in both directions.
#include <grpcpp/alarm.h>

#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "absl/time/clock.h"
#include "server/rpc/stream_call.h"
#include "server/scheduler_rpc/client_stream.h"
#include "server/scheduler_rpc/relay.h"
#include "server/scheduler_rpc/scheduler_services.h"

namespace h3 {
namespace {

class EvaluateRelay;

// The call to the worker.
class WorkerEvaluate final : public ClientStream<v1::EvaluateRequest, v1::EvaluateResponse> {
 public:
  WorkerEvaluate(std::shared_ptr<EvaluateRelay> relay, std::string worker)
      : relay_(std::move(relay)), worker_(std::move(worker)) {}

 private:
  void OnMessage(v1::EvaluateResponse response) override;
  void OnDrained() override;
  void OnEnd(const grpc::Status& status) override;

  const std::shared_ptr<EvaluateRelay> relay_;
  const std::string worker_;
};

class EvaluateRelay final : public StreamCall<v1::EvaluateRequest, v1::EvaluateResponse> {
 public:
  EvaluateRelay(SchedulerCore& core, grpc::CallbackServerContext* context) : StreamCall(context), core_(core) {}

  void OnWorkerMessage(WorkerEvaluate& stream, v1::EvaluateResponse response) {
    {
      absl::MutexLock lock(&relay_mu_);
      last_activity_ = absl::Now();
      if (response.has_ready() || response.has_result()) --owed_answers_;
    }
    if (response.has_accepted()) {
      worker_accepted_ = true;
      return stream.ReadMore();  // Ours went out when the session was opened.
    }
    const size_t bytes = response.chunk().data().size();
    // More is wanted only once this is being written: what drained before must not let the next one overtake it.
    Send(std::move(response), [this, bytes] {
      if (bytes > 0) core_.metrics().CountOutput(std::string(TaskName(request_.task)), bytes);
      WantMore();
    });
  }
  // What the client said last has been passed on: it may say more.
  void OnWorkerDrained() {
    {
      absl::MutexLock lock(&relay_mu_);
      if (!client_waits_) return;
      client_waits_ = false;
    }
    ReadMore();
  }
  void OnWorkerEnd(const absl::Status& status) {
    {
      absl::MutexLock lock(&relay_mu_);
      stream_ = nullptr;
    }
    if (absl::IsUnavailable(status) && !Gone()) worker_->Suspect(std::string(status.message()));
    if (!worker_accepted_ && !Gone()) core_.CountWorkerRefusal(status);
    core_.CloseSession(worker_);
    Close(status);
  }

 private:
  void OnMessage(v1::EvaluateRequest& from_client) override {
    v1::EvaluateRequest request = std::move(from_client);  // The next read may fill it as soon as more is wanted.
    if (request.has_header()) {
      if (const absl::Status status = Open(request); !status.ok()) Refused(status);
      return;
    }
    std::shared_ptr<WorkerEvaluate> stream;
    {
      absl::MutexLock lock(&relay_mu_);
      stream = stream_;
      client_waits_ = true;
      last_activity_ = absl::Now();
    }
    if (stream == nullptr) return Refused(RefuseArgument(reason::kBadRequest, "a session begins with its header"));
    if (request.has_evaluation()) {
      if (const absl::Status status = CheckTensorSpecs(request.evaluation().tensors(), core_.options().max_request_bytes);
          !status.ok()) {
        return Refused(status);
      }
    }
    CountOwed(request);
    stream->Send(std::move(request));
  }
  void OnHalfClose() override {
    std::shared_ptr<WorkerEvaluate> stream;
    {
      absl::MutexLock lock(&relay_mu_);
      stream = stream_;
    }
    if (stream != nullptr) return stream->HalfClose();
    // Reading ends in this way too when the client has left, which OnGone may tell later: counted in OnEnd.
    half_closed_ = RefuseArgument(reason::kBadRequest, "the call ended before its session was open");
    Close(half_closed_);
    Leave();
  }
  void OnGone(const absl::Status&) override {
    client_left_.store(true);
    Leave();
  }
  // A message has been passed on: the worker's next one is wanted.
  void OnDrained() override {
    std::shared_ptr<WorkerEvaluate> stream;
    {
      absl::MutexLock lock(&relay_mu_);
      if (!worker_waits_) return;
      worker_waits_ = false;
      stream = stream_;
    }
    if (stream != nullptr) stream->ReadMore();
  }
  void OnEnd() override {
    if (!half_closed_.ok() && !client_left_.load()) core_.metrics().CountRejection(ReasonOf(half_closed_));
    absl::MutexLock lock(&relay_mu_);
    idle_alarm_ = nullptr;
  }

  absl::Status Open(v1::EvaluateRequest& request) {
    if (opened_) return RefuseArgument(reason::kBadRequest, "a second header");
    opened_ = true;
    header_ = std::move(*request.mutable_header());
    H3_ASSIGN_OR_RETURN(request_, CheckRequest(core_, header_, false, 0));
    auto self = std::static_pointer_cast<EvaluateRelay>(shared_from_this());
    core_.ResolveStack(header_.preset(), header_.stack(), 0, request_.base.facts,
                       [self](absl::StatusOr<PinnedStack> pinned) { self->OnResolved(std::move(pinned)); });
    return absl::OkStatus();
  }

  // On the file thread.
  void OnResolved(absl::StatusOr<PinnedStack> pinned) {
    if (!pinned.ok()) return Refused(pinned.status());
    *header_.mutable_stack() = std::move(pinned->entries);
    header_.clear_preset();
    auto worker = core_.OpenSession(request_.base.fingerprint);
    if (!worker.ok()) return Refused(worker.status());
    worker_ = *worker;
    const std::shared_ptr<v1::Worker::Stub> stub = worker_->stub();
    auto stream =
        std::make_shared<WorkerEvaluate>(std::static_pointer_cast<EvaluateRelay>(shared_from_this()), worker_->name());
    bool start = false;
    {
      absl::MutexLock lock(&relay_mu_);
      start = !gone_ && stub != nullptr;
      if (start) stream_ = stream;
      client_waits_ = true;
      last_activity_ = absl::Now();
      owed_answers_ = 1;  // Ready.
      owed_bytes_ = BytesOf(header_.tensors());
    }
    if (!start) {
      core_.CloseSession(worker_);
      return Refused(Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                            "the worker was lost before the session was open", {{"retry_seconds", "1"}}));
    }
    v1::EvaluateResponse response;
    v1::Accepted& accepted = *response.mutable_accepted();
    accepted.set_request_id(header_.request_id().empty() ? absl::StrCat("s", core_.NextId()) : header_.request_id());
    DescribeBase(request_, pinned->resolved, accepted);
    Send(std::move(response));
    stub->async()->Evaluate(stream->context(), stream.get());
    v1::EvaluateRequest header;
    *header.mutable_header() = std::move(header_);
    stream->Send(std::move(header));
    stream->Begin();
    WatchIdle(core_.options().session_idle);
  }

  void CountOwed(const v1::EvaluateRequest& request) {
    absl::MutexLock lock(&relay_mu_);
    if (request.has_evaluation()) {
      ++owed_answers_;
      owed_bytes_ += BytesOf(request.evaluation().tensors());
    } else if (request.has_chunk()) {
      owed_bytes_ -= static_cast<int64_t>(request.chunk().data().size());
    }
  }

  // Ends the session of a client that says nothing for too long: it holds memory that others may need. A client that waits for
  // an answer, however long that takes, is not idle.
  void WatchIdle(absl::Duration wait) {
    auto alarm = std::make_shared<grpc::Alarm>();
    {
      absl::MutexLock lock(&relay_mu_);
      if (gone_ || stream_ == nullptr) return;
      idle_alarm_ = alarm;
    }
    std::weak_ptr<EvaluateRelay> weak = std::static_pointer_cast<EvaluateRelay>(shared_from_this());
    alarm->Set(absl::ToChronoTime(absl::Now() + wait), [weak](bool ok) {
      const std::shared_ptr<EvaluateRelay> self = weak.lock();
      if (!ok || self == nullptr) return;
      absl::Duration left;
      {
        absl::MutexLock lock(&self->relay_mu_);
        const bool computing = self->owed_answers_ > 0 && self->owed_bytes_ <= 0;
        left = computing ? self->core_.options().session_idle
                         : self->last_activity_ + self->core_.options().session_idle - absl::Now();
      }
      if (left > absl::ZeroDuration()) return self->WatchIdle(left);
      self->Close(Refuse(absl::StatusCode::kDeadlineExceeded, "SESSION_IDLE",
                         absl::StrCat("the session was idle for ", absl::FormatDuration(self->core_.options().session_idle),
                                      " and is closed; open a new one")));
      self->Leave();
    });
  }

  void Leave() {
    std::shared_ptr<WorkerEvaluate> stream;
    {
      absl::MutexLock lock(&relay_mu_);
      gone_ = true;
      stream = stream_;
    }
    if (stream != nullptr) stream->Cancel();
  }

  void WantMore() {
    absl::MutexLock lock(&relay_mu_);
    worker_waits_ = true;
  }
  bool Gone() {
    absl::MutexLock lock(&relay_mu_);
    return gone_;
  }

  void Refused(const absl::Status& status) {
    core_.metrics().CountRejection(ReasonOf(status));
    Close(status);
    Leave();
  }

  SchedulerCore& core_;
  v1::EvaluateHeader header_;
  CheckedRequest request_;
  std::shared_ptr<WorkerLink> worker_;
  bool opened_ = false;
  bool worker_accepted_ = false;  // In reactions of the worker's stream.
  absl::Status half_closed_;      // Why the end of the client's messages ended the call.
  std::atomic<bool> client_left_{false};

  absl::Mutex relay_mu_;
  std::shared_ptr<WorkerEvaluate> stream_ ABSL_GUARDED_BY(relay_mu_);
  std::shared_ptr<grpc::Alarm> idle_alarm_ ABSL_GUARDED_BY(relay_mu_);
  absl::Time last_activity_ ABSL_GUARDED_BY(relay_mu_);
  int64_t owed_answers_ ABSL_GUARDED_BY(relay_mu_) = 0;   // By the worker: ready, results.
  int64_t owed_bytes_ ABSL_GUARDED_BY(relay_mu_) = 0;     // By the client: announced, not sent.
  bool worker_waits_ ABSL_GUARDED_BY(relay_mu_) = false;  // For us to read its next message.
  bool client_waits_ ABSL_GUARDED_BY(relay_mu_) = false;
  bool gone_ ABSL_GUARDED_BY(relay_mu_) = false;
};

void WorkerEvaluate::OnMessage(v1::EvaluateResponse response) { relay_->OnWorkerMessage(*this, std::move(response)); }
void WorkerEvaluate::OnDrained() { relay_->OnWorkerDrained(); }
void WorkerEvaluate::OnEnd(const grpc::Status& status) { relay_->OnWorkerEnd(FromWorker(status, worker_)); }

}  // namespace

grpc::ServerBidiReactor<v1::EvaluateRequest, v1::EvaluateResponse>* GenerationService::Evaluate(
    grpc::CallbackServerContext* context) {
  auto relay = std::make_shared<EvaluateRelay>(core_, context);
  relay->Start();
  return relay.get();
}

}  // namespace h3
