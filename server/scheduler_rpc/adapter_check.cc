#include "server/scheduler_rpc/adapter_check.h"

#include <chrono>
#include <memory>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "h3/v1/worker.grpc.pb.h"
#include "server/base/error.h"
#include "server/rpc/convert.h"
#include "server/scheduler_rpc/relay.h"

namespace h3 {
namespace {

constexpr absl::string_view kKind = "verdict";  // digest, base and settings -> h3.v1.AdapterReport
constexpr std::chrono::minutes kDeadline{10};

using OnReport = std::function<void(absl::StatusOr<v1::AdapterReport>)>;

void SetVerdict(const absl::Status& status, v1::AdapterReport& report) {
  v1::Verdict& verdict = *report.mutable_verdict();
  verdict.Clear();
  verdict.set_loads(status.ok());
  if (status.ok()) return;
  verdict.set_code(std::string(absl::StatusCodeToString(status.code())));
  verdict.set_reason(ReasonOf(status));
  verdict.set_message(std::string(status.message()));
  for (const auto& [key, value] : DetailsOf(status)) (*verdict.mutable_details())[key] = value;
}

v1::AdapterReport FromHeader(const HeaderReport& from) {
  v1::AdapterReport report;
  report.set_name(from.adapter.name);
  report.set_digest(from.adapter.digest);
  report.set_file_bytes(static_cast<uint64_t>(from.adapter.file_bytes));
  report.set_producer(from.producer);
  for (const auto& [key, value] : from.schedule_hints) (*report.mutable_schedule_hints())[key] = value;
  *report.mutable_settings() = ToProto(from.adapter.settings);
  report.mutable_settings()->clear_peft_config();
  SetVerdict(from.manifest.status(), report);
  if (!from.manifest.ok()) return report;
  const AdapterManifest& manifest = *from.manifest;
  report.set_format(manifest.format);
  report.set_bytes(static_cast<uint64_t>(from.bytes.value()));
  report.set_arithmetic_percent(from.arithmetic_percent);
  report.set_partition(ToProto(manifest.partition));
  std::set<int> modules;
  for (const AdapterTerm& term : manifest.terms) modules.insert(term.site);
  report.set_modules(static_cast<uint32_t>(modules.size()));
  for (const std::string& name : manifest.left_out) report.add_left_out(name);
  for (const std::string& name : manifest.ignored_sections) report.add_ignored_sections(name);
  for (const std::string& warning : manifest.warnings) report.add_warnings(warning);
  return report;
}

// The call to a worker, and what is made of its answer.
struct Measuring {
  v1::AdapterReport report;
  std::string key;
  std::string worker;
  std::shared_ptr<v1::Worker::Stub> stub;
  grpc::ClientContext context;
  v1::WorkerCheckAdapterRequest request;
  v1::WorkerCheckAdapterResponse response;
  OnReport done;

  void Answered(SchedulerCore& core, const grpc::Status& status) {
    const absl::Status answer = FromWorker(status, worker);
    if (answer.ok()) {
      report.set_relative_strength(response.relative_strength());
      *report.mutable_strengths() = response.strengths();
      *report.mutable_scales() = response.resolved().scales();
      *report.mutable_warnings() = response.resolved().warnings();
      report.set_bytes(response.resolved().bytes());
    } else if ((absl::IsInvalidArgument(answer) || absl::IsFailedPrecondition(answer)) && ReasonOf(answer) != reason::kVramExceeded) {
      SetVerdict(answer, report);
    } else {
      // It says nothing of the adapter: the header's verdict stands, and is not kept.
      report.add_warnings(absl::StrCat("judged by its header alone, the worker could not look: ", answer.message()));
      return done(std::move(report));
    }
    report.set_checked_by(worker);
    core.registry().state().Put(kKind, key, report.SerializeAsString()).IgnoreError();  // Then the next check asks again.
    done(std::move(report));
  }
};

}  // namespace

void CheckAdapter(SchedulerCore& core, const std::string& name, OnReport done) {
  const auto base = core.AnyBase();
  if (!base.ok()) return done(base.status());
  const auto header = core.registry().Report(name, base->facts);
  if (!header.ok()) {
    // Not even a safetensors file is a verdict, too.
    if (ReasonOf(header.status()) != reason::kMalformedFile) return done(header.status());
    v1::AdapterReport report;
    report.set_name(name);
    SetVerdict(header.status(), report);
    return done(std::move(report));
  }
  auto measuring = std::make_shared<Measuring>();
  measuring->report = FromHeader(*header);
  measuring->report.set_name(name);
  if (header->manifest.ok()) {
    for (const EffectiveScale& scale : SummariseScales(*header->manifest, base->facts.geometry())) *measuring->report.add_scales() = ToProto(scale);
  }
  const std::string settings = ToProto(header->adapter.settings).SerializeAsString();
  measuring->key = absl::StrCat(header->adapter.digest, "|", base->fingerprint, "|", base->facts.grid_width, "|", base->dtype, "|", H3_VERSION, "|", settings);
  if (!header->manifest.ok()) return done(std::move(measuring->report));
  const auto kept = core.registry().state().Get(kKind, measuring->key);
  if (v1::AdapterReport before; kept.ok() && kept->has_value() && before.ParseFromString(**kept)) {
    before.set_name(name);
    return done(std::move(before));
  }
  for (const auto& worker : core.workers()) {
    const auto snapshot = worker->snapshot();
    if (worker->state() != v1::WORKER_STATE_READY || snapshot == nullptr || snapshot->model().base_fingerprint() != base->fingerprint) continue;
    measuring->worker = worker->name();
    measuring->stub = worker->stub();
    if (measuring->stub != nullptr) break;
  }
  if (measuring->stub == nullptr) return done(std::move(measuring->report));
  measuring->request.set_name(header->adapter.name);
  measuring->request.set_digest(header->adapter.digest);
  *measuring->request.mutable_settings() = ToProto(header->adapter.settings);
  measuring->done = std::move(done);
  measuring->context.set_deadline(std::chrono::system_clock::now() + kDeadline);
  measuring->stub->async()->CheckAdapter(&measuring->context, &measuring->request, &measuring->response,
                                         [&core, measuring](const grpc::Status& status) {
                                           // The state is the file thread's.
                                           core.ContinueFileWork([&core, measuring, status] { measuring->Answered(core, status); });
                                         });
}

}  // namespace h3
