// h3-worker: one device, one resident model. Wiring only.
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/app/metrics_observer.h"
#include "server/app/model_flags.h"
#include "server/app/process.h"
#include "server/base/bytes.h"
#include "server/base/check.h"
#include "server/base/serial_executor.h"
#include "server/base/text.h"
#include "server/metrics/exposer.h"
#include "server/metrics/worker_metrics.h"
#include "server/worker/engine.h"
#include "server/worker_rpc/worker_service.h"

namespace h3 {
namespace {

constexpr int kExitFault = 70;
constexpr size_t kDeviceQueue = 64;
const std::vector<std::string> kServices = {"h3.v1.Worker"};

struct Flags {
  std::string listen = "127.0.0.1:50052";
  std::string metrics = "127.0.0.1:9465";
  std::string adapters = ".";
  std::string blobs;
  ModelFlags model;
  bool supervised = false;
};

ByteCount BytesOrNone(const std::string& text) { return text == "0" ? ByteCount(0) : ParseBytes(text).value(); }

EngineOptions ToEngineOptions(const Flags& flags) {
  EngineOptions options{.model = flags.model.model,
                        .adapters = flags.adapters,
                        .blobs = flags.blobs,
                        .idle_merged = ParseBytes(flags.model.materialized_idle).value(),
                        .device = flags.model.device,
                        .dtype = flags.model.dtype,
                        .silu_grid = flags.model.silu_grid,
                        .copy_weights = flags.model.weights == "copy"};
  if (flags.model.partition != "auto")
    options.checkpoint.partition = flags.model.partition == "fl2va" ? Partition::kFl2va : Partition::kRef2va;
  if (flags.model.qkv_layout != "auto") {
    options.checkpoint.qkv_layout = flags.model.qkv_layout == "stacked" ? QkvLayout::kStacked : QkvLayout::kInterleaved;
  }
  if (!flags.model.adapter_memory.empty()) options.adapter_memory = ParseBytes(flags.model.adapter_memory).value();
  if (!flags.model.device_memory.empty()) options.device_memory = ParseBytes(flags.model.device_memory).value();
  options.adaln_on_host = flags.model.adaln_residency == "host";
  options.workspace = ParseBytes(flags.model.workspace).value();
  options.modulation_cache = BytesOrNone(flags.model.modulation_cache);
  options.host_adapter_memory = BytesOrNone(flags.model.adapter_host_memory);
  return options;
}

// The scheduler that started us holds the other end of stdin: when it is gone, so are we.
void LeaveWithParent() {
  std::thread([] {
    char byte;
    while (read(STDIN_FILENO, &byte, 1) > 0) {
    }
    spdlog::info("the scheduler is gone; leaving");
    _exit(0);
  }).detach();
}

// The value of `key` in a file of lines "key : value"; empty where there is none.
std::string FieldOf(const std::filesystem::path& path, absl::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(line, absl::MaxSplits(':', 1));
    if (absl::StripAsciiWhitespace(parts.first) == key) return CleanText(absl::StripAsciiWhitespace(parts.second), 100);
  }
  return "";
}

// What the machine calls it, for h3_device_info. Where the driver's devices are not all the same, which is ours it does not tell.
std::string DeviceName(absl::string_view device) {
  std::set<std::string> names;
  if (device == "cpu") {
    names.insert(FieldOf("/proc/cpuinfo", "model name"));
  } else {
    std::error_code none;
    for (std::filesystem::directory_iterator it("/proc/driver/nvidia/gpus", none), end; !none && it != end; it.increment(none))
      names.insert(FieldOf(it->path() / "information", "Model"));
  }
  return names.size() == 1 && !names.begin()->empty() ? *names.begin() : "unknown";
}

// What ends the process: OK for a drain that is done, or a fault. The first counts. Thread-safe.
class Ending {
 public:
  void Tell(absl::Status why) ABSL_LOCKS_EXCLUDED(mu_) {
    absl::MutexLock lock(&mu_);
    if (!why_.has_value()) why_ = std::move(why);
  }
  absl::Status Wait() ABSL_LOCKS_EXCLUDED(mu_) {
    const auto told = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { return why_.has_value(); };
    absl::MutexLock lock(&mu_);
    mu_.Await(absl::Condition(&told));
    return *why_;
  }

 private:
  absl::Mutex mu_;
  std::optional<absl::Status> why_ ABSL_GUARDED_BY(mu_);
};

[[noreturn]] void CannotServe(const absl::Status& why) {
  spdlog::error("cannot serve: {}", why.ToString(absl::StatusToStringMode::kWithNoExtraData));
  LeaveNow(1);
}

// On the thread that will own the device.
absl::StatusOr<std::unique_ptr<Engine>> Load(SerialExecutor& device, const Flags& flags, EngineObserver& observer) {
  spdlog::info("loading {}", flags.model.model);
  absl::StatusOr<std::unique_ptr<Engine>> engine;
  absl::Notification done;
  H3_CHECK(device.Post([&] {
    EngineOptions options = ToEngineOptions(flags);
    options.observer = &observer;
    engine = MakeEngine(options);
    done.Notify();
  }));
  done.WaitForNotification();
  if (engine.ok()) {
    const ModelInfo& info = (*engine)->model();
    spdlog::info(absl::StrCat("model ", info.name, " (", ContainerName(info.container), ", ",
                              info.geometry.pruned() ? "pruned" : "full", ", ", info.dtype, ", partition ",
                              PartitionName(info.partition), "), ", Human(info.weight_bytes), ", fingerprint ",
                              info.fingerprint));
    for (const std::string& warning : info.warnings) spdlog::warn(warning);
  }
  return engine;
}

// Never returns: threads of signals, metrics and gRPC use what stands on its stack until the process is gone.
[[noreturn]] void Run(const Flags& flags) {
  if (flags.supervised) LeaveWithParent();
  Ending ending;
  std::optional<ListeningServer> listening;
  std::optional<WorkerService> service;
  std::atomic<bool> serving{false};
  OnStopSignal([&] {
    if (!serving.load()) LeaveNow(0);  // Loading takes minutes, and nobody waits for its end any more.
    SetReady(*listening->server, kServices, false);
    service->Drain();
    while (service->Active() > 0) absl::SleepFor(absl::Milliseconds(20));
    ending.Tell(absl::OkStatus());
  });

  // Before the model is read, so that Prometheus sees a worker that loads.
  auto exposer = MetricsExposer::Create(flags.metrics);
  if (!exposer.ok()) CannotServe(exposer.status());
  WorkerMetrics metrics((*exposer)->registry());
  MetricsObserver observer(metrics);
  SerialExecutor device(kDeviceQueue);
  const auto engine = Load(device, flags, observer);
  if (!engine.ok()) CannotServe(engine.status());
  const std::string& name = (*engine)->model().device;
  metrics.SetDevice(name, DeviceName(name));
  (*exposer)->Add(std::make_shared<MemoryCollector>([&] { return (*engine)->Memory(); }));
  service.emplace(**engine, device, metrics,
                  WorkerServiceOptions{.on_fault = [&](absl::Status why) { ending.Tell(std::move(why)); }});
  auto made = Listen(flags.listen, {&*service});
  if (!made.ok()) CannotServe(made.status());
  listening = std::move(*made);
  SetReady(*listening->server, kServices, true);
  serving.store(true);
  PrintReady(listening->address, (*exposer)->address());

  const absl::Status why = ending.Wait();
  SetReady(*listening->server, kServices, false);
  // What is in flight is told before the process goes; after a drain only watchers are left.
  listening->server->Shutdown(std::chrono::system_clock::now() + std::chrono::milliseconds(500));
  if (!why.ok()) {
    spdlog::critical(absl::StrCat("fatal fault: ", why.message()));
    LeaveNow(kExitFault);
  }
  spdlog::info("drained");
  LeaveNow(0);
}

}  // namespace
}  // namespace h3

int main(int argc, char** argv) {
  h3::BlockStopSignals();
  h3::SetUpLogging("h3-worker");
  h3::Flags flags;
  CLI::App app(
      "Serves one resident MiniMax-H3 model on one device to an h3-scheduler. Most people start h3-scheduler --model PATH, "
      "which starts its "
      "workers by itself; run this one where the scheduler is on another machine.");
  app.add_option("--listen", flags.listen, "Where the scheduler finds it: HOST:PORT (port 0: a free one) or unix:PATH")
      ->capture_default_str();
  app.add_option("--metrics", flags.metrics, "HOST:PORT of /metrics for Prometheus")->capture_default_str();
  app.add_option("--adapters", flags.adapters, "Directory of adapters; a name is a path below it without .safetensors")
      ->capture_default_str();
  app.add_option("--blobs", flags.blobs,
                 "Directory of uploaded adapters by digest: `blobs` of the scheduler's --state directory, where it is shared");
  app.add_flag("--supervised", flags.supervised, "Leave when stdin ends (set by the scheduler that starts it)");
  flags.model.AddTo(app, true);
  app.footer(
      "Prints `ready grpc=HOST:PORT metrics=HOST:PORT` when it serves. SIGTERM drains, a second one exits at once.\n"
      "Example: h3-worker --model h3-pruned.safetensors --adapters loras --listen 0.0.0.0:50052");
  CLI11_PARSE(app, argc, argv);
  const int code = h3::CheckAddresses({{"--listen", flags.listen, true}, {"--metrics", flags.metrics}});
  if (code != 0) return code;
  h3::Run(flags);
}
