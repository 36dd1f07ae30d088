#include "client/cli/adapters_command.h"

#include <filesystem>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "client/cli/adapter_report.h"
#include "client/cli/exit_code.h"
#include "client/cli/proto_json.h"
#include "client/cli/status_line.h"
#include "client/cli/words.h"
#include "server/base/bytes.h"
#include "server/base/status_macros.h"

namespace h3::ctl {
namespace {

constexpr absl::string_view kAuto = "auto";

std::string Size(uint64_t bytes) { return Human(ByteCount(static_cast<int64_t>(bytes))); }

// Sends a file, with progress on a terminal. No deadline: that is gigabytes.
absl::StatusOr<v1::UploadAdapterResponse> Upload(const std::string& name, const std::string& file, bool check_only,
                                                 Context& context) {
  client::UploadOptions upload = {.check_only = check_only};
  StatusLine line(context.out);
  if (context.terminal && !context.json) {
    const auto draw = [&line](absl::string_view what, uint64_t bytes, uint64_t total) {
      line.Draw(absl::StrCat(what, " ", Bar(bytes, total), "  ", 100 * bytes / total, " % of ", Size(total)));
    };
    upload.events.hashed = [draw](uint64_t bytes, uint64_t total) { draw("hashing", bytes, total); };
    upload.events.sent = [draw, &line](uint64_t bytes, uint64_t total) {
      if (bytes < total) {
        draw("sending", bytes, total);
      } else {
        line.Draw("sent; the server reads every value of it");
      }
    };
  }
  absl::StatusOr<v1::UploadAdapterResponse> response =
      context.client.UploadAdapter(name, file, upload, {.cancel = &context.interrupt});
  line.Erase();
  return response;
}

// What the flags set; "auto" leaves a field unset.
absl::StatusOr<v1::AdapterSettings> SettingsOf(const AdapterSetFlags& flags) {
  v1::AdapterSettings settings;
  double alpha = 0;
  if (flags.alpha.has_value() && flags.alpha != kAuto) {
    if (!absl::SimpleAtod(*flags.alpha, &alpha)) {
      return UsageError(absl::StrCat("--alpha '", *flags.alpha, "' is neither a number nor auto"));
    }
    settings.set_alpha(alpha);
  }
  if (flags.qkv_layout == "stacked") settings.set_qkv_layout(v1::QKV_LAYOUT_STACKED);
  if (flags.qkv_layout == "interleaved") settings.set_qkv_layout(v1::QKV_LAYOUT_INTERLEAVED);
  if (flags.fc1_order == "gate-first") settings.set_fc1_order(v1::FC1_ORDER_GATE_FIRST);
  if (flags.fc1_order == "up-first") settings.set_fc1_order(v1::FC1_ORDER_UP_FIRST);
  if (flags.partition == "fl2va") settings.set_partition(v1::PARTITION_FL2VA);
  if (flags.partition == "ref2va") settings.set_partition(v1::PARTITION_REF2VA);
  return settings;
}

// `kept` without the fields that a flag speaks of.
v1::AdapterSettings Others(v1::AdapterSettings kept, const AdapterSetFlags& flags) {
  if (flags.alpha.has_value()) kept.clear_alpha();
  if (flags.qkv_layout.has_value()) kept.clear_qkv_layout();
  if (flags.fc1_order.has_value()) kept.clear_fc1_order();
  if (flags.partition.has_value()) kept.clear_partition();
  kept.clear_peft_config();  // The server's own.
  return kept;
}

}  // namespace

absl::Status RunAdaptersList(Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::ListAdaptersResponse response, context.client.ListAdapters(context.Snapshot()));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
    return absl::OkStatus();
  }
  std::vector<std::vector<std::string>> rows = {{"NAME", "DIGEST", "FILE", "ON DEVICE", "PINS", "SOURCE", "SETTINGS"}};
  for (const v1::Adapter& adapter : response.adapters()) {
    rows.push_back({adapter.name(), adapter.digest().empty() ? "-" : ShortDigest(adapter.digest()), Size(adapter.file_bytes()),
                    adapter.resident() ? Size(adapter.bytes()) : "-", absl::StrCat(adapter.pins()),
                    adapter.uploaded() ? "upload" : "directory", OrDash(SettingsText(adapter.settings()))});
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
  context.out << ScalesText(resolved.scales());
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

absl::Status RunAdaptersCheck(const std::string& name_or_file, Context& context) {
  v1::AdapterReport report;
  std::error_code ignored;
  if (std::filesystem::is_regular_file(name_or_file, ignored)) {
    H3_ASSIGN_OR_RETURN(v1::UploadAdapterResponse response, Upload("", name_or_file, /*check_only=*/true, context));
    report = std::move(*response.mutable_report());
    if (report.name().empty()) report.set_name(name_or_file);
  } else {
    H3_ASSIGN_OR_RETURN(v1::CheckAdapterResponse response,
                        context.client.CheckAdapter(name_or_file, {.cancel = &context.interrupt}));
    report = std::move(*response.mutable_report());
  }
  context.out << (context.json ? ProtoJson(report) + "\n" : ReportText(report)) << std::flush;
  return VerdictStatus(report.verdict());
}

absl::Status RunAdaptersUpload(const AdapterUploadFlags& flags, Context& context) {
  H3_ASSIGN_OR_RETURN(const v1::UploadAdapterResponse response, Upload(flags.name, flags.file, /*check_only=*/false, context));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
    return absl::OkStatus();
  }
  const v1::AdapterReport& report = response.report();
  context.out << "uploaded " << flags.name << "  sha256:" << report.digest() << "  " << Size(report.file_bytes());
  if (response.replaced() == report.digest()) {
    context.out << "  (was there already)";
  } else if (!response.replaced().empty()) {
    context.out << "  in place of sha256:" << response.replaced();
  }
  context.out << "\n" << VerdictText(report.verdict()) << "\n";
  if (!report.verdict().loads()) {
    context.out << "it is kept, but requests with it will be refused; h3ctl adapters check " << ShellWord(flags.name)
                << " says more\n";
  }
  for (const std::string& warning : report.warnings()) context.out << "warning: " << warning << "\n";
  context.out << std::flush;
  return absl::OkStatus();
}

absl::Status RunAdaptersSet(const AdapterSetFlags& flags, Context& context) {
  const bool sets =
      flags.alpha.has_value() || flags.qkv_layout.has_value() || flags.fc1_order.has_value() || flags.partition.has_value();
  if (!sets && !flags.reset) {
    return UsageError("adapters set needs at least one of --alpha, --qkv-layout, --fc1-order, --partition and --reset");
  }
  H3_ASSIGN_OR_RETURN(v1::AdapterSettings settings, SettingsOf(flags));
  // No deadline: the server may have to hash the file before it knows what the settings belong to.
  const client::CallOptions options = {.cancel = &context.interrupt};
  std::string name = flags.name;
  bool reset = flags.reset;
  const bool forgets =
      flags.alpha == kAuto || flags.qkv_layout == kAuto || flags.fc1_order == kAuto || flags.partition == kAuto;
  if (forgets && !reset) {
    // An unset field stays as it is kept, so one alone is forgotten by a reset that sets the others again. By digest: the name
    // may lead elsewhere by then.
    H3_ASSIGN_OR_RETURN(const v1::SetAdapterResponse kept, context.client.SetAdapter(name, {}, /*reset=*/false, options));
    v1::AdapterSettings merged = Others(kept.settings(), flags);
    merged.MergeFrom(settings);
    settings = std::move(merged);
    name = absl::StrCat("sha256:", kept.digest());
    reset = true;
  }
  H3_ASSIGN_OR_RETURN(const v1::SetAdapterResponse response, context.client.SetAdapter(name, settings, reset, options));
  if (context.json) {
    context.out << ProtoJson(response) << std::endl;
    return absl::OkStatus();
  }
  const std::string kept = SettingsText(response.settings());
  context.out << flags.name << "  sha256:" << response.digest() << "  "
              << (kept.empty() ? "nothing is kept: the file has the word" : absl::StrCat("kept: ", kept)) << std::endl;
  return absl::OkStatus();
}

}  // namespace h3::ctl
