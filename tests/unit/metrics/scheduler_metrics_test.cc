#include "server/metrics/scheduler_metrics.h"

#include <gtest/gtest.h>

#include <map>
#include <string>

#include "tests/unit/metrics/samples.h"

namespace h3 {
namespace {

class SchedulerMetricsTest : public ::testing::Test {
 protected:
  std::map<std::string, double> Of(const std::string& name, const std::string& first, const std::string& second = "") {
    return Samples(registry.Collect(), name, first, second);
  }
  double Sum(const std::string& name) { return Of(name, "").at(""); }
  prometheus::Registry registry;
  SchedulerMetrics metrics{registry};
};

TEST_F(SchedulerMetricsTest, EverySeriesIsThereBeforeTheFirstRequest) {
  const std::map<std::string, size_t> expected = {{"h3_requests_total", 30},
                                                  {"h3_request_duration_seconds", 3},
                                                  {"h3_output_bytes_total", 3},
                                                  {"h3_admission_rejections_total", 8},
                                                  {"h3_cancellations_total", 3},
                                                  {"h3_adapter_validation_failures_total", 16},
                                                  {"h3_queue_wait_seconds", 3},
                                                  {"h3_request_phase_seconds", 4},
                                                  {"h3_requests_in_flight", 3},
                                                  {"h3_worker_restarts_total", 1},
                                                  {"h3_requests_retried_total", 1},
                                                  {"h3_requests_poisonous_total", 1}};
  std::map<std::string, size_t> found;
  for (const prometheus::MetricFamily& family : registry.Collect()) {
    found[family.name] = family.metric.size();
    EXPECT_EQ(Sum(family.name), 0) << family.name;
  }
  EXPECT_EQ(found, expected);
}

TEST_F(SchedulerMetricsTest, RejectionsOfAnyReasonStayWithinTheLabels) {
  for (const char* reason : {"QUEUE_FULL", "VRAM_EXCEEDED", "UNKNOWN_ADAPTER", "SHAPE_MISMATCH", "BAD_TENSOR", "WORKER_LOST", "", "INVENTED"})
    metrics.CountRejection(reason);
  EXPECT_EQ(Of("h3_admission_rejections_total", "reason"),
            (std::map<std::string, double>{{"queue_full", 1}, {"vram", 1}, {"invalid_adapter", 2}, {"invalid_request", 1},
                                           {"no_worker", 1}, {"deadline", 0}, {"draining", 0}, {"other", 2}}));
}

TEST_F(SchedulerMetricsTest, OnlyWhatIsWrongWithAnAdapterIsAValidationFailure) {
  for (const char* reason : {"MISSING_PAIR", "MISSING_PAIR", "UNSUPPORTED_DORA", "UNKNOWN_ADAPTER", "IN_USE", "INVENTED"})
    metrics.CountAdapterRefusal(reason);
  const auto failures = Of("h3_adapter_validation_failures_total", "reason");
  EXPECT_EQ(failures.at("missing_pair"), 2);
  EXPECT_EQ(failures.at("unsupported_dora"), 1);
  EXPECT_EQ(Sum("h3_adapter_validation_failures_total"), 3);
  EXPECT_EQ(failures.size(), 16u);
}

TEST_F(SchedulerMetricsTest, RequestsEnterAndLeaveTheirPhases) {
  metrics.ChangeInFlight(RequestPhase::kQueue, 1);  // h3_queue_requests tells that.
  metrics.ChangeInFlight(RequestPhase::kPrepare, 1);
  metrics.ChangeInFlight(RequestPhase::kDenoise, 1);
  metrics.ChangeInFlight(RequestPhase::kDenoise, 1);
  metrics.ChangeInFlight(RequestPhase::kPrepare, -1);
  EXPECT_EQ(Of("h3_requests_in_flight", "phase"), (std::map<std::string, double>{{"prepare", 0}, {"denoise", 2}, {"stream", 0}}));
  metrics.ObservePhase(RequestPhase::kQueue, 0.1);
  EXPECT_EQ(Of("h3_request_phase_seconds", "phase").at("queue"), 1);
}

TEST_F(SchedulerMetricsTest, CountersMoveForTheirReasonOnly) {
  metrics.CountRequest("t2va", "CANCELLED");
  metrics.CountOutput("ref2va", 1000);
  metrics.CountCancellation("client");
  metrics.ObserveQueueWait("high", 3);
  EXPECT_EQ(Of("h3_requests_total", "task", "code").at("t2va CANCELLED"), 1);
  EXPECT_EQ(Sum("h3_requests_total"), 1);
  EXPECT_EQ(Of("h3_output_bytes_total", "task").at("ref2va"), 1000);
  EXPECT_EQ(Of("h3_queue_wait_seconds", "priority"), (std::map<std::string, double>{{"high", 1}, {"normal", 0}, {"low", 0}}));
  EXPECT_EQ(Of("h3_cancellations_total", "origin").at("client"), 1);
}

TEST(QueueCollectorTest, ShowsTheMomentOfTheScrape) {
  QueueGauges now;
  const QueueCollector collector([&] { return now; });
  for (const char* name : {"h3_queue_capacity_requests", "h3_queue_work_seconds", "h3_queue_oldest_enqueue_timestamp_seconds",
                           "h3_queue_buffered_bytes", "h3_sessions", "h3_workers_ready", "h3_adapters_registered"}) {
    EXPECT_EQ(Samples(collector.Collect(), name, ""), (std::map<std::string, double>{{"", 0}})) << name;
  }
  now = {.queued = {1, 2, 3}, .work_seconds = 12.5, .oldest_timestamp = 1.7e9, .adapters_registered = 7};
  const auto families = collector.Collect();
  EXPECT_EQ(Samples(families, "h3_queue_requests", "priority"), (std::map<std::string, double>{{"high", 1}, {"normal", 2}, {"low", 3}}));
  EXPECT_EQ(Samples(families, "h3_queue_work_seconds", "").at(""), 12.5);
  EXPECT_EQ(Samples(families, "h3_queue_oldest_enqueue_timestamp_seconds", "").at(""), 1.7e9);
  EXPECT_EQ(Samples(families, "h3_adapters_registered", "").at(""), 7);
}

}  // namespace
}  // namespace h3
