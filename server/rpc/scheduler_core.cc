#include "server/rpc/scheduler_core.h"

#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/rpc/presets.h"

namespace h3 {
namespace {

constexpr size_t kFileQueue = 1024;

absl::Status NoWorker(absl::string_view what) {
  return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost, what, {{"retry_seconds", "1"}});
}

BaseFacts FactsOf(const v1::Model& base) {
  return {FromProto(base.geometry()), FromProto(base.partition()), base.grid_width(),
          base.qkv_layout() == QkvLayoutName(QkvLayout::kInterleaved)};
}

}  // namespace

SchedulerCore::SchedulerCore(SchedulerOptions options, SchedulerMetrics& metrics, std::unique_ptr<StateStore> state,
                             ContentStore content)
    : options_(std::move(options)),
      metrics_(metrics),
      state_(std::move(state)),
      content_(std::move(content)),
      registry_(options_.adapters, content_, *state_),
      dispatcher_(options_.queue_capacity),
      files_(kFileQueue) {
  // Nobody waits for replaced uploads of an earlier process any more, but presets may pin them. What fails here fails again where it
  // matters.
  const auto presets = ListPresets(*state_);
  if (!presets.ok()) return;
  std::set<std::string> pinned;
  for (const v1::Preset& preset : presets->presets()) {
    for (const v1::StackEntry& entry : preset.stack()) pinned.insert(entry.digest());
  }
  registry_.ForgetAllUnnamed(pinned).IgnoreError();
}

std::shared_ptr<WorkerLink> SchedulerCore::AddWorker(const std::string& name) {
  auto link = std::make_shared<WorkerLink>(name, [this](WorkerLink& worker) { OnWorkerChange(worker); });
  absl::MutexLock lock(&mu_);
  workers_[name] = link;
  return link;
}

std::vector<std::shared_ptr<WorkerLink>> SchedulerCore::workers() const {
  absl::MutexLock lock(&mu_);
  std::vector<std::shared_ptr<WorkerLink>> links;
  for (const auto& [name, link] : workers_) links.push_back(link);
  return links;
}

bool SchedulerCore::AnyReady() const {
  for (const auto& link : workers()) {
    if (link->state() == v1::WORKER_STATE_READY) return true;
  }
  return false;
}

absl::StatusOr<ChosenBase> SchedulerCore::ChooseBase(Task task, const std::string& model) const {
  std::vector<std::string> known;
  std::optional<absl::Status> mismatch;
  for (const auto& link : workers()) {
    const auto snapshot = link->snapshot();
    if (!snapshot.has_value()) continue;
    const v1::Model& base = snapshot->model();
    known.push_back(absl::StrCat(base.name(), " (", base.base_fingerprint().substr(0, 12), ")"));
    if (!model.empty() && model != base.base_fingerprint() && model != base.name()) continue;
    const Partition partition = FromProto(base.partition());
    if (absl::Status served = CheckPartition(task, partition); !served.ok()) {
      mismatch = std::move(served);
      continue;
    }
    return ChosenBase{base.base_fingerprint(), FactsOf(base), base.dtype()};
  }
  if (known.empty()) return NoWorker("no worker is ready yet; it is loading its model, or cannot: see `h3ctl status`");
  if (mismatch.has_value()) return *mismatch;
  return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                absl::StrCat("no base ", model, " is served; there is ", absl::StrJoin(known, ", ")), {{"model", model}});
}

absl::StatusOr<ChosenBase> SchedulerCore::AnyBase() const {
  for (const auto& link : workers()) {
    const auto snapshot = link->snapshot();
    if (snapshot.has_value()) return ChosenBase{snapshot->model().base_fingerprint(), FactsOf(snapshot->model()), snapshot->model().dtype()};
  }
  return NoWorker("no worker is ready yet; it is loading its model, or cannot: see `h3ctl status`");
}

absl::StatusOr<PinnedStack> SchedulerCore::PinStack(StackEntries stack, int64_t evaluations, const BaseFacts& base) {
  PinnedStack pinned;
  H3_ASSIGN_OR_RETURN(const std::vector<StackEntry> entries, FromProto(stack));
  H3_RETURN_IF_ERROR(CheckStack(entries, evaluations));
  for (size_t i = 0; i < entries.size(); ++i) {
    H3_ASSIGN_OR_RETURN(ResolvedAdapter resolved, registry_.Resolve(entries[i], i, base));
    v1::StackEntry& entry = *stack.Mutable(static_cast<int>(i));
    entry.set_digest(resolved.digest);
    // The name as it was given leads there, as was just seen; by digest it needs one that a worker can open.
    if (absl::StartsWith(entry.adapter(), "sha256:")) entry.set_adapter(registry_.NameOf(resolved.digest));
    *entry.mutable_settings() = ToProto(resolved.settings);
    pinned.resolved.push_back(std::move(resolved));
  }
  pinned.entries = std::move(stack);
  return pinned;
}

void SchedulerCore::ResolveStack(std::string preset, StackEntries stack, int64_t evaluations, BaseFacts base, OnPinned done) {
  // A stack without adapters needs no disk.
  if (preset.empty() && stack.empty()) return done(PinnedStack());
  auto shared = std::make_shared<OnPinned>(std::move(done));
  const bool posted = files_.Post([this, preset = std::move(preset), stack = std::move(stack), evaluations, base = std::move(base), shared] {
    if (preset.empty()) return (*shared)(PinStack(stack, evaluations, base));
    auto kept = FindPreset(*state_, preset);
    if (!kept.ok()) return (*shared)(kept.status());
    auto pinned = PinStack(kept->stack(), evaluations, base);
    (*shared)(pinned.ok() ? std::move(pinned) : WithDetail(pinned.status(), "preset", preset));
  });
  if (!posted) (*shared)(FileQueueFull());
}

absl::Status SchedulerCore::FileQueueFull() {
  return Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull, "too many requests wait for the adapters directory",
                {{"retry_seconds", "1"}});
}

absl::Status SchedulerCore::TakeBuffer(int64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (bytes > options_.max_buffered_bytes - buffered_bytes_) {
    return Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull,
                  absl::StrCat("the tensors of waiting requests take ", buffered_bytes_, " of ", options_.max_buffered_bytes,
                               " bytes, and ", bytes, " more do not fit; try again later"),
                  {{"retry_seconds", "5"}});
  }
  buffered_bytes_ += bytes;
  return absl::OkStatus();
}

void SchedulerCore::GiveBuffer(int64_t bytes) {
  absl::MutexLock lock(&mu_);
  buffered_bytes_ -= bytes;
}

int64_t SchedulerCore::buffered_bytes() const {
  absl::MutexLock lock(&mu_);
  return buffered_bytes_;
}

absl::Status SchedulerCore::Submit(PendingRequest request, std::shared_ptr<Ticket> ticket,
                                   const std::function<void(const Dispatcher::Place&)>& accepted) {
  H3_RETURN_IF_ERROR(CheckServing());
  const RequestId id = request.id;
  {
    absl::MutexLock lock(&mu_);
    tickets_[id] = std::move(ticket);  // Before it can be withdrawn.
  }
  if (absl::Status status = dispatcher_.Submit(std::move(request)); !status.ok()) {
    absl::MutexLock lock(&mu_);
    tickets_.erase(id);
    return status;
  }
  admitted_.fetch_add(1);
  accepted(dispatcher_.PlaceOf(id).value_or(Dispatcher::Place{id}));
  dispatcher_.Release(id);
  Pump();
  return absl::OkStatus();
}

bool SchedulerCore::Withdraw(RequestId id) {
  if (!dispatcher_.Remove(id)) return false;
  {
    absl::MutexLock lock(&mu_);
    tickets_.erase(id);
  }
  Pump();
  return true;
}

void SchedulerCore::Finish(RequestId id, std::optional<double> seconds) {
  dispatcher_.Finished(id, seconds);
  Pump();
}

void SchedulerCore::Pump() {
  {
    absl::MutexLock lock(&mu_);
    pump_again_ = true;
    if (pumping_) return;
    pumping_ = true;
  }
  for (;;) {
    {
      absl::MutexLock lock(&mu_);
      if (!pump_again_) {
        pumping_ = false;
        return;
      }
      pump_again_ = false;
    }
    PumpOnce();
  }
}

void SchedulerCore::PumpOnce() {
  for (const Assignment& assignment : dispatcher_.Dispatch()) {
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<WorkerLink> worker;
    {
      absl::MutexLock lock(&mu_);
      if (const auto found = tickets_.find(assignment.request); found != tickets_.end()) {
        ticket = std::move(found->second);
        tickets_.erase(found);
      }
      if (const auto found = workers_.find(assignment.worker); found != workers_.end()) worker = found->second;
    }
    if (ticket == nullptr || !ticket->OnAssigned(std::move(worker))) Finish(assignment.request, std::nullopt);
  }
  for (const Dispatcher::Place& place : dispatcher_.Places()) {
    std::shared_ptr<Ticket> ticket;
    {
      absl::MutexLock lock(&mu_);
      if (const auto found = tickets_.find(place.id); found != tickets_.end()) ticket = found->second;
    }
    if (ticket != nullptr) ticket->OnPlace(place);
  }
}

absl::StatusOr<std::shared_ptr<WorkerLink>> SchedulerCore::OpenSession(const std::string& fingerprint) {
  std::shared_ptr<WorkerLink> best;
  bool any = false;
  const std::vector<std::shared_ptr<WorkerLink>> links = workers();
  absl::MutexLock lock(&mu_);
  for (const auto& link : links) {
    const auto snapshot = link->snapshot();
    if (link->state() != v1::WORKER_STATE_READY || snapshot->model().base_fingerprint() != fingerprint) continue;
    any = true;
    if (sessions_[link->name()] >= options_.max_sessions_per_worker) continue;
    if (best == nullptr || sessions_[link->name()] < sessions_[best->name()]) best = link;
  }
  if (!any) return NoWorker("no worker of this base is ready; try again");
  if (best == nullptr) {
    return Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull,
                  absl::StrCat("every worker holds ", options_.max_sessions_per_worker, " sessions; close one or try later"),
                  {{"retry_seconds", "5"}});
  }
  ++sessions_[best->name()];
  return best;
}

void SchedulerCore::CloseSession(const WorkerLink& worker) {
  absl::MutexLock lock(&mu_);
  --sessions_[worker.name()];
}

absl::Status SchedulerCore::CheckServing() const {
  if (!draining_.load()) return absl::OkStatus();
  return Refuse(absl::StatusCode::kUnavailable, reason::kDraining,
                "the server is draining and takes no new work; try another one", {{"retry_seconds", "5"}});
}

size_t SchedulerCore::sessions() const {
  absl::MutexLock lock(&mu_);
  size_t total = 0;
  for (const auto& [name, count] : sessions_) total += static_cast<size_t>(count);
  return total;
}

size_t SchedulerCore::Active() const { return admitted() + sessions(); }

void SchedulerCore::OnWorkerChange(WorkerLink& worker) {
  {
    absl::MutexLock lock(&mu_);  // Two changes may be told at once: the later one to come here sees the newest state.
    if (worker.state() == v1::WORKER_STATE_READY) {
      dispatcher_.WorkerReady(worker.name(), worker.snapshot()->model().base_fingerprint());
    } else {
      dispatcher_.WorkerGone(worker.name());
    }
  }
  Pump();
}

}  // namespace h3
