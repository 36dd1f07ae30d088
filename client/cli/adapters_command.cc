#include "client/cli/adapters_command.h"

#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "client/cli/proto_json.h"
#include "client/cli/words.h"
#include "server/base/bytes.h"
#include "server/base/status_macros.h"

namespace h3::ctl {
namespace {
std::string Size(uint64_t bytes) { return Human(ByteCount(static_cast<int64_t>(bytes))); }
}  // namespace

absl::Status RunAdaptersList(Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::ListAdaptersResponse response, context.client.ListAdapters(context.Snapshot()));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{"NAME", "DIGEST", "FILE", "ON DEVICE", "PINS"}};
  for (const v1::Adapter& adapter : response.adapters()) {
    rows.push_back({adapter.name(), adapter.digest().empty() ? "-" : ShortDigest(adapter.digest()), Size(adapter.file_bytes()),
                    adapter.resident() ? Size(adapter.bytes()) : "-", absl::StrCat(adapter.pins())});
  }
  context.out << Table(rows, {2, 3, 4}) << std::flush;
  return absl::OkStatus();
}

absl::Status RunAdaptersLoad(const std::string& name, Context& context) {
  // No deadline: gigabytes are read, hashed and copied, perhaps from a slow disk.
  H3_ASSIGN_OR_RETURN(const v1::LoadAdapterResponse response, context.client.LoadAdapter(name, {.cancel = &context.interrupt}));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
    return absl::OkStatus();
  }
  const v1::ResolvedAdapter& resolved = response.resolved();
  context.out << "loaded " << response.adapter().name() << "  sha256:" << response.adapter().digest() << "  "
              << resolved.modules() << " modules  " << Size(resolved.bytes()) << " on the device\n";
  std::vector<std::vector<std::string>> rows = {{"MODULES", "KIND", "RANK", "ALPHA", "SCALE", "FROM"}};
  for (const v1::EffectiveScale& scale : resolved.scales()) {
    rows.push_back({absl::StrCat(scale.modules()), scale.module_kind(), absl::StrCat(scale.rank()), absl::StrCat(scale.alpha()),
                    absl::StrCat(scale.scale()), scale.source()});
  }
  context.out << Table(rows, {0, 2, 3, 4});
  for (const std::string& warning : resolved.warnings()) context.out << "warning: " << warning << "\n";
  context.out << std::flush;
  return absl::OkStatus();
}

absl::Status RunAdaptersUnload(const std::string& name, Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::UnloadAdapterResponse response, context.client.UnloadAdapter(name, context.Snapshot()));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
  } else {
    context.out << "unloaded " << name << "  " << Size(response.freed_bytes()) << " given back" << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace h3::ctl
