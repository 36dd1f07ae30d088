// What a scheduler counts. Every series that is known beforehand starts at 0; gauges are read at the scrape.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/counter.h>
#include <prometheus/family.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace h3 {

// Thread-safe.
class SchedulerMetrics {
 public:
  explicit SchedulerMetrics(prometheus::Registry& registry);

  // `task`: "t2va", "fl2va", "ref2va"; `code`: name of a gRPC code.
  void CountRequest(const std::string& task, const std::string& code);
  void ObserveDuration(const std::string& task, double seconds);
  // `reason`: as users see it (QUEUE_FULL, ...): counted under a bounded set of labels.
  void CountRejection(absl::string_view reason);
  // `origin`: "client", "deadline", "drain".
  void CountCancellation(const std::string& origin);

  prometheus::Histogram& queue_wait_seconds;
  prometheus::Counter& worker_restarts;

 private:
  prometheus::Family<prometheus::Counter>& requests_;
  prometheus::Family<prometheus::Histogram>& durations_;
  prometheus::Family<prometheus::Counter>& rejections_;
  prometheus::Family<prometheus::Counter>& cancellations_;
};

struct QueueGauges {
  std::array<double, 3> queued{};  // high, normal, low
  double capacity = 0;
  double buffered_bytes = 0;
  double running = 0;
  double streaming = 0;  // Computed, on the way to their clients.
  double sessions = 0;
  double workers_ready = 0;
};

class QueueCollector final : public prometheus::Collectable {
 public:
  explicit QueueCollector(std::function<QueueGauges()> read) : read_(std::move(read)) {}
  std::vector<prometheus::MetricFamily> Collect() const override;

 private:
  const std::function<QueueGauges()> read_;
};

}  // namespace h3
