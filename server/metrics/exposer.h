// Serves /metrics over HTTP.
#pragma once

#include <prometheus/collectable.h>
#include <prometheus/registry.h>

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace prometheus {
class Exposer;
}

namespace h3 {

class MetricsExposer {
 public:
  // `address`: HOST:PORT; port 0 picks a free one. UNAVAILABLE when it cannot listen there.
  static absl::StatusOr<std::unique_ptr<MetricsExposer>> Create(const std::string& address);
  ~MetricsExposer();

  // HOST:PORT as it listens.
  const std::string& address() const { return address_; }
  prometheus::Registry& registry() { return *registry_; }
  // Read at each scrape, as long as it lives.
  void Add(std::shared_ptr<prometheus::Collectable> collectable);

 private:
  MetricsExposer(std::unique_ptr<prometheus::Exposer> exposer, std::string address);

  const std::unique_ptr<prometheus::Exposer> exposer_;
  const std::string address_;
  const std::shared_ptr<prometheus::Registry> registry_;
  std::vector<std::shared_ptr<prometheus::Collectable>> collectables_;
};

}  // namespace h3
