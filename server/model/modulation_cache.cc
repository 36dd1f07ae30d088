#include "server/model/modulation_cache.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "server/vram/ledger.h"

namespace h3 {

at::Tensor ModulationCache::Find(const ModulationPoint& point) {
  const auto found = lines_.find({point.t, point.modality});
  if (found == lines_.end() || !found->second.complete) return {};
  found->second.turn = turn_;
  return found->second.values;
}

at::Tensor ModulationCache::Add(const ModulationPoint& point, int64_t elements, c10::Device device) {
  const int64_t bytes = elements * static_cast<int64_t>(sizeof(float));
  if (!EvictTo(std::min(limit_, budget_).value() - bytes)) return {};
  const OwnerScope owner(Owner::kCaches);
  at::Tensor values = at::empty({elements}, at::TensorOptions().device(device).dtype(at::kFloat));
  bytes_.fetch_add(bytes, std::memory_order_relaxed);
  lines_[{point.t, point.modality}] = {values, turn_};
  return values;
}

void ModulationCache::Complete() {
  for (auto& [key, line] : lines_) line.complete = true;
}

void ModulationCache::Abandon() {
  for (auto line = lines_.begin(); line != lines_.end();) {
    const auto next = std::next(line);
    if (!line->second.complete) Erase(line);
    line = next;
  }
}

void ModulationCache::Limit(ByteCount limit) {
  limit_ = limit;
  ++turn_;
  EvictTo(std::max<int64_t>(0, std::min(limit_, budget_).value()));
}

bool ModulationCache::EvictTo(int64_t bytes) {
  if (bytes < 0) return false;
  while (bytes_.load(std::memory_order_relaxed) > bytes) {
    auto oldest = lines_.end();
    for (auto line = lines_.begin(); line != lines_.end(); ++line) {
      if (line->second.turn < turn_ && (oldest == lines_.end() || line->second.turn < oldest->second.turn)) oldest = line;
    }
    if (oldest == lines_.end()) return false;
    Erase(oldest);
  }
  return true;
}

void ModulationCache::Erase(std::map<Key, Line>::iterator line) {
  bytes_.fetch_sub(static_cast<int64_t>(line->second.values.nbytes()), std::memory_order_relaxed);
  lines_.erase(line);
}

}  // namespace h3
