#include "tests/testing/fake_engine.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3::testing {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(20);

ResolvedAdapter Resolve(const std::string& name, double strength) {
  return {
      .adapter = name, .digest = absl::StrCat("digest-of-", name), .strength = strength, .bytes = ByteCount(100), .modules = 1};
}

std::vector<ResolvedAdapter> Resolve(const std::vector<StackEntry>& stack) {
  std::vector<ResolvedAdapter> resolved;
  for (const StackEntry& entry : stack) resolved.push_back(Resolve(entry.adapter, entry.strength));
  return resolved;
}

}  // namespace

class FakeGeneration final : public Generation {
 public:
  FakeGeneration(FakeEngine& engine, const GenerationSpec& spec)
      : engine_(engine), stack_(Resolve(spec.conditions.stack)), evaluations_(spec.schedule.evaluations()) {
    engine_.Born();
  }
  ~FakeGeneration() override { engine_.Died(); }

  absl::StatusOr<bool> Advance(const CancellationToken& cancel) override {
    H3_RETURN_IF_ERROR(engine_.Step(cancel));
    if (!prepared_) {
      prepared_ = true;
      timings_.prepare = absl::Milliseconds(2);
      return false;
    }
    timings_.steps.push_back(absl::Milliseconds(1));
    return static_cast<int64_t>(timings_.steps.size()) == evaluations_;
  }
  absl::StatusOr<std::vector<HostTensor>> TakeResult() override { return engine_.Result(); }
  const std::vector<ResolvedAdapter>& stack() const override { return stack_; }
  const RunTimings& timings() const override { return timings_; }
  ByteCount peak() const override { return MiB(3); }
  ByteCount planned_peak() const override { return MiB(4); }
  ByteCount avoided_resident() const override { return MiB(2); }

 private:
  FakeEngine& engine_;
  const std::vector<ResolvedAdapter> stack_;
  const int64_t evaluations_;
  bool prepared_ = false;
  RunTimings timings_;
};

class FakeSession final : public Session {
 public:
  FakeSession(FakeEngine& engine, const Conditions& conditions) : engine_(engine), stack_(Resolve(conditions.stack)) {
    engine_.Born();
  }
  ~FakeSession() override { engine_.Died(); }

  absl::StatusOr<std::vector<HostTensor>> Evaluate(const EvaluationSpec& spec, const CancellationToken& cancel) override {
    H3_RETURN_IF_ERROR(engine_.Step(cancel));
    absl::MutexLock lock(&engine_.mu_);
    engine_.last_evaluation_ = spec;
    return engine_.Result();
  }
  const std::vector<ResolvedAdapter>& stack() const override { return stack_; }

 private:
  FakeEngine& engine_;
  const std::vector<ResolvedAdapter> stack_;
};

FakeEngine::FakeEngine(int64_t result_bytes) : result_bytes_(result_bytes) {
  model_.fingerprint = "fingerprint-of-fake";
  model_.name = "fake";
  model_.dtype = "float32";
  model_.device = "cpu";
  // Of tests/golden/full, so that its adapters fit.
  model_.geometry = {.hidden = 64,
                     .blocks = 4,
                     .refiner_blocks = 2,
                     .heads = 4,
                     .head_dim = 24,
                     .ffn = 112,
                     .video_channels = 4,
                     .audio_channels = 6,
                     .text_width = 40,
                     .time_input = 32,
                     .time_hidden = 56,
                     .adaln_width = 28,
                     .curve_rows = 0,
                     .rope_frequencies = 3};
  model_.weight_bytes = MiB(1);
  model_.plan_base = {.form = {.geometry = model_.geometry, .compute = DType::kF32},
                      .site_bytes = std::vector<int64_t>(Sites(model_.geometry).size(), 4)};
}

void FakeEngine::HoldSteps() {
  absl::MutexLock lock(&mu_);
  allowed_ = 0;
}

void FakeEngine::AllowSteps(int64_t count) {
  absl::MutexLock lock(&mu_);
  if (allowed_.has_value()) *allowed_ += count;
}

bool FakeEngine::WaitForBegun(int64_t count) {
  const auto reached = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return begun_ >= count; };
  absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(&reached), kPatience);
}

bool FakeEngine::WaitForIdle() {
  const auto idle = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return alive_ == 0; };
  absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(&idle), kPatience);
}

void FakeEngine::RefuseNext(absl::Status why) {
  absl::MutexLock lock(&mu_);
  refusal_ = std::move(why);
}

void FakeEngine::Break(absl::Status why) {
  absl::MutexLock lock(&mu_);
  health_ = std::move(why);
}

int64_t FakeEngine::begun() const {
  absl::MutexLock lock(&mu_);
  return begun_;
}

std::optional<GenerationSpec> FakeEngine::last_generation() const {
  absl::MutexLock lock(&mu_);
  return last_generation_;
}

std::optional<EvaluationSpec> FakeEngine::last_evaluation() const {
  absl::MutexLock lock(&mu_);
  return last_evaluation_;
}

bool FakeEngine::WaitForPrefetched(size_t count) {
  const auto reached = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return prefetched_.size() >= count; };
  absl::MutexLock lock(&mu_);
  return mu_.AwaitWithTimeout(absl::Condition(&reached), kPatience);
}

std::vector<std::string> FakeEngine::prefetched() const {
  absl::MutexLock lock(&mu_);
  return prefetched_;
}

std::optional<StackEntry> FakeEngine::last_adapter() const {
  absl::MutexLock lock(&mu_);
  return last_adapter_;
}

absl::StatusOr<std::unique_ptr<Generation>> FakeEngine::StartGeneration(GenerationSpec spec) {
  CheckThread();
  {
    absl::MutexLock lock(&mu_);
    last_generation_ = spec;
  }
  H3_RETURN_IF_ERROR(TakeRefusal());
  return std::make_unique<FakeGeneration>(*this, spec);
}

absl::StatusOr<std::unique_ptr<Session>> FakeEngine::OpenSession(Conditions conditions,
                                                                 std::vector<std::pair<float, float>> /*announced*/,
                                                                 const CancellationToken& /*cancel*/) {
  CheckThread();
  H3_RETURN_IF_ERROR(TakeRefusal());
  return std::make_unique<FakeSession>(*this, conditions);
}

absl::StatusOr<ResolvedAdapter> FakeEngine::LoadAdapter(const StackEntry& entry) {
  CheckThread();
  H3_RETURN_IF_ERROR(TakeRefusal());
  absl::MutexLock lock(&mu_);
  last_adapter_ = entry;
  resident_.push_back(Resolve(entry.adapter, 0));
  return resident_.back();
}

absl::StatusOr<AdapterMeasure> FakeEngine::MeasureAdapter(const StackEntry& entry) {
  CheckThread();
  H3_RETURN_IF_ERROR(TakeRefusal());
  absl::MutexLock lock(&mu_);
  last_adapter_ = entry;
  return AdapterMeasure{.resolved = Resolve(entry.adapter, 1), .relative_strength = 0.25, .kinds = {{"attn.qkv_proj", 1, 0.25}}};
}

absl::StatusOr<ByteCount> FakeEngine::UnloadAdapter(const std::string& digest) {
  CheckThread();
  absl::MutexLock lock(&mu_);
  const auto at =
      std::find_if(resident_.begin(), resident_.end(), [&](const ResolvedAdapter& a) { return a.digest == digest; });
  if (at == resident_.end())
    return Refuse(absl::StatusCode::kNotFound, reason::kUnknownAdapter, "not resident", {{"digest", digest}});
  const ByteCount freed = at->bytes;
  resident_.erase(at);
  return freed;
}

absl::Status FakeEngine::PrefetchAdapter(const StackEntry& entry) {
  absl::MutexLock lock(&mu_);
  prefetched_.push_back(entry.adapter);
  return absl::OkStatus();
}

void FakeEngine::AuditBase(absl::Duration /*most*/) { CheckThread(); }

MemoryReport FakeEngine::Memory() const {
  absl::MutexLock lock(&mu_);
  MemoryReport report{.device = "cpu", .total = GiB(1), .free = MiB(900)};
  report.ledger.owners[static_cast<size_t>(Owner::kBaseWeights)] = model_.weight_bytes;
  report.ledger.used = model_.weight_bytes;
  for (const ResolvedAdapter& adapter : resident_) {
    report.adapters.push_back({adapter.adapter, adapter.digest, adapter.bytes, 0});
    report.ledger.owners[static_cast<size_t>(Owner::kAdapters)] += adapter.bytes;
    report.ledger.used += adapter.bytes;
  }
  return report;
}

absl::Status FakeEngine::Health() const {
  absl::MutexLock lock(&mu_);
  return health_;
}

absl::Status FakeEngine::Step(const CancellationToken& cancel) {
  CheckThread();
  const auto may_go = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return !allowed_.has_value() || *allowed_ > 0 || !health_.ok();
  };
  absl::MutexLock lock(&mu_);
  ++begun_;
  // The token is looked at now and then, as the real engine looks between blocks.
  while (!mu_.AwaitWithTimeout(absl::Condition(&may_go), absl::Milliseconds(1))) {
    if (cancel.IsCancelled()) break;
  }
  H3_RETURN_IF_ERROR(cancel.Check("in a step"));
  if (!health_.ok()) return health_;
  if (allowed_.has_value()) --*allowed_;
  return absl::OkStatus();
}

void FakeEngine::CheckThread() {
  absl::MutexLock lock(&mu_);
  if (!device_thread_.has_value()) device_thread_ = std::this_thread::get_id();
  H3_CHECK(*device_thread_ == std::this_thread::get_id());
}

absl::Status FakeEngine::TakeRefusal() {
  absl::MutexLock lock(&mu_);
  return std::exchange(refusal_, absl::OkStatus());
}

void FakeEngine::Born() {
  absl::MutexLock lock(&mu_);
  ++alive_;
}

void FakeEngine::Died() {
  CheckThread();
  absl::MutexLock lock(&mu_);
  --alive_;
}

std::vector<HostTensor> FakeEngine::Result() const {
  HostTensor video{.name = "video", .dtype = DType::kF32, .shape = {result_bytes_ / 4}};
  video.data.resize(static_cast<size_t>(result_bytes_));
  for (size_t i = 0; i < video.data.size(); ++i) video.data[i] = ResultByte(i);
  HostTensor audio{.name = "audio", .dtype = DType::kF32, .shape = {2}, .data = std::string(8, 'a')};
  return {std::move(video), std::move(audio)};
}

}  // namespace h3::testing
