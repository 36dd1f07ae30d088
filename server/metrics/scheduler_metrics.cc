#include "server/metrics/scheduler_metrics.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "server/base/error.h"
#include "server/metrics/families.h"

namespace h3 {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

Buckets WaitBuckets() { return {0.005, 0.02, 0.1, 0.5, 1, 5, 15, 60, 180, 600}; }
Buckets DurationBuckets() { return {0.25, 0.5, 1, 2, 5, 10, 20, 40, 90, 180, 400, 900}; }
Buckets PhaseBuckets() { return {0.005, 0.02, 0.1, 0.25, 0.5, 1, 2, 5, 10, 20, 40, 90, 180, 400, 900}; }

constexpr std::array kPriorities = {"high", "normal", "low"};
constexpr std::array<const char*, kRequestPhases> kPhases = {"queue", "prepare", "denoise", "stream"};

// What is wrong with an adapter, as its own content says it or its digest: the label is the reason in lower case.
constexpr std::array kAdapterReasons = {
    reason::kAdalnNeedsGrid,  reason::kAdapterChanged, reason::kAmbiguousNames, reason::kBadScale,        reason::kBaseMismatch,
    reason::kIncompleteCurve, reason::kMalformedFile,  reason::kMissingPair,    reason::kNoAdapterTensors, reason::kNotFinite,
    reason::kRankMismatch,    reason::kShapeMismatch,  reason::kUnknownModule,  reason::kUnsupportedAdapterType,
    reason::kUnsupportedBase, reason::kUnsupportedDora};

bool IsAdapterReason(absl::string_view reason) {
  return std::find(kAdapterReasons.begin(), kAdapterReasons.end(), reason) != kAdapterReasons.end();
}

const char* RejectionLabel(absl::string_view reason) {
  if (reason == reason::kQueueFull) return "queue_full";
  if (reason == reason::kVramExceeded) return "vram";
  if (reason == reason::kDeadlineTooShort) return "deadline";
  if (reason == reason::kDraining) return "draining";
  if (reason == reason::kWorkerLost) return "no_worker";
  if (IsAdapterReason(reason) || reason == reason::kUnknownAdapter) return "invalid_adapter";
  for (const absl::string_view invalid : {reason::kBadLayout, reason::kBadTensor, reason::kBadStrength, reason::kBadRequest,
                                          reason::kUnknownPreset, reason::kPresetChanged}) {
    if (reason == invalid) return "invalid_request";
  }
  return "other";
}

const char* Name(RequestPhase phase) { return kPhases[static_cast<size_t>(phase)]; }

}  // namespace

SchedulerMetrics::SchedulerMetrics(prometheus::Registry& registry)
    : worker_restarts(Counters(registry, "h3_worker_restarts_total", "Local workers that ended and were started again.").Add({})),
      requests_retried(
          Counters(registry, "h3_requests_retried_total", "Times that a request was queued again after its worker was lost.").Add({})),
      requests_poisonous(Counters(registry, "h3_requests_poisonous_total",
                                  "Requests refused because two workers in a row were lost at the same step of them.")
                             .Add({})),
      requests_(Counters(registry, "h3_requests_total", "Generate calls that ended, by task and gRPC code.")),
      durations_(Histograms(registry, "h3_request_duration_seconds", "Time from the header to the end of completed Generate calls.")),
      output_bytes_(Counters(registry, "h3_output_bytes_total", "Bytes of results that were written to clients, of sessions too.")),
      rejections_(Counters(registry, "h3_admission_rejections_total", "Requests refused before they ran.")),
      cancellations_(Counters(registry, "h3_cancellations_total", "Requests that were cancelled.")),
      adapter_refusals_(Counters(registry, "h3_adapter_validation_failures_total",
                                 "Adapters of requests that were looked at and refused, by what is wrong with them.")),
      queue_waits_(Histograms(registry, "h3_queue_wait_seconds", "Time from acceptance to the start on a worker.")),
      phases_(Histograms(registry, "h3_request_phase_seconds",
                         "Time of each phase that a request went through to its end: waiting, preparation, steps, its result on the way.")),
      in_flight_(prometheus::BuildGauge()
                     .Name("h3_requests_in_flight")
                     .Help("Requests that a worker prepares (prepare) or computes (denoise), or whose results are being sent (stream).")
                     .Register(registry)) {
  for (const char* task : kTasks) {
    for (const char* code : kCodes) requests_.Add({{"task", task}, {"code", code}});
    durations_.Add({{"task", task}}, DurationBuckets());
    output_bytes_.Add({{"task", task}});
  }
  for (const char* reason : {"queue_full", "vram", "deadline", "draining", "no_worker", "invalid_request", "invalid_adapter", "other"})
    rejections_.Add({{"reason", reason}});
  for (const char* origin : {"client", "deadline", "drain"}) cancellations_.Add({{"origin", origin}});
  for (const absl::string_view reason : kAdapterReasons) adapter_refusals_.Add({{"reason", absl::AsciiStrToLower(reason)}});
  for (const char* priority : kPriorities) queue_waits_.Add({{"priority", priority}}, WaitBuckets());
  for (const char* phase : kPhases) phases_.Add({{"phase", phase}}, PhaseBuckets());
  for (const RequestPhase phase : {RequestPhase::kPrepare, RequestPhase::kDenoise, RequestPhase::kStream})
    in_flight_.Add({{"phase", Name(phase)}});
}

void SchedulerMetrics::CountRequest(const std::string& task, const std::string& code) {
  requests_.Add({{"task", task}, {"code", code}}).Increment();
}

void SchedulerMetrics::ObserveDuration(const std::string& task, double seconds) {
  durations_.Add({{"task", task}}, DurationBuckets()).Observe(seconds);
}

void SchedulerMetrics::CountOutput(const std::string& task, size_t bytes) {
  output_bytes_.Add({{"task", task}}).Increment(static_cast<double>(bytes));
}

void SchedulerMetrics::CountRejection(absl::string_view reason) {
  rejections_.Add({{"reason", RejectionLabel(reason)}}).Increment();
}

void SchedulerMetrics::CountCancellation(const std::string& origin) { cancellations_.Add({{"origin", origin}}).Increment(); }

void SchedulerMetrics::CountAdapterRefusal(absl::string_view reason) {
  if (IsAdapterReason(reason)) adapter_refusals_.Add({{"reason", absl::AsciiStrToLower(reason)}}).Increment();
}

void SchedulerMetrics::ObserveQueueWait(const std::string& priority, double seconds) {
  queue_waits_.Add({{"priority", priority}}, WaitBuckets()).Observe(seconds);
}

void SchedulerMetrics::ObservePhase(RequestPhase phase, double seconds) {
  phases_.Add({{"phase", Name(phase)}}, PhaseBuckets()).Observe(seconds);
}

void SchedulerMetrics::ChangeInFlight(RequestPhase phase, int by) {
  if (phase != RequestPhase::kQueue) in_flight_.Add({{"phase", Name(phase)}}).Increment(by);
}

std::vector<prometheus::MetricFamily> QueueCollector::Collect() const {
  const QueueGauges now = read_();
  Families families("h3_");
  prometheus::MetricFamily& queued = families.Gauge("queue_requests", "Requests that wait, by priority.");
  for (size_t i = 0; i < kPriorities.size(); ++i) AddSample(queued, now.queued[i], {{"priority", kPriorities[i]}});
  AddSample(families.Gauge("queue_capacity_requests", "Requests that may wait."), now.capacity);
  AddSample(families.Gauge("queue_work_seconds", "Predicted time of one device for all that waits and for what is left of all that runs; "
                                                 "0 until a request has completed."),
            now.work_seconds);
  AddSample(families.Gauge("queue_oldest_enqueue_timestamp_seconds",
                           "Since when the request that has waited longest waits; 0 while none does."),
            now.oldest_timestamp);
  AddSample(families.Gauge("queue_buffered_bytes", "Host memory for the tensors of requests that wait, or run and may be run again."),
            now.buffered_bytes);
  AddSample(families.Gauge("sessions", "Open Evaluate sessions."), now.sessions);
  AddSample(families.Gauge("workers_ready", "Workers that serve."), now.workers_ready);
  AddSample(families.Gauge("adapters_registered", "Adapters in the adapters directory and among the uploads, as of the last half minute."),
            now.adapters_registered);
  return std::move(families).Take();
}

}  // namespace h3
