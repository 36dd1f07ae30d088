#include "server/metrics/exposer.h"

#include <prometheus/exposer.h>
#include <prometheus/gauge.h>

#include <exception>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

#ifndef H3_VERSION
#error "H3_VERSION comes from the build"
#endif

namespace h3 {

absl::StatusOr<std::unique_ptr<MetricsExposer>> MetricsExposer::Create(const std::string& address) {
  // civetweb throws where it cannot listen; this is the one place that catches prometheus-cpp.
  try {
    auto exposer = std::make_unique<prometheus::Exposer>(address, 1);
    const std::vector<int> ports = exposer->GetListeningPorts();
    const std::string host = address.substr(0, address.rfind(':'));
    const std::string bound = ports.empty() ? address : absl::StrCat(host, ":", ports.front());
    return absl::WrapUnique(new MetricsExposer(std::move(exposer), bound));
  } catch (const std::exception& e) {
    return absl::UnavailableError(absl::StrCat("cannot serve metrics on ", address, ": ", e.what()));
  }
}

MetricsExposer::MetricsExposer(std::unique_ptr<prometheus::Exposer> exposer, std::string address)
    : exposer_(std::move(exposer)), address_(std::move(address)), registry_(std::make_shared<prometheus::Registry>()) {
  prometheus::BuildGauge()
      .Name("h3_build_info")
      .Help("1, with the version as a label.")
      .Register(*registry_)
      .Add({{"version", H3_VERSION}})
      .Set(1);
  exposer_->RegisterCollectable(registry_);
}

MetricsExposer::~MetricsExposer() = default;

void MetricsExposer::Add(std::shared_ptr<prometheus::Collectable> collectable) {
  exposer_->RegisterCollectable(collectable);
  collectables_.push_back(std::move(collectable));
}

}  // namespace h3
