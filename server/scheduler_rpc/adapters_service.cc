#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "proto/support/status.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/scheduler_rpc/adapter_check.h"
#include "server/scheduler_rpc/relay.h"
#include "server/scheduler_rpc/scheduler_services.h"

namespace h3 {
namespace {

constexpr std::chrono::minutes kLoadDeadline{10};

// Residency by digest, of all workers together.
std::map<std::string, v1::Adapter> Resident(const SchedulerCore& core) {
  std::map<std::string, v1::Adapter> resident;
  for (const auto& worker : core.workers()) {
    const auto snapshot = worker->snapshot();
    if (snapshot == nullptr || worker->state() != v1::WORKER_STATE_READY) continue;
    for (const v1::Adapter& adapter : snapshot->resident()) {
      v1::Adapter& line = resident[adapter.digest()];
      line.set_bytes(line.bytes() + adapter.bytes());
      line.set_pins(line.pins() + adapter.pins());
      line.set_resident(true);
    }
  }
  return resident;
}

std::vector<std::shared_ptr<WorkerLink>> ReadyWorkers(const SchedulerCore& core) {
  std::vector<std::shared_ptr<WorkerLink>> ready;
  for (const auto& worker : core.workers()) {
    if (worker->state() == v1::WORKER_STATE_READY && worker->stub() != nullptr) ready.push_back(worker);
  }
  return ready;
}

absl::Status NoWorker() {
  return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost, "no worker is ready; see `h3ctl status`",
                {{"retry_seconds", "1"}});
}

// One call to each worker; `done` runs when all have answered, with their answers and failures.
template <typename Request, typename Response>
class FanOut : public std::enable_shared_from_this<FanOut<Request, Response>> {
 public:
  using Method = void (*)(v1::Worker::Stub&, grpc::ClientContext*, const Request*, Response*,
                          std::function<void(grpc::Status)>);
  struct Answer {
    std::string worker;
    absl::Status status;
    Response response;
  };

  static void Run(const std::vector<std::shared_ptr<WorkerLink>>& workers, const Request& request, Method method,
                  std::function<void(std::vector<Answer>)> done) {
    auto fan = std::make_shared<FanOut>();
    fan->request_ = request;
    fan->done_ = std::move(done);
    fan->answers_.resize(workers.size());
    fan->contexts_.resize(workers.size());
    fan->left_ = workers.size();
    for (size_t i = 0; i < workers.size(); ++i) {
      fan->answers_[i].worker = workers[i]->name();
      fan->contexts_[i] = std::make_unique<grpc::ClientContext>();
      fan->contexts_[i]->set_deadline(std::chrono::system_clock::now() + kLoadDeadline);
      const std::shared_ptr<v1::Worker::Stub> stub = workers[i]->stub();
      if (stub == nullptr) {
        fan->Answered(i, grpc::Status(grpc::StatusCode::UNAVAILABLE, "lost"));
        continue;
      }
      method(*stub, fan->contexts_[i].get(), &fan->request_, &fan->answers_[i].response,
             [fan, stub, i](const grpc::Status& status) { fan->Answered(i, status); });
    }
  }

 private:
  void Answered(size_t i, const grpc::Status& status) {
    answers_[i].status = FromWorker(status, answers_[i].worker);
    if (left_.fetch_sub(1) == 1) done_(std::move(answers_));
  }

  Request request_;
  std::function<void(std::vector<Answer>)> done_;
  std::vector<Answer> answers_;
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts_;
  std::atomic<size_t> left_{0};
};

using Load = FanOut<v1::WorkerLoadAdapterRequest, v1::WorkerLoadAdapterResponse>;
using Unload = FanOut<v1::WorkerUnloadAdapterRequest, v1::WorkerUnloadAdapterResponse>;

// What is kept; a PEFT config lies beside the file and can be looked at there.
v1::AdapterSettings Shown(const AdapterSettings& settings) {
  v1::AdapterSettings shown = ToProto(settings);
  shown.clear_peft_config();
  return shown;
}

}  // namespace

grpc::ServerUnaryReactor* AdaptersService::ListAdapters(grpc::CallbackServerContext* context, const v1::ListAdaptersRequest*,
                                                        v1::ListAdaptersResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const bool posted = core_.PostFileWork([this, reactor, response] {
    const auto adapters = core_.registry().List();
    if (!adapters.ok()) return reactor->Finish(ToGrpc(adapters.status()));
    const std::map<std::string, v1::Adapter> resident = Resident(core_);
    for (const RegisteredAdapter& adapter : *adapters) {
      v1::Adapter& line = *response->add_adapters();
      if (const auto found = resident.find(adapter.digest); found != resident.end() && !adapter.digest.empty())
        line = found->second;
      line.set_name(adapter.name);
      line.set_digest(adapter.digest);
      line.set_file_bytes(static_cast<uint64_t>(adapter.file_bytes));
      line.set_uploaded(adapter.uploaded);
      *line.mutable_settings() = Shown(adapter.settings);
    }
    reactor->Finish(grpc::Status::OK);
  });
  if (!posted) reactor->Finish(ToGrpc(SchedulerCore::FileQueueFull()));
  return reactor;
}

grpc::ServerUnaryReactor* AdaptersService::LoadAdapter(grpc::CallbackServerContext* context,
                                                       const v1::LoadAdapterRequest* request,
                                                       v1::LoadAdapterResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (const absl::Status serving = core_.CheckServing(); !serving.ok()) {
    reactor->Finish(ToGrpc(serving));
    return reactor;
  }
  const bool posted = core_.PostFileWork([this, reactor, request, response] {
    const auto workers = ReadyWorkers(core_);
    if (workers.empty()) return reactor->Finish(ToGrpc(NoWorker()));
    const auto found = core_.registry().Find(request->name());
    if (!found.ok()) return reactor->Finish(ToGrpc(found.status()));
    v1::WorkerLoadAdapterRequest load;
    load.set_digest(found->digest);
    load.set_name(found->name);
    *load.mutable_settings() = ToProto(found->settings);
    Load::Run(
        workers, load,
        [](v1::Worker::Stub& stub, grpc::ClientContext* c, const auto* q, auto* r, auto f) {
          stub.async()->LoadAdapter(c, q, r, std::move(f));
        },
        [reactor, request, response, found = *found](std::vector<Load::Answer> answers) {
          for (const Load::Answer& answer : answers) {
            if (!answer.status.ok()) return reactor->Finish(ToGrpc(answer.status));
          }
          *response->mutable_resolved() = answers.front().response.resolved();
          response->mutable_resolved()->set_adapter(request->name());
          v1::Adapter& adapter = *response->mutable_adapter();
          adapter.set_name(request->name());
          adapter.set_digest(found.digest);
          adapter.set_file_bytes(static_cast<uint64_t>(found.file_bytes));
          adapter.set_bytes(answers.front().response.resolved().bytes());
          adapter.set_resident(true);
          adapter.set_uploaded(found.uploaded);
          *adapter.mutable_settings() = Shown(found.settings);
          reactor->Finish(grpc::Status::OK);
        });
  });
  if (!posted) reactor->Finish(ToGrpc(SchedulerCore::FileQueueFull()));
  return reactor;
}

grpc::ServerUnaryReactor* AdaptersService::UnloadAdapter(grpc::CallbackServerContext* context,
                                                         const v1::UnloadAdapterRequest* request,
                                                         v1::UnloadAdapterResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const bool posted = core_.PostFileWork([this, reactor, request, response] {
    const auto workers = ReadyWorkers(core_);
    if (workers.empty()) return reactor->Finish(ToGrpc(NoWorker()));
    const auto digest = core_.registry().Digest(request->name());
    if (!digest.ok()) return reactor->Finish(ToGrpc(digest.status()));
    v1::WorkerUnloadAdapterRequest unload;
    unload.set_digest(*digest);
    Unload::Run(
        workers, unload,
        [](v1::Worker::Stub& stub, grpc::ClientContext* c, const auto* q, auto* r, auto f) {
          stub.async()->UnloadAdapter(c, q, r, std::move(f));
        },
        [reactor, response](std::vector<Unload::Answer> answers) {
          // Workers that do not hold it are no failure, unless none does.
          std::optional<absl::Status> failure, missing;
          bool freed = false;
          for (const Unload::Answer& answer : answers) {
            if (answer.status.ok()) {
              freed = true;
              response->set_freed_bytes(response->freed_bytes() + answer.response.freed_bytes());
            } else if (absl::IsNotFound(answer.status)) {
              missing = answer.status;
            } else {
              failure = answer.status;
            }
          }
          if (!failure.has_value() && !freed) failure = missing;
          reactor->Finish(failure.has_value() ? ToGrpc(*failure) : grpc::Status::OK);
        });
  });
  if (!posted) reactor->Finish(ToGrpc(SchedulerCore::FileQueueFull()));
  return reactor;
}

grpc::ServerUnaryReactor* AdaptersService::CheckAdapter(grpc::CallbackServerContext* context,
                                                        const v1::CheckAdapterRequest* request,
                                                        v1::CheckAdapterResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const bool posted = core_.PostFileWork([this, reactor, request, response] {
    h3::CheckAdapter(core_, request->name(), [reactor, response](absl::StatusOr<v1::AdapterReport> report) {
      if (report.ok()) *response->mutable_report() = *std::move(report);
      reactor->Finish(ToGrpc(report.status()));
    });
  });
  if (!posted) reactor->Finish(ToGrpc(SchedulerCore::FileQueueFull()));
  return reactor;
}

grpc::ServerUnaryReactor* AdaptersService::SetAdapter(grpc::CallbackServerContext* context, const v1::SetAdapterRequest* request,
                                                      v1::SetAdapterResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const bool posted = core_.PostFileWork([this, reactor, request, response] {
    const auto set = [&]() -> absl::Status {
      if (!request->settings().peft_config().empty()) {
        return RefuseArgument(reason::kBadRequest, "a PEFT config lies beside the file and cannot be set", {{"field", "settings.peft_config"}});
      }
      H3_ASSIGN_OR_RETURN(const RegisteredAdapter adapter, core_.registry().Find(request->name()));
      v1::AdapterSettings merged = request->reset() ? v1::AdapterSettings() : Shown(adapter.settings);
      merged.MergeFrom(request->settings());  // Fields that are set replace.
      H3_ASSIGN_OR_RETURN(const AdapterSettings settings, FromProto(merged));
      H3_RETURN_IF_ERROR(core_.registry().SetSettings(adapter.digest, settings));
      response->set_digest(adapter.digest);
      *response->mutable_settings() = Shown(settings);
      return absl::OkStatus();
    };
    reactor->Finish(ToGrpc(set()));
  });
  if (!posted) reactor->Finish(ToGrpc(SchedulerCore::FileQueueFull()));
  return reactor;
}

}  // namespace h3
