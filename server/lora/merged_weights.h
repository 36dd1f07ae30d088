// Merged copies of single weights, for stacks that ask for apply=materialized: made before a run, shared by stacks that merge the
// same, kept for the next one while there is room. The base is never touched.
#pragma once

#include <atomic>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "server/base/bytes.h"
#include "server/nn/linear.h"
#include "server/nn/site.h"

namespace h3 {

// The weight that `ops` make of the base, in the base's type, made in float32 a few rows at a time. Counts it under
// Owner::kMaterialized. All modalities must take the same factors.
std::shared_ptr<const BaseLinear> MergeWeight(const BaseLinear& base, const std::vector<SiteOp>& ops, c10::Device device);

// On the device thread.
class MergedWeights {
 public:
  // `idle`: bytes of copies that are kept though no stack holds them.
  explicit MergedWeights(ByteCount idle) : idle_(idle) {}

  // The copy of that key, or what `make` makes. Keys say everything that a copy depends on.
  std::shared_ptr<const BaseLinear> Get(const std::string& key, const std::function<std::shared_ptr<const BaseLinear>()>& make);
  // Frees copies that no stack holds, least recently used first, down to the idle bytes.
  void Trim();
  // Frees every copy that no stack holds and whose key contains `text`.
  void Drop(absl::string_view text);
  // On any thread: bytes of copies that no stack held when one came or went last.
  ByteCount idle_bytes() const { return ByteCount(idle_bytes_.load(std::memory_order_relaxed)); }

 private:
  struct Copy {
    std::string key;
    std::shared_ptr<const BaseLinear> weight;
  };

  void CountIdle();

  const ByteCount idle_;
  std::atomic<int64_t> idle_bytes_{0};
  std::list<Copy> copies_;  // Most recently used first.
};

}  // namespace h3
