// What a worker can do with its resident model, as the RPC layer sees it. Plain types: nothing here names LibTorch or gRPC.
//
// Thread rules. One thread owns the device: methods marked [device] are called on it only, one at a time, and may compute for
// long; a Generation and a Session are also destroyed there. Methods marked [any] are thread-safe, answer from snapshots and
// never wait for the device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "server/base/cancellation.h"
#include "server/format/checkpoint.h"
#include "server/format/layout.h"
#include "server/format/plan.h"
#include "server/format/request.h"
#include "server/format/schedule.h"
#include "server/vram/memory_report.h"

namespace h3 {

struct ModelInfo {
  std::string fingerprint;  // Hex SHA-256 over the canonical tensors' names, shapes and bytes (docs in model/resident_model.h).
  std::string name;
  Container container = Container::kSingleFile;
  QkvLayout qkv_layout = QkvLayout::kStacked;
  Partition partition = Partition::kUnknown;
  Geometry geometry;
  std::string dtype;  // "bfloat16", "float32".
  std::string device;
  int64_t parameters = 0;
  ByteCount weight_bytes;       // On the device.
  ByteCount host_weight_bytes;  // That stay in host memory.
  PlanBase plan_base;           // What requests are planned by.
  PlanOptions plan_options;
  int64_t grid_width = 0;  // Of the silu grid on a pruned base; 0: none.
  std::vector<std::string> warnings;  // What is less than exact about it.
};

// What a run or a session starts from. Tensors by the names of proto/h3/v1/generation.proto.
struct Conditions {
  Layout layout;
  std::vector<StackEntry> stack;
  std::vector<HostTensor> tensors;
};

struct GenerationSpec {
  Conditions conditions;
  Schedule schedule;
  std::optional<uint64_t> seed;  // Absent: the start rows are target_video and target_audio_rows, conditions as given.
};

struct RunTimings {
  absl::Duration prepare;
  std::vector<absl::Duration> steps;
};

// One sampling run. Destroying it releases everything, at any point.
class Generation {
 public:
  virtual ~Generation() = default;

  // [device] One piece of work: first the preparation, then one model evaluation and Euler update a call. True when the last
  // evaluation is done. After an error only destruction is allowed.
  virtual absl::StatusOr<bool> Advance(const CancellationToken& cancel) = 0;
  // [device] Once, after Advance returned true: video, audio, video_latents, audio_latents (float32), in host memory; what the
  // run held on the device is released.
  virtual absl::StatusOr<std::vector<HostTensor>> TakeResult() = 0;

  // [device] From construction.
  virtual const std::vector<ResolvedAdapter>& stack() const = 0;
  virtual const RunTimings& timings() const = 0;
  // [device] Largest sum of owners seen while Advance ran.
  virtual ByteCount peak() const = 0;
  // [device] The bound on peak() that it was admitted by.
  virtual ByteCount planned_peak() const = 0;
  // [device] What a merging runtime would hold in addition for this stack.
  virtual ByteCount avoided_resident() const = 0;
};

// Norms of an adapter's scaled deltas at strength 1, relative to those of the weights that they change.
struct AdapterMeasure {
  struct Kind {
    std::string module_kind;
    int64_t modules = 0;
    double relative_strength = 0;
  };
  ResolvedAdapter resolved;
  double relative_strength = 0;
  std::vector<Kind> kinds;
};

struct EvaluationSpec {
  float t_video = 0;
  float t_audio = 0;
  int64_t index = 0;                   // Picks the per-evaluation factors.
  std::vector<double> factors;         // One a stack entry, replacing per_evaluation; or empty.
  HostTensor video;                    // target_video_rows [rows, 4 C] or target_video [1, C, T, H, W].
  HostTensor audio;                    // target_audio_rows [2 n, C].
  bool include_condition_rows = false;
};

// A session: conditions and stack are prepared and pinned; evaluations come one by one.
class Session {
 public:
  virtual ~Session() = default;
  // [device] video and audio velocity rows, float32. An error leaves the session usable unless it is INTERNAL.
  virtual absl::StatusOr<std::vector<HostTensor>> Evaluate(const EvaluationSpec& spec, const CancellationToken& cancel) = 0;
  virtual const std::vector<ResolvedAdapter>& stack() const = 0;
};

class Engine {
 public:
  virtual ~Engine() = default;

  // [device] Checks the spec, loads and pins the adapters of its stack. Cheap for resident adapters; otherwise reads them.
  // NOT_FOUND / UNKNOWN_ADAPTER, INVALID_ARGUMENT and FAILED_PRECONDITION as the reasons say, RESOURCE_EXHAUSTED / VRAM_EXCEEDED.
  virtual absl::StatusOr<std::unique_ptr<Generation>> StartGeneration(GenerationSpec spec) = 0;
  // [device] Also computes the text stream. `announced`: (t_video, t_audio) pairs whose modulations are computed together.
  virtual absl::StatusOr<std::unique_ptr<Session>> OpenSession(Conditions conditions,
                                                               std::vector<std::pair<float, float>> announced,
                                                               const CancellationToken& cancel) = 0;

  // [device] Reads, hashes, checks and copies the adapter of a stack entry; idempotent.
  virtual absl::StatusOr<ResolvedAdapter> LoadAdapter(const StackEntry& entry) = 0;
  // [device] Reads every value of it and measures; keeps nothing. Refuses as LoadAdapter.
  virtual absl::StatusOr<AdapterMeasure> MeasureAdapter(const StackEntry& entry) = 0;
  // [device] Bytes freed. FAILED_PRECONDITION / IN_USE while pinned; NOT_FOUND / UNKNOWN_ADAPTER when not resident.
  virtual absl::StatusOr<ByteCount> UnloadAdapter(const std::string& digest) = 0;

  // [any] Reads the content of an adapter into the host tier; blocks on the disk. Does nothing where it is there or does not fit.
  virtual absl::Status PrefetchAdapter(const StackEntry& entry) = 0;
  // [device] Between requests: reads the next pieces of the base again, about as long as `most`, one at least. Tells the observer of each
  // tensor that is through; a change ends up in Health().
  virtual void AuditBase(absl::Duration most) = 0;

  // [any]
  virtual const ModelInfo& model() const = 0;
  virtual MemoryReport Memory() const = 0;
  // [any] OK, or the fatal fault that ends this worker: the base changed under it, or the device failed.
  virtual absl::Status Health() const = 0;
};

// What one stack is to the one that ran before it: the first of these that holds.
enum class StackChange {
  kNone,        // The same adapters, strengths and order.
  kActivate,    // The same and more.
  kDeactivate,  // A part of it.
  kReorder,     // The same adapters and strengths in another order.
  kStrength,    // The same adapters.
  kReplace,     // Anything else.
};

// Told of what happens inside, for metrics. Called on the device thread; must not block.
class EngineObserver {
 public:
  virtual ~EngineObserver() = default;
  // An adapter was brought to the device.
  virtual void AdapterLoaded(AdapterSource source, absl::Duration took, ByteCount bytes) = 0;
  // A request's stack is in place. `slowest`: where the slowest of its adapters came from; `avoided_write`: the weight bytes that a
  // merging runtime would have written to get from the last stack to this one.
  virtual void StackInPlace(StackChange change, AdapterSource slowest, absl::Duration took, ByteCount avoided_write) = 0;
  virtual void StackRefused(StackChange change) = 0;
  // `phase`: "load", "prepare", "denoise" or "result". An allocation failed though the request had been admitted.
  virtual void OutOfMemory(absl::string_view phase) = 0;
  // A tensor of the base was read again and compared with what was loaded.
  virtual void BaseVerified(bool unchanged) = 0;
};

struct EngineOptions {
  std::string model;     // Path of the checkpoint.
  std::string adapters;  // Directory.
  std::string blobs;     // Directory of uploaded content by digest; empty: none.
  std::optional<ByteCount> adapter_memory;  // That adapters may take on the device; absent: no limit.
  ByteCount idle_merged = ByteCount(int64_t{4} << 30);  // Merged copies that are kept though no request uses them.
  std::string device = "auto";  // "auto", "cpu", "cuda", "cuda:N".
  std::string dtype = "auto";   // "auto", "float32", "bfloat16", "float16".
  std::string silu_grid;        // Grid file, or a full H3 file; empty: none.
  bool copy_weights = false;    // --weights copy.
  CheckpointOptions checkpoint;
  std::optional<ByteCount> device_memory;  // Default: what the machine allows.
  ByteCount host_adapter_memory = ByteCount(int64_t{4} << 30);  // Content of adapters that is kept in host memory.
  ByteCount workspace = ByteCount(int64_t{256} << 20);          // That the temporaries of a row tile may take.
  ByteCount modulation_cache = ByteCount(int64_t{512} << 20);   // Base modulations that are kept across requests.
  bool adaln_on_host = false;                                   // --adaln-residency host.
  EngineObserver* observer = nullptr;                           // Outlives the engine; null: nobody.
};

// Loads the model; blocks for as long as that takes. Defined in worker/h3_engine.cc, the one implementation that links
// LibTorch. Call it on the thread that will own the device.
absl::StatusOr<std::unique_ptr<Engine>> MakeEngine(const EngineOptions& options);

}  // namespace h3
