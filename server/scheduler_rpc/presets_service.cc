#include <functional>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "proto/support/status.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/scheduler_rpc/presets.h"
#include "server/scheduler_rpc/scheduler_services.h"

namespace h3 {
namespace {

// Runs `work` on the file thread and finishes the call with what it returns.
grpc::ServerUnaryReactor* OnFileThread(SchedulerCore& core, grpc::CallbackServerContext* context, std::function<absl::Status()> work) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const bool posted = core.PostFileWork([reactor, work = std::move(work)] { reactor->Finish(ToGrpc(work())); });
  if (!posted) reactor->Finish(ToGrpc(SchedulerCore::FileQueueFull()));
  return reactor;
}

// Names the adapters of the stack that lead elsewhere now.
void MarkChanged(AdapterRegistry& registry, v1::Preset& preset) {
  for (const v1::StackEntry& entry : preset.stack()) {
    const auto found = registry.Find(entry.adapter());
    if (!found.ok() || found->digest != entry.digest()) preset.add_changed(entry.adapter());
  }
}

}  // namespace

grpc::ServerUnaryReactor* PresetsService::ListPresets(grpc::CallbackServerContext* context, const v1::ListPresetsRequest*,
                                                      v1::ListPresetsResponse* response) {
  return OnFileThread(core_, context, [this, response]() -> absl::Status {
    H3_ASSIGN_OR_RETURN(*response, h3::ListPresets(core_.registry().state()));
    for (v1::Preset& preset : *response->mutable_presets()) MarkChanged(core_.registry(), preset);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PresetsService::SetPreset(grpc::CallbackServerContext* context, const v1::SetPresetRequest* request,
                                                    v1::SetPresetResponse* response) {
  return OnFileThread(core_, context, [this, request, response]() -> absl::Status {
    H3_RETURN_IF_ERROR(CheckPresetName(request->name()));
    H3_ASSIGN_OR_RETURN(const ChosenBase base, core_.AnyBase());
    H3_ASSIGN_OR_RETURN(const PinnedStack pinned, core_.PinStack(request->stack(), 0, base.facts));
    const auto before = FindPreset(core_.registry().state(), request->name());
    if (!before.ok() && !absl::IsNotFound(before.status())) return before.status();
    const uint64_t revision = before.ok() ? before->revision() : 0;
    if (request->has_expected_revision() && request->expected_revision() != revision) {
      return Refuse(absl::StatusCode::kAborted, reason::kPresetChanged,
                    absl::StrCat("preset ", request->name(), " has revision ", revision, ", expected was ", request->expected_revision(),
                                 "; look at it again before you replace it"),
                    {{"revision", absl::StrCat(revision)}, {"expected", absl::StrCat(request->expected_revision())}});
    }
    v1::Preset& preset = *response->mutable_preset();
    preset.set_name(request->name());
    preset.set_revision(revision + 1);
    preset.set_updated_seconds(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
    // As it was given, and the content that it means; settings belong to the content and are looked up at each use.
    *preset.mutable_stack() = request->stack();
    for (int i = 0; i < preset.stack_size(); ++i) {
      preset.mutable_stack(i)->set_digest(pinned.entries.Get(i).digest());
      preset.mutable_stack(i)->clear_settings();
    }
    return KeepPreset(core_.registry().state(), preset);
  });
}

grpc::ServerUnaryReactor* PresetsService::GetPreset(grpc::CallbackServerContext* context, const v1::GetPresetRequest* request,
                                                    v1::GetPresetResponse* response) {
  return OnFileThread(core_, context, [this, request, response]() -> absl::Status {
    H3_ASSIGN_OR_RETURN(*response->mutable_preset(), FindPreset(core_.registry().state(), request->name()));
    MarkChanged(core_.registry(), *response->mutable_preset());
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* PresetsService::RemovePreset(grpc::CallbackServerContext* context, const v1::RemovePresetRequest* request,
                                                       v1::RemovePresetResponse*) {
  return OnFileThread(core_, context, [this, request] { return h3::RemovePreset(core_.registry().state(), request->name()); });
}

}  // namespace h3
