#include "server/scheduler/dispatcher.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"

namespace h3 {

absl::Status Dispatcher::Submit(PendingRequest request) {
  absl::MutexLock lock(&mu_);
  if (QueuedLocked() >= capacity_) {
    double seconds = 1;
    for (const auto& [id, running] : running_) seconds = std::max(seconds, running.request.work * seconds_per_work_);
    return Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull,
                  absl::StrCat("the queue is full (", capacity_, " requests wait); try again later"),
                  {{"retry_seconds", absl::StrCat(static_cast<int64_t>(seconds) + 1)}, {"capacity", absl::StrCat(capacity_)}});
  }
  queues_[static_cast<size_t>(request.priority)].push_back({std::move(request)});
  return absl::OkStatus();
}

void Dispatcher::Release(RequestId id) {
  absl::MutexLock lock(&mu_);
  for (std::deque<Waiting>& queue : queues_) {
    for (Waiting& waiting : queue) {
      if (waiting.request.id == id) waiting.held = false;
    }
  }
}

std::vector<Assignment> Dispatcher::Dispatch(absl::Time now) {
  absl::MutexLock lock(&mu_);
  std::vector<Assignment> assignments;
  for (std::deque<Waiting>& queue : queues_) {
    for (auto waiting = queue.begin(); waiting != queue.end();) {
      PendingRequest& request = waiting->request;
      const auto worker = std::find_if(workers_.begin(), workers_.end(), [&](const auto& entry) {
        return !entry.second.running.has_value() && entry.second.fingerprint == request.fingerprint &&
               Fits(entry.second, request);
      });
      if (waiting->held || worker == workers_.end()) {
        ++waiting;
        continue;
      }
      worker->second.running = request.id;
      assignments.push_back({request.id, worker->first});
      running_[request.id] = {std::move(request), now};
      waiting = queue.erase(waiting);
    }
  }
  return assignments;
}

bool Dispatcher::Remove(RequestId id) {
  absl::MutexLock lock(&mu_);
  for (std::deque<Waiting>& queue : queues_) {
    const auto found = std::find_if(queue.begin(), queue.end(), [&](const Waiting& w) { return w.request.id == id; });
    if (found == queue.end()) continue;
    queue.erase(found);
    return true;
  }
  return false;
}

void Dispatcher::Finished(RequestId id, std::optional<double> seconds) {
  constexpr double kWeight = 0.3;  // Of the newest sample: follows a change of load within a few requests.
  absl::MutexLock lock(&mu_);
  const auto running = running_.find(id);
  if (running == running_.end()) return;
  if (seconds.has_value() && running->second.request.work > 0) {
    const double sample = *seconds / running->second.request.work;
    seconds_per_work_ = seconds_per_work_ == 0 ? sample : (1 - kWeight) * seconds_per_work_ + kWeight * sample;
  }
  running_.erase(running);
  FreeLocked(id);
}

void Dispatcher::Requeue(RequestId id) {
  absl::MutexLock lock(&mu_);
  const auto running = running_.find(id);
  if (running == running_.end()) return;
  std::deque<Waiting>& queue = queues_[static_cast<size_t>(running->second.request.priority)];
  const auto after = std::find_if(queue.begin(), queue.end(), [&](const Waiting& w) { return w.request.id > id; });
  queue.insert(after, {.request = std::move(running->second.request), .held = false});
  running_.erase(running);
  FreeLocked(id);
}

void Dispatcher::FreeLocked(RequestId id) {
  for (auto& [name, worker] : workers_) {
    if (worker.running == id) worker.running.reset();
  }
}

void Dispatcher::WorkerReady(const WorkerId& worker, const std::string& fingerprint, WorkerMemory memory) {
  absl::MutexLock lock(&mu_);
  workers_[worker].fingerprint = fingerprint;
  workers_[worker].memory = std::move(memory);
}

bool Dispatcher::Fits(const Worker& worker, const PendingRequest& request) {
  if (!worker.memory.shared) return true;  // What can never fit was refused at its admission.
  ByteCount needed = request.bytes;
  for (const NeededAdapter& adapter : request.adapters) {
    if (!worker.memory.pinned.contains(adapter.digest)) needed += adapter.bytes;
  }
  return needed <= worker.memory.headroom;
}

bool Dispatcher::FitsNow(const PendingRequest& request) const {
  absl::MutexLock lock(&mu_);
  return std::any_of(workers_.begin(), workers_.end(), [&](const auto& entry) {
    return entry.second.fingerprint == request.fingerprint && Fits(entry.second, request);
  });
}

std::vector<PendingRequest> Dispatcher::Next(size_t count) const {
  absl::MutexLock lock(&mu_);
  std::vector<PendingRequest> next;
  for (const std::deque<Waiting>& queue : queues_) {
    for (const Waiting& waiting : queue) {
      if (next.size() == count) return next;
      next.push_back(waiting.request);
    }
  }
  return next;
}

void Dispatcher::WorkerGone(const WorkerId& worker) {
  absl::MutexLock lock(&mu_);
  workers_.erase(worker);
}

std::vector<Dispatcher::Place> Dispatcher::Places() const {
  absl::MutexLock lock(&mu_);
  std::vector<Place> places = PlacesLocked();
  std::erase_if(places, [](const Place& place) { return place.held; });
  return places;
}

std::optional<Dispatcher::Place> Dispatcher::PlaceOf(RequestId id) const {
  absl::MutexLock lock(&mu_);
  for (const Place& place : PlacesLocked()) {
    if (place.id == id) return place;
  }
  return std::nullopt;
}

std::vector<Dispatcher::Place> Dispatcher::PlacesLocked() const {
  std::vector<Place> places;
  double before = 0;
  for (const auto& [id, running] : running_) before += running.request.work;
  const double workers = std::max<double>(1, static_cast<double>(workers_.size()));
  for (const std::deque<Waiting>& queue : queues_) {
    for (const Waiting& waiting : queue) {
      before += waiting.request.work;
      places.push_back({waiting.request.id, static_cast<uint32_t>(places.size()), before * seconds_per_work_ / workers, waiting.held});
    }
  }
  return places;
}

Dispatcher::Figures Dispatcher::FiguresAt(absl::Time now) const {
  absl::MutexLock lock(&mu_);
  Figures figures;
  for (size_t i = 0; i < kPriorityClasses; ++i) {
    figures.queued[i] = queues_[i].size();
    for (const Waiting& waiting : queues_[i]) {
      figures.work_seconds += waiting.request.work * seconds_per_work_;
      figures.oldest = std::min(figures.oldest.value_or(absl::InfiniteFuture()), waiting.request.enqueued);
    }
  }
  for (const auto& [id, running] : running_) {
    const double passed = absl::ToDoubleSeconds(now - running.started);
    figures.work_seconds += std::max(0.0, running.request.work * seconds_per_work_ - passed);
  }
  return figures;
}

size_t Dispatcher::queued(PriorityClass priority) const {
  absl::MutexLock lock(&mu_);
  return queues_[static_cast<size_t>(priority)].size();
}

size_t Dispatcher::queued() const {
  absl::MutexLock lock(&mu_);
  return QueuedLocked();
}

size_t Dispatcher::QueuedLocked() const {
  size_t total = 0;
  for (const auto& queue : queues_) total += queue.size();
  return total;
}

size_t Dispatcher::running() const {
  absl::MutexLock lock(&mu_);
  return running_.size();
}

}  // namespace h3
