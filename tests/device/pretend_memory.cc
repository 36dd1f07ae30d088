#include "tests/device/pretend_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/base/check.h"
#include "tests/device/pretend_stream.h"

namespace h3::testing {
namespace {

using c10::CachingAllocator::StatType;

const c10::Device kDevice(c10::DeviceType::PrivateUse1, 0);
constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kAddresses = size_t{64} << 30;
constexpr size_t kRound = 512;
constexpr size_t kSmall = kMiB, kSmallSegment = 2 * kMiB, kLarge = 10 * kMiB, kLargeSegment = 20 * kMiB, kRoundLarge = 2 * kMiB;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// The same pages twice: once without any right, which is where the host believes them to be, and once for kernels.
class Pages {
 public:
  Pages() {
    fd_ = memfd_create("pretend_device", MFD_CLOEXEC);
    H3_CHECK(fd_ >= 0 && ftruncate(fd_, kAddresses) == 0);
    host_ = Map(PROT_NONE);
    kernel_ = Map(PROT_READ | PROT_WRITE);
    free_[0] = kAddresses;
  }

  // Null: no addresses left.
  char* Take(size_t bytes) {
    for (auto [offset, size] : free_) {
      if (size < bytes) continue;
      free_.erase(offset);
      if (size > bytes) free_[offset + bytes] = size - bytes;
      return host_ + offset;
    }
    return nullptr;
  }

  void Give(char* address, size_t bytes) {
    size_t offset = static_cast<size_t>(address - host_);
    H3_CHECK(fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset), static_cast<off_t>(bytes)) == 0);
    auto next = free_.lower_bound(offset);
    if (next != free_.end() && next->first == offset + bytes) {
      bytes += next->second;
      next = free_.erase(next);
    }
    if (next != free_.begin()) {
      const auto before = std::prev(next);
      if (before->first + before->second == offset) {
        before->second += bytes;
        return;
      }
    }
    free_[offset] = bytes;
  }

  char* Kernel(const void* device) const {
    const char* const address = static_cast<const char*>(device);
    H3_CHECK(address >= host_ && address < host_ + kAddresses);
    return kernel_ + (address - host_);
  }

 private:
  char* Map(int rights) const {
    void* const address = mmap(nullptr, kAddresses, rights, MAP_SHARED | MAP_NORESERVE, fd_, 0);
    H3_CHECK(address != MAP_FAILED);
    return static_cast<char*>(address);
  }

  int fd_ = -1;
  char* host_ = nullptr;
  char* kernel_ = nullptr;
  std::map<size_t, size_t> free_;  // By offset.
};

Pages& ThePages() {
  static Pages* const pages = new Pages();
  return *pages;
}

struct Block {
  char* address = nullptr;
  size_t bytes = 0;
  size_t asked = 0;
  c10::StreamId stream = 0;
  bool small = false;
  bool allocated = false;
  Block* before = nullptr;  // Neighbours in the segment.
  Block* after = nullptr;
  std::set<c10::StreamId> users;  // Other streams that it was used on.
  std::vector<StreamMark> pending;

  bool split() const { return before != nullptr || after != nullptr; }
};

struct Smaller {
  bool operator()(const Block* a, const Block* b) const { return std::pair(a->bytes, a->address) < std::pair(b->bytes, b->address); }
};

class Allocator final : public PretendAllocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &Deleter, kDevice};
    std::function<void(ByteCount)> observer;
    {
      const std::lock_guard lock(mu_);
      observer = allocation_observer_;
    }
    if (observer) {
      try {
        observer(ByteCount(static_cast<int64_t>(n)));
      } catch (...) {
        const std::lock_guard lock(mu_);
        ++stats_.num_ooms;
        throw;
      }
    }
    char* address = nullptr;
    Report report;
    {
      const std::lock_guard lock(mu_);
      Block* const block = TakeLocked(n);
      address = block->address;
      report = ReportLocked(block, 1);
    }
    Tell(report);
    return {address, address, &Deleter, kDevice};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Deleter; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    Launch([to = KernelAddress(to), from = KernelAddress(from), bytes] { std::copy_n(from, bytes, to); });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    const std::lock_guard lock(mu_);
    EmptyLocked();
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() == nullptr) return;
    const std::lock_guard lock(mu_);
    Block* const block = allocated_.at(data.get());
    if (stream.id() != block->stream) block->users.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const std::lock_guard lock(mu_);
    int64_t inactive = 0;
    for (const auto& [key, blocks] : free_) {
      for (const Block* block : blocks) inactive += block->split() ? static_cast<int64_t>(block->bytes) : 0;
    }
    auto& stat = stats_.inactive_split_bytes[static_cast<size_t>(StatType::AGGREGATE)];
    stat.current = inactive;
    stat.peak = std::max(stat.peak, inactive);
    return stats_;
  }

  void resetAccumulatedStats(c10::DeviceIndex) override {
    const std::lock_guard lock(mu_);
    stats_.num_alloc_retries = stats_.num_ooms = 0;
  }

  void resetPeakStats(c10::DeviceIndex) override {
    const std::lock_guard lock(mu_);
    for (auto* figures : {&stats_.allocated_bytes, &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
      for (auto& stat : *figures) stat.reset_peak();
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    const std::lock_guard lock(mu_);
    return {FreeLocked(), total_};
  }

  void SetMemory(ByteCount total, ByteCount context) override {
    const std::lock_guard lock(mu_);
    total_ = static_cast<size_t>(total.value());
    context_ = static_cast<size_t>(context.value());
    H3_CHECK(context_ + Reserved() <= total_);
  }

  void SetAllocationObserver(std::function<void(ByteCount)> observer) override {
    const std::lock_guard lock(mu_);
    allocation_observer_ = std::move(observer);
  }

  void SetEventObserver(std::function<void()> observer) override {
    const std::lock_guard lock(mu_);
    event_observer_ = std::move(observer);
  }

 private:
  struct Report {
    void* address;
    int64_t bytes;
    size_t allocated, reserved;
    std::function<void()> observer;
  };

  static void Deleter(void* address);

  size_t Reserved() const { return static_cast<size_t>(stats_.reserved_bytes[0].current); }
  size_t FreeLocked() const { return total_ - context_ - Reserved(); }

  static void Add(c10::CachingAllocator::StatArray& figures, bool small, size_t bytes, int sign) {
    for (const StatType type : {StatType::AGGREGATE, small ? StatType::SMALL_POOL : StatType::LARGE_POOL}) {
      auto& stat = figures[static_cast<size_t>(type)];
      sign > 0 ? stat.increase(bytes) : stat.decrease(bytes);
    }
  }

  Report ReportLocked(const Block* block, int sign) const {
    return {block->address, sign * static_cast<int64_t>(block->bytes), static_cast<size_t>(stats_.allocated_bytes[0].current), Reserved(),
            event_observer_};
  }

  static void Tell(const Report& report) {
    c10::reportMemoryUsageToProfiler(report.address, report.bytes, report.allocated, report.reserved, kDevice);
    if (report.observer) report.observer();
  }

  Block* TakeLocked(size_t n) {
    CollectLocked();
    const size_t bytes = RoundUp(n, kRound);
    const bool small = bytes <= kSmall;
    const c10::StreamId stream = CurrentStream();
    Block* block = FindLocked(bytes, small, stream);
    if (block == nullptr) block = SegmentLocked(bytes, small, stream);
    if (block == nullptr) {
      ++stats_.num_alloc_retries;
      EmptyLocked();
      block = SegmentLocked(bytes, small, stream);
    }
    if (block == nullptr) {
      ++stats_.num_ooms;
      c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), static_cast<size_t>(stats_.allocated_bytes[0].current), Reserved(), kDevice);
      TORCH_CHECK_WITH(OutOfMemoryError, false, "the pretend device has no ", n, " bytes left: ", FreeLocked(), " of ", total_, " are free, ",
                       Reserved(), " are reserved");
    }
    if (const size_t left = block->bytes - bytes; left >= (small ? kRound : kSmall + 1)) {
      Block* const rest = new Block{.address = block->address + bytes, .bytes = left, .stream = stream, .small = small, .before = block, .after = block->after};
      if (rest->after != nullptr) rest->after->before = rest;
      block->after = rest;
      block->bytes = bytes;
      free_[{stream, small}].insert(rest);
    }
    block->allocated = true;
    block->asked = n;
    allocated_[block->address] = block;
    Add(stats_.allocation, small, 1, 1);
    Add(stats_.active, small, 1, 1);
    Add(stats_.allocated_bytes, small, block->bytes, 1);
    Add(stats_.active_bytes, small, block->bytes, 1);
    Add(stats_.requested_bytes, small, n, 1);
    return block;
  }

  Block* FindLocked(size_t bytes, bool small, c10::StreamId stream) {
    auto& blocks = free_[{stream, small}];
    Block wanted{.bytes = bytes};
    const auto found = blocks.lower_bound(&wanted);
    if (found == blocks.end()) return nullptr;
    Block* const block = *found;
    blocks.erase(found);
    return block;
  }

  Block* SegmentLocked(size_t bytes, bool small, c10::StreamId stream) {
    const size_t size = small ? kSmallSegment : bytes < kLarge ? kLargeSegment : RoundUp(bytes, kRoundLarge);
    if (size > FreeLocked()) return nullptr;
    char* const address = ThePages().Take(size);
    if (address == nullptr) return nullptr;
    Add(stats_.segment, small, 1, 1);
    Add(stats_.reserved_bytes, small, size, 1);
    ++stats_.num_device_alloc;
    return new Block{.address = address, .bytes = size, .stream = stream, .small = small};
  }

  // Gives whole free segments back to the driver, which waits for the device as cudaFree does.
  void EmptyLocked() {
    WaitForAll(/*counted=*/false);
    CollectLocked();
    for (auto& [key, blocks] : free_) {
      for (auto it = blocks.begin(); it != blocks.end();) {
        Block* const block = *it;
        if (block->split()) {
          ++it;
          continue;
        }
        it = blocks.erase(it);
        ThePages().Give(block->address, block->bytes);
        Add(stats_.segment, block->small, 1, -1);
        Add(stats_.reserved_bytes, block->small, block->bytes, -1);
        ++stats_.num_device_free;
        delete block;
      }
    }
  }

  Report GiveLocked(void* address) {
    const auto found = allocated_.find(address);
    H3_CHECK(found != allocated_.end());
    Block* const block = found->second;
    allocated_.erase(found);
    block->allocated = false;
    Add(stats_.allocation, block->small, 1, -1);
    Add(stats_.allocated_bytes, block->small, block->bytes, -1);
    Add(stats_.requested_bytes, block->small, block->asked, -1);
    const Report report = ReportLocked(block, -1);
    for (const c10::StreamId user : block->users) block->pending.push_back(MarkOf(user));
    block->users.clear();
    if (block->pending.empty()) {
      ReuseLocked(block);
    } else {
      pending_.push_back(block);
    }
    return report;
  }

  void CollectLocked() {
    std::vector<Block*> still;
    for (Block* block : std::exchange(pending_, {})) {
      std::erase_if(block->pending, [](StreamMark mark) { return IsDone(mark); });
      if (block->pending.empty()) {
        ReuseLocked(block);
      } else {
        still.push_back(block);
      }
    }
    pending_ = std::move(still);
  }

  void ReuseLocked(Block* block) {
    Add(stats_.active, block->small, 1, -1);
    Add(stats_.active_bytes, block->small, block->bytes, -1);
    auto& blocks = free_[{block->stream, block->small}];
    if (Block* const after = block->after; after != nullptr && blocks.erase(after) > 0) {
      block->bytes += after->bytes;
      block->after = after->after;
      if (block->after != nullptr) block->after->before = block;
      delete after;
    }
    if (Block* const before = block->before; before != nullptr && blocks.erase(before) > 0) {
      before->bytes += block->bytes;
      before->after = block->after;
      if (before->after != nullptr) before->after->before = before;
      delete block;
      block = before;
    }
    blocks.insert(block);
  }

  std::mutex mu_;
  size_t total_ = size_t{4} << 30;
  size_t context_ = 32 * kMiB;
  c10::CachingDeviceAllocator::DeviceStats stats_;
  std::unordered_map<void*, Block*> allocated_;
  std::map<std::pair<c10::StreamId, bool>, std::set<Block*, Smaller>> free_;
  std::vector<Block*> pending_;  // Freed, and still in use on other streams.
  std::function<void(ByteCount)> allocation_observer_;
  std::function<void()> event_observer_;
};

Allocator& TheAllocator() {
  static Allocator* const allocator = new Allocator();
  return *allocator;
}

void Allocator::Deleter(void* address) {
  if (address == nullptr) return;
  Report report;
  {
    const std::lock_guard lock(TheAllocator().mu_);
    report = TheAllocator().GiveLocked(address);
  }
  Tell(report);
}

// Pinned blocks by address. A copy that is still queued keeps its block.
class Pinned final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &Deleter, c10::Device(c10::DeviceType::CPU)};
    std::shared_ptr<char> block(static_cast<char*>(std::aligned_alloc(4096, RoundUp(n, 4096))), &std::free);
    char* const address = block.get();
    const std::lock_guard lock(mu_);
    blocks_[address] = {std::move(block), n};
    bytes_ += static_cast<int64_t>(n);
    return {address, address, &Deleter, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &Deleter; }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  std::shared_ptr<void> Hold(const void* address) {
    const std::lock_guard lock(mu_);
    auto after = blocks_.upper_bound(static_cast<const char*>(address));
    if (after == blocks_.begin()) return nullptr;
    const auto& [begin, block] = *std::prev(after);
    return static_cast<const char*>(address) < begin + block.second ? block.first : nullptr;
  }

  ByteCount bytes() {
    const std::lock_guard lock(mu_);
    return ByteCount(bytes_);
  }

 private:
  static void Deleter(void* address);

  std::mutex mu_;
  std::map<const char*, std::pair<std::shared_ptr<char>, size_t>> blocks_;
  int64_t bytes_ = 0;
};

Pinned& ThePinned() {
  static Pinned* const pinned = new Pinned();
  return *pinned;
}

void Pinned::Deleter(void* address) {
  if (address == nullptr) return;
  const std::lock_guard lock(ThePinned().mu_);
  const auto found = ThePinned().blocks_.find(static_cast<const char*>(address));
  ThePinned().bytes_ -= static_cast<int64_t>(found->second.second);
  ThePinned().blocks_.erase(found);
}

}  // namespace

char* KernelAddress(const void* device) { return device == nullptr ? nullptr : ThePages().Kernel(device); }
PretendAllocator& GetPretendAllocator() { return TheAllocator(); }
c10::Allocator& GetPinnedAllocator() { return ThePinned(); }
std::shared_ptr<void> HoldPinned(const void* address) { return ThePinned().Hold(address); }
ByteCount PinnedBytes() { return ThePinned().bytes(); }

void SetPretendMemory(ByteCount total, ByteCount context) { TheAllocator().SetMemory(total, context); }
void SetPretendAllocationObserver(std::function<void(ByteCount)> observer) { TheAllocator().SetAllocationObserver(std::move(observer)); }
void SetPretendEventObserver(std::function<void()> observer) { TheAllocator().SetEventObserver(std::move(observer)); }
ByteCount PretendPinnedBytes() { return ThePinned().bytes(); }

}  // namespace h3::testing
