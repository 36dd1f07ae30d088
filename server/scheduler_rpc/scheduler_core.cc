#include "server/scheduler_rpc/scheduler_core.h"

#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/scheduler_rpc/presets.h"
#include "server/vram/admission.h"

namespace h3 {
namespace {

constexpr size_t kFileQueue = 1024;
constexpr absl::Duration kCountAdapters = absl::Seconds(30);
// Two heartbeats of a worker.
constexpr absl::Duration kFresh = absl::Seconds(2);

const char* StateName(v1::WorkerState state) {
  if (state == v1::WORKER_STATE_READY) return "ready";
  if (state == v1::WORKER_STATE_DRAINING) return "draining";
  return state == v1::WORKER_STATE_LOST ? "lost" : "loading";
}

absl::Status NoWorker(absl::string_view what) {
  return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost, what, {{"retry_seconds", "1"}});
}

BaseFacts FactsOf(const v1::Model& base) {
  return {PlanBaseFromProto(base), PlanOptionsFromProto(base), FromProto(base.partition()), base.grid_width()};
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
  CountRegistered();
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

std::vector<WorkerReport> SchedulerCore::WorkerReports(absl::Time now) const {
  std::vector<WorkerReport> reports;
  for (const auto& link : workers()) {
    const v1::WorkerState state = link->state();
    WorkerReport report{.worker = link->name(), .state = StateName(state)};
    const absl::Time heard = link->heard();
    if (const auto snapshot = link->snapshot(); snapshot != nullptr) {
      report.heard = absl::ToDoubleSeconds(heard - absl::UnixEpoch());
      if (state != v1::WORKER_STATE_LOST && now - heard < kFresh) {
        report.memory = FromProto(snapshot->memory());
        report.out_of_memory = static_cast<int64_t>(snapshot->memory().out_of_memory());
      }
    }
    reports.push_back(std::move(report));
  }
  return reports;
}

absl::StatusOr<ChosenBase> SchedulerCore::ChooseBase(Task task, const std::string& model) const {
  std::vector<std::string> known;
  std::optional<absl::Status> mismatch;
  for (const auto& link : workers()) {
    const auto snapshot = link->snapshot();
    if (snapshot == nullptr) continue;
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
    if (snapshot != nullptr) return ChosenBase{snapshot->model().base_fingerprint(), FactsOf(snapshot->model()), snapshot->model().dtype()};
  }
  return NoWorker("no worker is ready yet; it is loading its model, or cannot: see `h3ctl status`");
}

absl::StatusOr<PinnedStack> SchedulerCore::PinStack(StackEntries stack, int64_t evaluations, const BaseFacts& base) {
  PinnedStack pinned;
  H3_ASSIGN_OR_RETURN(const std::vector<StackEntry> entries, FromProto(stack));
  H3_RETURN_IF_ERROR(CheckStack(entries, evaluations));
  for (size_t i = 0; i < entries.size(); ++i) {
    auto found = registry_.Resolve(entries[i], i, base);
    if (!found.ok()) {
      metrics_.CountAdapterRefusal(ReasonOf(found.status()));
      return found.status();
    }
    ResolvedAdapter resolved = *std::move(found);
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
  if (options_.refuse_when_full && !dispatcher_.FitsNow(request)) {
    return Refuse(absl::StatusCode::kResourceExhausted, reason::kVramExceeded,
                  absl::StrCat("the request needs ", Human(request.bytes), ", which sessions hold now (--when-full refuse); try again later"),
                  {{"needed_bytes", absl::StrCat(request.bytes.value())}, {"retry_seconds", "5"}});
  }
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

void SchedulerCore::Requeue(RequestId id, WorkerLink& lost, std::shared_ptr<Ticket> ticket) {
  OnWorkerChange(lost);  // That it is gone may not have been told yet: nothing must be assigned to it once its place is free.
  {
    absl::MutexLock lock(&mu_);
    tickets_[id] = std::move(ticket);  // Before it can be withdrawn.
  }
  dispatcher_.Requeue(id);
  Pump();
}

absl::Status SchedulerCore::CheckFits(const std::string& fingerprint, const RequestPlan& plan) const {
  std::optional<absl::Status> refusal;
  ByteCount largest;
  for (const auto& link : workers()) {
    const auto snapshot = link->snapshot();
    if (snapshot == nullptr || snapshot->model().base_fingerprint() != fingerprint) continue;
    const v1::DeviceMemory& memory = snapshot->memory();
    const auto bytes = [](uint64_t count) { return ByteCount(static_cast<int64_t>(count)); };
    const ByteCount total = bytes(memory.total_bytes());
    const Admission admission(total, bytes(memory.margin_bytes()));
    const Occupancy empty{.fixed = bytes(memory.owners().base_weights()) + bytes(memory.owners().runtime_context()), .own = plan.adapters};
    absl::Status status = admission.Check("the request", {.held = plan.peak()}, empty);
    if (status.ok()) return status;
    if (!refusal.has_value() || total > largest) refusal = std::move(status), largest = total;
  }
  return refusal.value_or(absl::OkStatus());
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
    assign_ = places_moved_ = true;
  }
  CallTickets();
}

void SchedulerCore::TellPlaces() {
  {
    absl::MutexLock lock(&mu_);
    if (!places_moved_) return;
    tell_places_ = true;
    places_moved_ = false;
  }
  CallTickets();
}

void SchedulerCore::CallTickets() {
  {
    absl::MutexLock lock(&mu_);
    if (calling_tickets_) return;  // Whoever does looks again.
    calling_tickets_ = true;
  }
  for (;;) {
    bool assign = false, tell = false;
    {
      absl::MutexLock lock(&mu_);
      assign = std::exchange(assign_, false);
      tell = std::exchange(tell_places_, false);
      if (!assign && !tell) {
        calling_tickets_ = false;
        return;
      }
    }
    if (assign) Assign();
    if (!tell) continue;
    for (const Dispatcher::Place& place : dispatcher_.Places()) {
      std::shared_ptr<Ticket> ticket;
      {
        absl::MutexLock lock(&mu_);
        if (const auto found = tickets_.find(place.id); found != tickets_.end()) ticket = found->second;
      }
      if (ticket != nullptr) ticket->OnPlace(place);
    }
  }
}

void SchedulerCore::Assign() {
  for (const Assignment& assignment : dispatcher_.Dispatch(absl::Now())) {
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<WorkerLink> worker;
    {
      absl::MutexLock lock(&mu_);
      if (const auto found = tickets_.find(assignment.request); found != tickets_.end()) {
        ticket = std::move(found->second);
        tickets_.erase(found);
      }
      worker = workers_.at(assignment.worker);
    }
    if (ticket == nullptr || !ticket->OnAssigned(std::move(worker))) Finish(assignment.request, std::nullopt);
  }
  Prefetch();
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

void SchedulerCore::CloseSession(const std::shared_ptr<WorkerLink>& worker) {
  {
    absl::MutexLock lock(&mu_);
    --sessions_[worker->name()];
  }
  // What waits for the memory that it held need not wait for the next heartbeat.
  worker->Refresh([] {});
}

void SchedulerCore::Prefetch() {
  constexpr size_t kAhead = 4;
  std::vector<PendingRequest> next = dispatcher_.Next(kAhead);
  {
    absl::MutexLock lock(&mu_);
    RequestId last = prefetched_;
    std::erase_if(next, [&](const PendingRequest& request) { return request.id <= prefetched_ || request.adapters.empty(); });
    for (const PendingRequest& request : next) last = std::max(last, request.id);
    prefetched_ = last;
  }
  if (next.empty()) return;
  for (const auto& link : workers()) {
    const auto snapshot = link->snapshot();
    if (link->state() != v1::WORKER_STATE_READY) continue;
    v1::PrefetchAdaptersRequest wanted;
    for (const PendingRequest& request : next) {
      if (request.fingerprint != snapshot->model().base_fingerprint()) continue;
      for (const NeededAdapter& adapter : request.adapters) {
        auto& one = *wanted.add_adapters();
        one.set_name(adapter.name);
        one.set_digest(adapter.digest);
      }
    }
    if (wanted.adapters_size() > 0) link->Prefetch(wanted);
  }
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

void SchedulerCore::CountWorkerRefusal(const absl::Status& status) {
  const std::string reason = ReasonOf(status);
  if (reason.empty() || reason == reason::kCancelled || reason == reason::kWorkerLost) return;
  const bool of_adapter = DetailsOf(status).count("adapter") > 0;
  if (of_adapter) metrics_.CountAdapterRefusal(reason);
  // NaN in a tensor of the request is the request's.
  metrics_.CountRejection(reason == reason::kNotFinite && !of_adapter ? reason::kBadTensor : absl::string_view(reason));
}

void SchedulerCore::CountRegistered() {
  {
    absl::MutexLock lock(&mu_);
    counted_at_ = absl::Now();
  }
  if (const auto adapters = registry_.List(); adapters.ok()) registered_.store(static_cast<int64_t>(adapters->size()));
}

int64_t SchedulerCore::adapters_registered() {
  bool again = false;
  {
    absl::MutexLock lock(&mu_);
    again = absl::Now() - counted_at_ > kCountAdapters;
    if (again) counted_at_ = absl::Now();  // One at a time.
  }
  if (again) files_.Post([this] { CountRegistered(); });
  return registered_.load();
}

size_t SchedulerCore::Active() const { return admitted() + sessions(); }

void SchedulerCore::OnWorkerChange(WorkerLink& worker) {
  {
    absl::MutexLock lock(&mu_);  // Two changes may be told at once: the later one to come here sees the newest state.
    if (worker.state() == v1::WORKER_STATE_READY) {
      const auto snapshot = worker.snapshot();
      WorkerMemory memory{.shared = snapshot->sessions() > 0 || sessions_[worker.name()] > 0,
                          .headroom = ByteCount(static_cast<int64_t>(snapshot->memory().headroom_bytes()))};
      for (const v1::AdapterMemory& adapter : snapshot->memory().adapters()) {
        if (adapter.pins() > 0) memory.pinned.insert(adapter.digest());
      }
      dispatcher_.WorkerReady(worker.name(), snapshot->model().base_fingerprint(), std::move(memory));
    } else {
      dispatcher_.WorkerGone(worker.name());
    }
  }
  Pump();
}

}  // namespace h3
