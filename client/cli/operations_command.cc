#include "client/cli/operations_command.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/proto_json.h"
#include "client/cli/words.h"
#include "server/base/bytes.h"
#include "server/base/status_macros.h"

namespace h3::ctl {
namespace {

using Rows = std::vector<std::vector<std::string>>;

std::string Size(uint64_t bytes) { return Human(ByteCount(static_cast<int64_t>(bytes))); }

std::string ModelText(const v1::Model& model) {
  const v1::Geometry& g = model.geometry();
  return Table(
      {{"name", model.name()},
       {"base", model.base_fingerprint()},
       {"kind", absl::StrCat(model.pruned() ? "pruned" : "full", ", ", model.container(), ", qkv ", model.qkv_layout())},
       {"partition",
        absl::StrCat(Word(model.partition()), model.partition() == v1::PARTITION_UNSPECIFIED ? " (every task is served)" : "")},
       {"weights", absl::StrCat(Grouped(model.parameters()), " parameters, ", Size(model.weight_bytes()), ", ", model.dtype())},
       {"device", model.device()},
       {"transformer", absl::StrCat("hidden ", g.hidden(), ", ", g.blocks(), " blocks + ", g.refiner_blocks(), " refiner, ",
                                    g.heads(), " heads x ", g.head_dim(), ", ffn ", g.ffn())},
       {"inputs", absl::StrCat("text ", g.text_width(), ", video ", g.video_channels(), " channels, audio ", g.audio_channels(),
                               " channels")},
       {"modulation", g.curve_rows() > 0
                          ? absl::StrCat("table of ", g.curve_rows(), " x ", g.adaln_width())
                          : absl::StrCat("time embedder ", g.time_input(), " -> ", g.time_hidden(), " -> ", g.adaln_width())}});
}

std::string StatusText(const v1::GetStatusResponse& status) {
  std::string text = absl::StrCat("h3-scheduler ", status.version(), ", up ", Duration(status.uptime_seconds()),
                                  status.draining() ? ", draining" : "", "\n", status.running(), " running, ", status.queued(),
                                  " of ", status.queue_capacity(), " queued\n");
  Rows rows = {{"WORKER", "STATE", "DEVICE", "BASE", "RUNNING", "SESSIONS", "RESTARTS", "LAST ERROR"}};
  for (const v1::WorkerStatus& worker : status.workers()) {
    rows.push_back({worker.worker(), Word(worker.state()), OrDash(worker.device()),
                    OrDash(ShortDigest(worker.base_fingerprint())), absl::StrCat(worker.running()),
                    absl::StrCat(worker.sessions()), absl::StrCat(worker.restarts()), OrDash(worker.last_error())});
  }
  absl::StrAppend(&text, Table(rows, {4, 5, 6}));
  return text;
}

template <typename Response>
void PrintMemory(const Response& response, bool as_json, Context& context) {
  if (as_json) {
    context.out << ProtoJson(response) << std::endl;
    return;
  }
  for (const v1::DeviceMemory& device : response.devices()) context.out << MemoryText(device);
  context.out << std::flush;
}

}  // namespace

absl::Status RunModel(Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::GetModelResponse response, context.client.GetModel(context.Snapshot()));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
    return absl::OkStatus();
  }
  for (const v1::Model& model : response.models()) {
    context.out << ModelText(model);
    for (const std::string& warning : model.warnings()) context.out << "warning: " << warning << "\n";
  }
  context.out << std::flush;
  return absl::OkStatus();
}

absl::Status RunStatus(Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::GetStatusResponse response, context.client.GetStatus(context.Snapshot()));
  context.out << (context.json ? ProtoJson(response) + "\n" : StatusText(response)) << std::flush;
  return absl::OkStatus();
}

absl::Status RunMemory(bool watch, Context& context) {
  if (!watch) {
    H3_ASSIGN_OR_RETURN(const v1::GetMemoryResponse response, context.client.GetMemory(context.Snapshot()));
    PrintMemory(response, context.json, context);
    return absl::OkStatus();
  }
  const bool live = context.terminal && !context.json;
  const absl::Status status = context.client.WatchMemory(absl::Seconds(1),
                                                         [&](const v1::WatchMemoryResponse& response) {
                                                           if (live)
                                                             context.out << "\x1b[H\x1b[J";  // Home, and erase what was drawn.
                                                           PrintMemory(response, !live, context);
                                                           return context.out.good();  // A reader that went away ends it.
                                                         },
                                                         {.cancel = &context.interrupt});
  return context.interrupt.cancelled() ? absl::OkStatus() : status;
}

std::string MemoryText(const v1::DeviceMemory& device) {
  const v1::MemoryOwners& owners = device.owners();
  const auto line = [](absl::string_view name, uint64_t bytes) {
    return std::vector<std::string>{absl::StrCat("  ", name), Size(bytes), Grouped(bytes)};
  };
  std::string text =
      absl::StrCat(device.device(), "  worker ", device.worker(), "  base ", ShortDigest(device.base_fingerprint()), "\n");
  absl::StrAppend(&text, Table({{"  OWNER", "", "BYTES"},
                                line("base_weights", owners.base_weights()),
                                line("adapters", owners.adapters()),
                                line("materialized", owners.materialized()),
                                line("caches", owners.caches()),
                                line("activations", owners.activations()),
                                line("workspace", owners.workspace()),
                                line("staging", owners.staging()),
                                line("runtime_context", owners.runtime_context()),
                                line("allocator_cache", owners.allocator_cache()),
                                line("unattributed", owners.unattributed()),
                                line("= used", device.used_bytes()),
                                line("peak", device.peak_bytes()),
                                line("reserved", device.reserved_bytes()),
                                line("headroom", device.headroom_bytes()),
                                line("free", device.free_bytes()),
                                line("total", device.total_bytes())},
                               {1, 2}));
  if (!device.adapters().empty()) {
    Rows rows = {{"  ADAPTER", "DIGEST", "TIER", "PINS", "", "BYTES"}};
    for (const v1::AdapterMemory& adapter : device.adapters()) {
      rows.push_back({absl::StrCat("  ", adapter.name()), ShortDigest(adapter.digest()), adapter.tier(),
                      absl::StrCat(adapter.pins()), Size(adapter.bytes()), Grouped(adapter.bytes())});
    }
    absl::StrAppend(&text, Table(rows, {3, 4, 5}));
  }
  absl::StrAppend(&text, "  merged copies for the adapters in use would hold ", Size(device.avoided_resident_bytes()),
                  " more\n");
  if (device.base_mutations() > 0)
    absl::StrAppend(&text, "  WARNING: the base was changed ", device.base_mutations(), " times\n");
  return text;
}

}  // namespace h3::ctl
