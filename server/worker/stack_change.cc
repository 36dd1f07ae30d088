#include "server/worker/stack_change.h"

#include <algorithm>

namespace h3 {
namespace {

bool Same(const RanAdapter& a, const RanAdapter& b) { return a.digest == b.digest && a.strength == b.strength; }

// Those of `stack` that have no equal in `other`; each of `other` counts once.
template <typename Equal>
std::vector<const RanAdapter*> Without(const RanStack& stack, const RanStack& other, Equal equal) {
  std::vector<bool> taken(other.size());
  std::vector<const RanAdapter*> left;
  for (const RanAdapter& adapter : stack) {
    size_t i = 0;
    while (i < other.size() && (taken[i] || !equal(adapter, other[i]))) ++i;
    if (i == other.size()) {
      left.push_back(&adapter);
    } else {
      taken[i] = true;
    }
  }
  return left;
}

}  // namespace

StackChange CompareStacks(const RanStack& before, const RanStack& now) {
  if (std::equal(before.begin(), before.end(), now.begin(), now.end(), Same)) return StackChange::kNone;
  const bool nothing_went = Without(before, now, Same).empty(), nothing_came = Without(now, before, Same).empty();
  if (nothing_went && nothing_came) return StackChange::kReorder;
  if (nothing_went) return StackChange::kActivate;
  if (nothing_came) return StackChange::kDeactivate;
  const auto same_content = [](const RanAdapter& a, const RanAdapter& b) { return a.digest == b.digest; };
  if (Without(before, now, same_content).empty() && Without(now, before, same_content).empty()) return StackChange::kStrength;
  return StackChange::kReplace;
}

ByteCount MergedWrites(const RanStack& before, const RanStack& now) {
  std::vector<const RanAdapter*> changed = Without(before, now, Same);
  for (const RanAdapter* adapter : Without(now, before, Same)) changed.push_back(adapter);
  if (changed.empty() && CompareStacks(before, now) == StackChange::kReorder) {
    for (const RanAdapter& adapter : now) changed.push_back(&adapter);
  }
  std::map<int, ByteCount> targets;
  for (const RanAdapter* adapter : changed) targets.insert(adapter->targets.begin(), adapter->targets.end());
  ByteCount bytes;
  for (const auto& [site, weight] : targets) bytes += weight;
  return bytes;
}

}  // namespace h3
