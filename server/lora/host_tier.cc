#include "server/lora/host_tier.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

namespace h3 {

std::shared_ptr<const HostContent> MakeHostContent(std::string name, std::string digest, absl::string_view bytes, c10::Device device) {
  auto content = std::make_shared<HostContent>();
  content->name = std::move(name);
  content->digest = std::move(digest);
  content->size = static_cast<int64_t>(bytes.size());
  std::shared_ptr<char> data;
  if (device.is_cpu()) {
    data = std::shared_ptr<char>(new char[bytes.size()], std::default_delete<char[]>());
  } else {
    const at::Tensor pinned = at::empty({content->size}, at::TensorOptions().dtype(at::kByte).pinned_memory(true));
    data = std::shared_ptr<char>(static_cast<char*>(pinned.data_ptr()), [pinned](char*) {});
  }
  std::memcpy(data.get(), bytes.data(), bytes.size());
  content->data = std::move(data);
  return content;
}

std::shared_ptr<const HostContent> HostTier::Find(const std::string& digest) {
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(contents_.begin(), contents_.end(), [&](const auto& content) { return content->digest == digest; });
  if (found == contents_.end()) {
    ++counters_.misses;
    return nullptr;
  }
  ++counters_.hits;
  contents_.splice(contents_.begin(), contents_, found);
  return contents_.front();
}

bool HostTier::Has(const std::string& digest) const {
  absl::MutexLock lock(&mu_);
  return std::any_of(contents_.begin(), contents_.end(), [&](const auto& content) { return content->digest == digest; });
}

void HostTier::Add(std::shared_ptr<const HostContent> content) {
  std::vector<std::shared_ptr<const HostContent>> evicted;  // Freed after the lock.
  absl::MutexLock lock(&mu_);
  if (content->size > budget_.value()) return;
  if (std::any_of(contents_.begin(), contents_.end(), [&](const auto& other) { return other->digest == content->digest; })) return;
  while (bytes_ + content->size > budget_.value()) {
    bytes_ -= contents_.back()->size;
    ++counters_.evictions;
    evicted.push_back(std::move(contents_.back()));
    contents_.pop_back();
  }
  bytes_ += content->size;
  contents_.push_front(std::move(content));
}

void HostTier::Drop(const std::string& digest) {
  std::shared_ptr<const HostContent> dropped;
  absl::MutexLock lock(&mu_);
  const auto found = std::find_if(contents_.begin(), contents_.end(), [&](const auto& content) { return content->digest == digest; });
  if (found == contents_.end()) return;
  bytes_ -= (*found)->size;
  dropped = std::move(*found);
  contents_.erase(found);
}

std::vector<AdapterResidency> HostTier::List() const {
  absl::MutexLock lock(&mu_);
  std::vector<AdapterResidency> list;
  for (const auto& content : contents_) list.push_back({content->name, content->digest, ByteCount(content->size), 0, Tier::kHost});
  return list;
}

TierCounters HostTier::counters() const {
  absl::MutexLock lock(&mu_);
  return counters_;
}

}  // namespace h3
