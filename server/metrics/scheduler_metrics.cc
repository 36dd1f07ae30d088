#include "server/metrics/scheduler_metrics.h"

namespace h3 {
namespace {

prometheus::Histogram::BucketBoundaries WaitBuckets() { return {0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 180, 600}; }
prometheus::Histogram::BucketBoundaries DurationBuckets() { return {0.25, 0.5, 1, 2, 5, 10, 20, 40, 90, 180, 400, 900}; }

constexpr std::array kTasks = {"t2va", "fl2va", "ref2va"};
constexpr std::array kCodes = {
    "OK",      "CANCELLED", "INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED",
    "ABORTED", "INTERNAL",  "UNAVAILABLE"};

std::string RejectionLabel(absl::string_view reason) {
  if (reason == "QUEUE_FULL") return "queue_full";
  if (reason == "VRAM_EXCEEDED") return "vram";
  if (reason == "DEADLINE_TOO_SHORT") return "deadline";
  if (reason == "DRAINING") return "draining";
  if (reason == "WORKER_LOST") return "no_worker";
  if (reason == "BAD_LAYOUT" || reason == "BAD_TENSOR" || reason == "BAD_STRENGTH" || reason == "BAD_REQUEST")
    return "invalid_request";
  return "invalid_adapter";
}

}  // namespace

SchedulerMetrics::SchedulerMetrics(prometheus::Registry& registry)
    : queue_wait_seconds(prometheus::BuildHistogram()
                             .Name("h3_queue_wait_seconds")
                             .Help("Time from acceptance to the start on a worker.")
                             .Register(registry)
                             .Add({}, WaitBuckets())),
      worker_restarts(prometheus::BuildCounter()
                          .Name("h3_worker_restarts_total")
                          .Help("Local workers that ended and were started again.")
                          .Register(registry)
                          .Add({})),
      requests_(prometheus::BuildCounter()
                    .Name("h3_requests_total")
                    .Help("Generate calls that ended, by task and gRPC code.")
                    .Register(registry)),
      durations_(prometheus::BuildHistogram()
                     .Name("h3_request_duration_seconds")
                     .Help("Time from the header to the end of completed Generate calls.")
                     .Register(registry)),
      rejections_(prometheus::BuildCounter()
                      .Name("h3_admission_rejections_total")
                      .Help("Requests refused before they ran.")
                      .Register(registry)),
      cancellations_(
          prometheus::BuildCounter().Name("h3_cancellations_total").Help("Requests that were cancelled.").Register(registry)) {
  for (const char* task : kTasks) {
    for (const char* code : kCodes) requests_.Add({{"task", task}, {"code", code}});
    durations_.Add({{"task", task}}, DurationBuckets());
  }
  for (const char* reason : {"queue_full", "vram", "deadline", "draining", "no_worker", "invalid_request", "invalid_adapter"})
    rejections_.Add({{"reason", reason}});
  for (const char* origin : {"client", "deadline", "drain"}) cancellations_.Add({{"origin", origin}});
}

void SchedulerMetrics::CountRequest(const std::string& task, const std::string& code) {
  requests_.Add({{"task", task}, {"code", code}}).Increment();
}

void SchedulerMetrics::ObserveDuration(const std::string& task, double seconds) {
  durations_.Add({{"task", task}}, DurationBuckets()).Observe(seconds);
}

void SchedulerMetrics::CountRejection(absl::string_view reason) {
  rejections_.Add({{"reason", RejectionLabel(reason)}}).Increment();
}

void SchedulerMetrics::CountCancellation(const std::string& origin) { cancellations_.Add({{"origin", origin}}).Increment(); }

std::vector<prometheus::MetricFamily> QueueCollector::Collect() const {
  const QueueGauges now = read_();
  std::vector<prometheus::MetricFamily> families;
  const auto gauge = [&](const char* name, const char* help) -> prometheus::MetricFamily& {
    families.emplace_back();
    families.back().name = name;
    families.back().help = help;
    families.back().type = prometheus::MetricType::Gauge;
    return families.back();
  };
  const auto add = [](prometheus::MetricFamily& family, double value,
                      std::vector<prometheus::ClientMetric::Label> labels = {}) {
    prometheus::ClientMetric metric;
    metric.label = std::move(labels);
    metric.gauge.value = value;
    family.metric.push_back(std::move(metric));
  };
  prometheus::MetricFamily& queued = gauge("h3_queue_requests", "Requests that wait, by priority.");
  constexpr std::array kPriorities = {"high", "normal", "low"};
  for (size_t i = 0; i < kPriorities.size(); ++i) add(queued, now.queued[i], {{"priority", kPriorities[i]}});
  add(gauge("h3_queue_capacity_requests", "Requests that may wait."), now.capacity);
  add(gauge("h3_queue_buffered_bytes", "Host memory for the tensors of requests that have not started."), now.buffered_bytes);
  prometheus::MetricFamily& in_flight =
      gauge("h3_requests_in_flight", "Requests that a worker computes (denoise) or whose results are being sent (stream).");
  add(in_flight, now.running, {{"phase", "denoise"}});
  add(in_flight, now.streaming, {{"phase", "stream"}});
  add(gauge("h3_sessions", "Open Evaluate sessions."), now.sessions);
  add(gauge("h3_workers_ready", "Workers that serve."), now.workers_ready);
  return families;
}

}  // namespace h3
