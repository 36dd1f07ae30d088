#include "server/lora/merged_weights.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <iterator>

#include "absl/strings/match.h"
#include "server/lora/patched_rows.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

int64_t BytesOf(const BaseLinear& weight) {
  return weight.out() * weight.in() * static_cast<int64_t>(c10::elementSize(weight.dtype()));
}

}  // namespace

std::shared_ptr<const BaseLinear> MergeWeight(const BaseLinear& base, const std::vector<SiteOp>& ops, c10::Device device) {
  at::Tensor weight;
  {
    const OwnerScope owner(Owner::kMaterialized);
    weight = at::empty({base.out(), base.in()}, at::TensorOptions().device(device).dtype(base.dtype()));
  }
  const OwnerScope owner(Owner::kWorkspace);
  const int64_t step = ChunkRows(base);
  for (int64_t begin = 0; begin < base.out(); begin += step) {
    const int64_t count = std::min(step, base.out() - begin);
    weight.narrow(0, begin, count).copy_(PatchedRows(base, ops, 0, begin, count));
  }
  return std::make_shared<const DenseLinear>(std::vector<at::Tensor>{weight}, base.bias());
}

std::shared_ptr<const BaseLinear> MergedWeights::Get(const std::string& key,
                                                     const std::function<std::shared_ptr<const BaseLinear>()>& make) {
  const auto found = std::find_if(copies_.begin(), copies_.end(), [&](const Copy& copy) { return copy.key == key; });
  if (found != copies_.end()) {
    copies_.splice(copies_.begin(), copies_, found);
  } else {
    copies_.push_front({key, make()});
  }
  std::shared_ptr<const BaseLinear> weight = copies_.front().weight;
  CountIdle();
  return weight;
}

void MergedWeights::Trim() {
  int64_t idle = 0;
  for (auto copy = copies_.begin(); copy != copies_.end();) {
    if (copy->weight.use_count() == 1) idle += BytesOf(*copy->weight);
    copy = copy->weight.use_count() == 1 && idle > idle_.value() ? copies_.erase(copy) : std::next(copy);
  }
  CountIdle();
}

void MergedWeights::CountIdle() {
  int64_t idle = 0;
  for (const Copy& copy : copies_) idle += copy.weight.use_count() == 1 ? BytesOf(*copy.weight) : 0;
  idle_bytes_.store(idle, std::memory_order_relaxed);
}

void MergedWeights::Drop(absl::string_view text) {
  copies_.remove_if([&](const Copy& copy) { return copy.weight.use_count() == 1 && absl::StrContains(copy.key, text); });
  CountIdle();
}

}  // namespace h3
