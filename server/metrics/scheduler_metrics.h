// What a scheduler counts. Every series that is known beforehand starts at 0; gauges are read at the scrape.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace h3 {

// What a request goes through. In kQueue it waits, in kPrepare and kDenoise a worker has it, in kStream its result is on the way to its
// client.
enum class RequestPhase { kQueue, kPrepare, kDenoise, kStream };
inline constexpr size_t kRequestPhases = 4;

// Thread-safe. Callers give the labels' words that are listed with each method, and nothing that comes from a client.
class SchedulerMetrics {
 public:
  explicit SchedulerMetrics(prometheus::Registry& registry);

  // `task`: "t2va", "fl2va", "ref2va"; `code`: name of a gRPC code.
  void CountRequest(const std::string& task, const std::string& code);
  void ObserveDuration(const std::string& task, double seconds);
  // Bytes of results that were written to clients.
  void CountOutput(const std::string& task, size_t bytes);
  // `reason`: as users see it (QUEUE_FULL, ...): counted under a bounded set of labels.
  void CountRejection(absl::string_view reason);
  // `origin`: "client", "deadline", "drain".
  void CountCancellation(const std::string& origin);
  // Of an adapter that was looked at and refused. `reason`: as users see it; one that says nothing of an adapter's content is not counted.
  void CountAdapterRefusal(absl::string_view reason);
  // `priority`: "high", "normal", "low".
  void ObserveQueueWait(const std::string& priority, double seconds);
  // A phase that a request went through to its end.
  void ObservePhase(RequestPhase phase, double seconds);
  // Requests in that phase now. kQueue has none: h3_queue_requests tells.
  void ChangeInFlight(RequestPhase phase, int by);

  prometheus::Counter& worker_restarts;
  prometheus::Counter& requests_retried;    // Each time that one is queued again.
  prometheus::Counter& requests_poisonous;  // Ended with REQUEST_KILLS_WORKERS.

 private:
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Histogram>& durations_;
  prometheus::Family<prometheus::Counter>& output_bytes_;
  prometheus::Family<prometheus::Counter>& rejections_;
  prometheus::Family<prometheus::Counter>& cancellations_;
  prometheus::Family<prometheus::Counter>& adapter_refusals_;
  prometheus::Family<prometheus::Histogram>& queue_waits_;
  prometheus::Family<prometheus::Histogram>& phases_;
  prometheus::Family<prometheus::Gauge>& in_flight_;
};

struct QueueGauges {
  std::array<double, 3> queued{};  // high, normal, low
  double capacity = 0;
  double work_seconds = 0;      // Predicted: of what waits, and what is left of what runs.
  double oldest_timestamp = 0;  // Unix seconds; 0 while nothing waits.
  double buffered_bytes = 0;
  double sessions = 0;
  double workers_ready = 0;
  double adapters_registered = 0;
};

class QueueCollector final : public prometheus::Collectable {
 public:
  explicit QueueCollector(std::function<QueueGauges()> read) : read_(std::move(read)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::function<QueueGauges()> read_;
};

}  // namespace h3
