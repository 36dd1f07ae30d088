#include "server/scheduler_rpc/worker_link.h"

#include <chrono>
#include <utility>

#include "absl/time/clock.h"

namespace h3 {
namespace {

constexpr std::chrono::milliseconds kRetry{500};
constexpr std::chrono::seconds kRefreshDeadline{1};

// gRPC's threads for callbacks on channels live as long as some channel that has used them, and the last one to go joins them: on one of
// those very threads, where a callback drops the last reference (gRPC 1.51), the process dies. So one channel, to nowhere, never goes.
void KeepCallbackThreads() {
  struct Call {
    std::unique_ptr<v1::Worker::Stub> stub =
        v1::Worker::NewStub(grpc::CreateChannel("unix-abstract:h3-nowhere", grpc::InsecureChannelCredentials()));
    grpc::ClientContext context;
    v1::GetSnapshotRequest request;
    v1::GetSnapshotResponse response;
  };
  static Call& forever = *[] {
    auto* call = new Call;
    call->context.set_deadline(std::chrono::system_clock::now());
    call->stub->async()->GetSnapshot(&call->context, &call->request, &call->response, [](const grpc::Status&) {});
    return call;
  }();
  (void)forever;
}

// A stopped worker is noticed within two seconds, a killed one at once.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  KeepCallbackThreads();
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 1000);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 500);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetMaxReceiveMessageSize(8 << 20);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

// The Watch stream of one connection.
class WorkerLink::Watcher final : public grpc::ClientReadReactor<v1::WatchResponse> {
 public:
  Watcher(std::shared_ptr<WorkerLink> link, int generation) : link_(std::move(link)), generation_(generation) {}

  void Begin(v1::Worker::Stub& stub, std::shared_ptr<Watcher> self) {
    self_ = std::move(self);
    stub.async()->Watch(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }
  void Cancel() { context_.TryCancel(); }

 private:
  void OnReadDone(bool ok) override {
    if (!ok) return;
    link_->OnHeartbeat(generation_, std::move(*response_.mutable_snapshot()));
    StartRead(&response_);
  }
  void OnDone(const grpc::Status& status) override {
    link_->OnWatchEnd(generation_, status);
    self_.reset();
  }

  const std::shared_ptr<WorkerLink> link_;
  const int generation_;
  grpc::ClientContext context_;
  const v1::WatchRequest request_;
  v1::WatchResponse response_;
  std::shared_ptr<Watcher> self_;
};

void WorkerLink::Connect(const std::string& address) {
  int generation = 0;
  {
    absl::MutexLock lock(&mu_);
    generation = ++generation_;
    stub_ = v1::Worker::NewStub(MakeChannel(address));
  }
  StartWatch(generation);
}

void WorkerLink::StartWatch(int generation) {
  std::shared_ptr<v1::Worker::Stub> stub;
  auto watcher = std::make_shared<Watcher>(shared_from_this(), generation);
  {
    absl::MutexLock lock(&mu_);
    if (generation != generation_) return;
    stub = stub_;
    watcher_ = watcher;
  }
  watcher->Begin(*stub, watcher);
}

void WorkerLink::Disconnect(const std::string& why) {
  std::shared_ptr<Watcher> watcher;
  {
    absl::MutexLock lock(&mu_);
    ++generation_;
    stub_ = nullptr;
    state_ = v1::WORKER_STATE_LOST;
    last_error_ = why;
    watcher = std::move(watcher_);
  }
  if (watcher != nullptr) watcher->Cancel();
  on_change_(*this);
}

void WorkerLink::Suspect(const std::string& why) {
  std::shared_ptr<Watcher> watcher;
  {
    absl::MutexLock lock(&mu_);
    if (state_ != v1::WORKER_STATE_READY) return;
    state_ = v1::WORKER_STATE_LOST;
    last_error_ = why;
    watcher = watcher_;
  }
  on_change_(*this);
  if (watcher != nullptr) watcher->Cancel();  // Its end starts another one, whose first message tells what the worker is.
}

void WorkerLink::OnHeartbeat(int generation, v1::WorkerSnapshot snapshot) {
  bool changed = false;
  {
    absl::MutexLock lock(&mu_);
    if (generation != generation_) return;
    const v1::WorkerState state = snapshot.draining() ? v1::WORKER_STATE_DRAINING : v1::WORKER_STATE_READY;
    // Where sessions share the memory, what is left of it decides what may start.
    const bool shared = snapshot.sessions() > 0 || (snapshot_ != nullptr && snapshot_->sessions() > 0);
    changed = state != state_ || shared;
    state_ = state;
    snapshot_ = std::make_shared<const v1::WorkerSnapshot>(std::move(snapshot));
    heard_ = absl::Now();
  }
  if (changed) on_change_(*this);
}

void WorkerLink::OnWatchEnd(int generation, const grpc::Status& status) {
  auto alarm = std::make_shared<grpc::Alarm>();
  {
    absl::MutexLock lock(&mu_);
    watcher_ = nullptr;
    if (generation != generation_) return;
    state_ = v1::WORKER_STATE_LOST;
    last_error_ = status.error_message();
    retry_ = alarm;
  }
  on_change_(*this);
  alarm->Set(std::chrono::system_clock::now() + kRetry, [self = shared_from_this(), generation](bool ok) {
    if (ok) self->StartWatch(generation);
  });
}

v1::WorkerState WorkerLink::state() const {
  absl::MutexLock lock(&mu_);
  return state_;
}

std::shared_ptr<const v1::WorkerSnapshot> WorkerLink::snapshot() const {
  absl::MutexLock lock(&mu_);
  return snapshot_;
}

absl::Time WorkerLink::heard() const {
  absl::MutexLock lock(&mu_);
  return heard_;
}

v1::WorkerStatus WorkerLink::Status() const {
  absl::MutexLock lock(&mu_);
  v1::WorkerStatus status;
  status.set_worker(name_);
  status.set_state(state_);
  status.set_restarts(restarts_);
  if (state_ == v1::WORKER_STATE_LOST) status.set_last_error(last_error_);
  if (snapshot_ != nullptr) {
    status.set_device(snapshot_->model().device());
    status.set_base_fingerprint(snapshot_->model().base_fingerprint());
  }
  // What it last said is no longer so: nothing runs on a worker that is gone, or that starts again.
  if (snapshot_ != nullptr && (state_ == v1::WORKER_STATE_READY || state_ == v1::WORKER_STATE_DRAINING)) {
    status.set_running(snapshot_->running());
    status.set_sessions(snapshot_->sessions());
  }
  return status;
}

void WorkerLink::CountRestart() {
  absl::MutexLock lock(&mu_);
  ++restarts_;
}

std::shared_ptr<v1::Worker::Stub> WorkerLink::stub() const {
  absl::MutexLock lock(&mu_);
  return stub_;
}

void WorkerLink::Prefetch(const v1::PrefetchAdaptersRequest& request) {
  const std::shared_ptr<v1::Worker::Stub> stub = this->stub();
  if (stub == nullptr) return;
  struct Call {
    grpc::ClientContext context;
    v1::PrefetchAdaptersRequest request;
    v1::PrefetchAdaptersResponse response;
  };
  auto call = std::make_shared<Call>();
  call->request = request;
  call->context.set_deadline(std::chrono::system_clock::now() + kRefreshDeadline);
  // A hint: whether it arrived makes no difference to anybody.
  stub->async()->PrefetchAdapters(&call->context, &call->request, &call->response, [stub, call](const grpc::Status&) {});
}

void WorkerLink::Refresh(std::function<void()> done) {
  std::shared_ptr<v1::Worker::Stub> stub;
  int generation = 0;
  {
    absl::MutexLock lock(&mu_);
    stub = stub_;
    generation = generation_;
  }
  if (stub == nullptr) return done();
  struct Call {
    grpc::ClientContext context;
    v1::GetSnapshotRequest request;
    v1::GetSnapshotResponse response;
  };
  auto call = std::make_shared<Call>();
  call->context.set_deadline(std::chrono::system_clock::now() + kRefreshDeadline);
  stub->async()->GetSnapshot(
      &call->context, &call->request, &call->response,
      [self = shared_from_this(), stub, call, generation, done = std::move(done)](const grpc::Status& status) {
        if (status.ok()) self->OnHeartbeat(generation, std::move(*call->response.mutable_snapshot()));
        done();
      });
}

}  // namespace h3
