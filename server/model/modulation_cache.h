// Modulations of the untouched base, kept across requests: W c(t) of every AdaLN projection for a (timestep, modality) pair, so that
// a timestep that was seen before reads no AdaLN weight. A line's bits do not depend on what it was computed with (model/modulation.h),
// so a cached one is as good as a fresh one.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <utility>

#include "server/base/bytes.h"
#include "server/model/time_features.h"

namespace h3 {

// On the device thread; bytes() and counters on any. Counts what it keeps under Owner::kCaches, never more than its limit.
class ModulationCache {
 public:
  // `budget`: bytes of lines; 0 keeps nothing.
  explicit ModulationCache(ByteCount budget) : budget_(budget), limit_(budget) {}

  // Lines that are found or added from now on stay until the next Begin, whatever else comes in.
  void Begin() { ++turn_; }
  // float32 [elements], or undefined.
  at::Tensor Find(const ModulationPoint& point);
  // A line to be filled in, or undefined where nothing more fits: what was not used since Begin goes first, least recently used.
  at::Tensor Add(const ModulationPoint& point, int64_t elements, c10::Device device);
  // Lines that were added since Begin are complete; without it they are forgotten by Abandon.
  void Complete();
  void Abandon();

  // Frees lines until at most min(limit, budget) is kept, and keeps to it.
  void Limit(ByteCount limit);

  ByteCount budget() const { return budget_; }
  ByteCount bytes() const { return ByteCount(bytes_.load(std::memory_order_relaxed)); }

 private:
  struct Line {
    at::Tensor values;
    int64_t turn = 0;
    bool complete = false;
  };
  using Key = std::pair<float, int>;

  // False where the lines of this turn leave no room.
  bool EvictTo(int64_t bytes);
  void Erase(std::map<Key, Line>::iterator line);

  const ByteCount budget_;
  ByteCount limit_;
  int64_t turn_ = 0;
  std::map<Key, Line> lines_;
  std::atomic<int64_t> bytes_{0};
};

}  // namespace h3
