// h3-scheduler: the public endpoint. Wiring only.
#include <spdlog/spdlog.h>
#include <stdlib.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <memory>
#include <optional>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"
#include "server/app/model_flags.h"
#include "server/app/process.h"
#include "server/metrics/exposer.h"
#include "server/scheduler/worker_process.h"
#include "server/scheduler_rpc/scheduler_core.h"
#include "server/scheduler_rpc/scheduler_services.h"

namespace h3 {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kServices = {"h3.v1.Generation", "h3.v1.Adapters", "h3.v1.Presets", "h3.v1.Operations"};

struct Flags {
  std::string listen = "127.0.0.1:50051";
  std::string metrics = "127.0.0.1:9464";
  std::string worker_metrics = "127.0.0.1:0";
  std::string worker_binary;
  std::string state;
  std::vector<std::string> workers;
  std::string worker_dns;
  ModelFlags model;
  SchedulerOptions options;
  std::string max_request = "1GiB";
  std::string max_buffered = "8GiB";
  std::string max_upload = "16GiB";
  std::string when_full = "wait";
  double session_idle_seconds = 300;
};

// A folder that only we can enter, for the sockets of local workers, and for what is kept where there is no --state; removed at the end.
class PrivateFolder {
 public:
  PrivateFolder() {
    std::string path = (fs::temp_directory_path() / "h3-scheduler-XXXXXX").string();
    if (mkdtemp(path.data()) != nullptr) path_ = path;
  }
  ~PrivateFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

std::string BesideUs(const std::string& program) {
  std::error_code error;
  return (fs::read_symlink("/proc/self/exe", error).parent_path() / program).string();
}

// "grpc=A metrics=B" -> A or B.
std::string ReadyField(absl::string_view ready, absl::string_view field) {
  for (absl::string_view part : absl::StrSplit(ready, ' ')) {
    if (absl::ConsumePrefix(&part, field)) return std::string(part);
  }
  return "";
}

// One worker a device. "cuda:all": what CUDA_VISIBLE_DEVICES leaves of the driver's devices.
std::vector<std::string> LocalDevices(const std::string& device) {
  if (device != "cuda:all") return {device};
  size_t count = 0;
  if (const char* visible = getenv("CUDA_VISIBLE_DEVICES"); visible != nullptr) {
    const std::vector<std::string> ids = absl::StrSplit(visible, ',', absl::SkipWhitespace());
    count = ids.size();
  } else {
    std::error_code none;
    for (fs::directory_iterator it("/proc/driver/nvidia/gpus", none), end; !none && it != end; it.increment(none)) ++count;
  }
  std::vector<std::string> devices;
  for (size_t i = 0; i < count; ++i) devices.push_back(absl::StrCat("cuda:", i));
  return devices;
}

int Run(const Flags& flags) {
  auto exposer = MetricsExposer::Create(flags.metrics);
  if (!exposer.ok()) {
    spdlog::error(std::string(exposer.status().message()));
    return 1;
  }
  SchedulerMetrics metrics((*exposer)->registry());
  std::optional<PrivateFolder> folder(std::in_place);
  if (flags.state.empty()) spdlog::warn("no --state: uploads, adapter settings and presets are forgotten when this process ends");
  const std::string state = flags.state.empty() ? absl::StrCat(folder->path(), "/state") : flags.state;
  std::error_code ignored;  // Told by what comes next.
  fs::create_directories(state, ignored);
  auto records = StateStore::Open(absl::StrCat(state, "/state.sqlite"));
  auto content = records.ok() ? ContentStore::Create(absl::StrCat(state, "/blobs")) : records.status();
  if (!content.ok()) {
    spdlog::error(absl::StrCat("cannot use --state: ", content.status().message()));
    return 1;
  }
  // gRPC's own threads may still speak to these while the process ends: they live as long as it does.
  const std::string blobs = content->directory();
  auto& core = *new SchedulerCore(flags.options, metrics, std::move(*records), std::move(*content));
  auto& generation = *new GenerationService(core);
  auto& adapters = *new AdaptersService(core);
  auto& presets = *new PresetsService(core);
  auto& operations = *new OperationsService(core);
  (*exposer)->Add(std::make_shared<QueueCollector>([&core] {
    QueueGauges gauges;
    const Dispatcher::Figures figures = core.dispatcher().FiguresAt(absl::Now());
    for (size_t i = 0; i < figures.queued.size(); ++i) gauges.queued[i] = static_cast<double>(figures.queued[i]);
    gauges.work_seconds = figures.work_seconds;
    if (figures.oldest.has_value()) gauges.oldest_timestamp = absl::ToDoubleSeconds(*figures.oldest - absl::UnixEpoch());
    gauges.capacity = static_cast<double>(core.dispatcher().capacity());
    gauges.buffered_bytes = static_cast<double>(core.buffered_bytes());
    gauges.sessions = static_cast<double>(core.sessions());
    gauges.adapters_registered = static_cast<double>(core.adapters_registered());
    for (const auto& worker : core.workers()) gauges.workers_ready += worker->state() == v1::WORKER_STATE_READY;
    return gauges;
  }));
  (*exposer)->Add(std::make_shared<FleetCollector>([&core] { return core.WorkerReports(absl::Now()); }));

  auto listening = Listen(flags.listen, {&generation, &adapters, &presets, &operations});
  if (!listening.ok()) {
    spdlog::error(std::string(listening.status().message()));
    return 1;
  }
  grpc::Server& server = *listening->server;
  SetReady(server, kServices, false);

  std::vector<std::unique_ptr<WorkerProcess>> local;
  absl::Notification leave;
  std::atomic<bool> leaving{false}, any_served{false};
  std::atomic<size_t> failed_first{0};
  std::atomic<int> exit_code{0};
  const auto leave_once = [&](int code) {
    if (leaving.exchange(true)) return;
    exit_code.store(code);
    leave.Notify();
  };
  const std::vector<std::string> devices =
      flags.model.model.empty() ? std::vector<std::string>() : LocalDevices(flags.model.device);
  for (size_t i = 0; i < devices.size(); ++i) {
    const std::string name = absl::StrCat("local-", i);
    const std::string socket = absl::StrCat("unix:", folder->path(), "/worker-", i, ".sock");
    const std::shared_ptr<WorkerLink> link = core.AddWorker(name);
    std::vector<std::string> arguments = {
        "--supervised", "--listen", socket, "--metrics", flags.worker_metrics, "--adapters", flags.options.adapters, "--blobs", blobs};
    for (std::string& argument : flags.model.Arguments(devices[i])) arguments.push_back(std::move(argument));
    local.push_back(std::make_unique<WorkerProcess>(
        WorkerProcessOptions{.binary = flags.worker_binary.empty() ? BesideUs("h3-worker") : flags.worker_binary,
                             .arguments = arguments,
                             .on_ready =
                                 [link, name, &any_served](const std::string& ready) {
                                   spdlog::info("worker {} serves, metrics at {}", name, ReadyField(ready, "metrics="));
                                   any_served.store(true);
                                   link->Connect(ReadyField(ready, "grpc="));
                                 },
                             .on_lost =
                                 [link, name, &metrics, &any_served, &failed_first, &leave_once, count = devices.size()](
                                     const std::string& how, int restarts, absl::Duration delay) {
                                   link->Disconnect(how);
                                   // What has never worked is a wrong flag or a wrong file: say so and leave, instead of trying
                                   // for ever.
                                   if (restarts == 0 && failed_first.fetch_add(1) + 1 == count && !any_served.load()) {
                                     spdlog::error(absl::StrCat("worker ", name, " ", how, " and has never served; giving up"));
                                     return leave_once(1);
                                   }
                                   spdlog::error(absl::StrCat("worker ", name, " ", how, "; restart ", restarts + 1, " in ",
                                                              absl::FormatDuration(delay)));
                                   link->CountRestart();
                                   metrics.worker_restarts.Increment();
                                 }}));
  }
  for (const std::string& address : flags.workers) core.AddWorker(address)->Connect(address);
  if (!flags.worker_dns.empty()) core.AddWorker(flags.worker_dns)->Connect(absl::StrCat("dns:///", flags.worker_dns));

  OnStopSignal([&] {
    SetReady(server, kServices, false);
    core.Drain();
    while (core.Active() > 0) absl::SleepFor(absl::Milliseconds(20));
    leave_once(0);
  });

  // Readiness follows the workers, and who waits learns how the queue moves.
  bool ready = false, ready_told = false;
  while (!leave.WaitForNotificationWithTimeout(absl::Milliseconds(50))) {
    core.TellPlaces();
    const bool now = core.AnyReady() && !core.draining();
    if (now == ready) continue;
    ready = now;
    if (!core.draining()) SetReady(server, kServices, ready);
    if (ready && !ready_told) PrintReady(listening->address, (*exposer)->address());
    ready_told |= ready;
  }
  server.Shutdown(std::chrono::system_clock::now() + std::chrono::seconds(5));
  for (const auto& worker : core.workers()) worker->Disconnect("the scheduler ends");
  local.clear();
  folder.reset();
  if (exit_code.load() == 0) spdlog::info("drained");
  LeaveNow(exit_code.load());
}

}  // namespace
}  // namespace h3

int main(int argc, char** argv) {
  h3::BlockStopSignals();
  h3::SetUpLogging("h3-scheduler");
  h3::Flags flags;
  CLI::App app(
      "Serves MiniMax-H3 over gRPC: queues requests, routes them to workers, shows where every byte of device memory is. With "
      "--model it starts "
      "and watches a worker on this machine; with --worker it uses workers elsewhere.");
  app.add_option("--listen", flags.listen, "Where clients find it: HOST:PORT (port 0: a free one) or unix:PATH")
      ->capture_default_str();
  app.add_option("--metrics", flags.metrics, "HOST:PORT of /metrics for Prometheus")->capture_default_str();
  app.add_option("--adapters", flags.options.adapters, "Directory of adapters; a name is a path below it without .safetensors")
      ->check(CLI::ExistingDirectory)
      ->capture_default_str();
  app.add_option("--state", flags.state,
                 "Directory for what is kept over restarts: uploaded adapters, adapter settings, presets; default: kept until the process ends");
  app.add_option("--worker", flags.workers, "HOST:PORT of an h3-worker elsewhere; may be given several times")
      ->group("Workers");
  app.add_option("--worker-dns", flags.worker_dns,
                 "NAME:PORT of an h3-worker that a DNS name leads to; one of its addresses is used")
      ->group("Workers");
  app.add_option("--worker-metrics", flags.worker_metrics, "HOST:PORT of the local worker's /metrics")
      ->capture_default_str()
      ->group("Workers");
  app.add_option("--worker-binary", flags.worker_binary, "The h3-worker to start; default: the one beside this program")
      ->group("Workers");
  app.add_option("--queue-capacity", flags.options.queue_capacity, "Requests that may wait; more are refused with QUEUE_FULL")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str()
      ->group("Limits");
  app.add_option("--max-request", flags.max_request, "Bytes of tensors that one request may bring")
      ->capture_default_str()
      ->group("Limits")
      ->check(h3::IsBytes("1GiB"));
  app.add_option("--max-upload", flags.max_upload, "Bytes that one uploaded adapter may have")
      ->capture_default_str()
      ->group("Limits")
      ->check(h3::IsBytes("16GiB"));
  app.add_option("--max-buffered", flags.max_buffered,
                 "Bytes of tensors of all requests that wait or may be run again; what does not fit is refused with QUEUE_FULL")
      ->capture_default_str()
      ->group("Limits")
      ->check(h3::IsBytes("8GiB"));
  app.add_option("--max-sessions", flags.options.max_sessions_per_worker, "Evaluate sessions per worker")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str()
      ->group("Limits");
  app.add_option("--retries", flags.options.retries,
                 "Times that a request is run again, from its start and with the same result, when its worker is lost before the result has "
                 "come; 0: never, it ends with WORKER_LOST")
      ->check(CLI::Range(0, 100))
      ->capture_default_str()
      ->group("Limits");
  app.add_option("--when-full", flags.when_full,
                 "What a request gets that fits the device, but not beside what open sessions hold: wait (its turn in the queue), or "
                 "refuse (VRAM_EXCEEDED at once, with the time to try again)")
      ->check(CLI::IsMember({"wait", "refuse"}))
      ->capture_default_str()
      ->group("Limits");
  app.add_option("--session-idle", flags.session_idle_seconds, "Seconds after which an idle session is closed")
      ->check(CLI::Range(0.1, 86400.0))
      ->capture_default_str()
      ->group("Limits");
  flags.model.AddTo(app, false);
  app.get_option("--device")
      ->description(
          "Device of the workers: auto (an accelerator where there is one), cpu, cuda, cuda:N; cuda:all starts one worker for "
          "each");
  app.footer(
      "Prints `ready grpc=HOST:PORT metrics=HOST:PORT` when the first worker serves. SIGTERM drains, a second one exits at "
      "once.\n"
      "Example: h3-scheduler --model h3-pruned.safetensors --adapters loras");
  CLI11_PARSE(app, argc, argv);
  if (flags.model.model.empty() == (flags.workers.empty() && flags.worker_dns.empty())) {
    std::fprintf(stderr,
                 "give either --model PATH (workers on this machine), or --worker HOST:PORT or --worker-dns NAME:PORT\n");
    return 2;
  }
  if (!flags.model.model.empty() && h3::LocalDevices(flags.model.device).empty()) {
    std::fprintf(stderr, "--device cuda:all: there is no CUDA device on this machine\n");
    return 2;
  }
  std::vector<h3::AddressFlag> addresses = {{"--listen", flags.listen, true}, {"--metrics", flags.metrics}};
  if (!flags.model.model.empty()) addresses.push_back({"--worker-metrics", flags.worker_metrics});
  if (const int code = h3::CheckAddresses(addresses); code != 0) return code;
  // Threads of a local worker that computes on the CPU would spin for milliseconds when they have nothing to do, on the cores that this
  // process and its clients need. No other thread runs yet.
  if (getenv("OMP_WAIT_POLICY") == nullptr) setenv("GOMP_SPINCOUNT", "1000", /*overwrite=*/0);
  flags.options.max_buffered_bytes = h3::ParseBytes(flags.max_buffered)->value();
  flags.options.max_upload_bytes = h3::ParseBytes(flags.max_upload)->value();
  flags.options.max_request_bytes = h3::ParseBytes(flags.max_request)->value();
  flags.options.refuse_when_full = flags.when_full == "refuse";
  flags.options.session_idle = absl::Seconds(flags.session_idle_seconds);
  return h3::Run(flags);
}
