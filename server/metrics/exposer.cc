#include "server/metrics/exposer.h"

#include <dlfcn.h>
#include <prometheus/exposer.h>
#include <prometheus/gauge.h>
#include <pthread.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"

#ifndef H3_VERSION
#error "H3_VERSION comes from the build"
#endif

// CivetWeb asks for thread stacks of 100 KiB. The C library puts the static thread-local storage of every loaded library on that stack
// too, and with LibTorch's CUDA libraries it alone is larger: then no thread starts, and the exposer cannot either. This definition, in the
// program, comes before the C library's for all libraries: whoever asks for less gets a mebibyte.
extern "C" int pthread_attr_setstacksize(pthread_attr_t* attributes, size_t bytes) noexcept {
  using Real = int (*)(pthread_attr_t*, size_t);
  static const auto real = reinterpret_cast<Real>(dlsym(RTLD_NEXT, "pthread_attr_setstacksize"));
  return real(attributes, std::max(bytes, size_t{1} << 20));
}

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
    return absl::UnavailableError(absl::StrCat("--metrics ", address, ": cannot serve metrics there: ", e.what()));
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
