// What one stack is to the one before it, and what a merging runtime would have written to get from one to the other.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "server/worker/engine.h"

namespace h3 {

// A stack that ran, as far as merged weights would depend on it.
struct RanAdapter {
  std::string digest;
  std::vector<double> strength;         // Strength and factors, alpha, and whatever else scales it.
  std::map<int, ByteCount> targets;     // Weights that it changes, by site.
};
using RanStack = std::vector<RanAdapter>;

StackChange CompareStacks(const RanStack& before, const RanStack& now);

// Bytes of the weights that adapters touch which came, went, changed their strength or (on reordering) their place; each weight once.
ByteCount MergedWrites(const RanStack& before, const RanStack& now);

}  // namespace h3
