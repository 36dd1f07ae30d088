// `h3ctl adapters list | load | unload | check | upload | set`.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "client/cli/context.h"

namespace h3::ctl {

struct AdapterUploadFlags {
  std::string name;
  std::string file;
};

struct AdapterSetFlags {
  std::string name;
  // Absent: stays as it is kept. "auto": no longer kept.
  std::optional<std::string> alpha;       // A number.
  std::optional<std::string> qkv_layout;  // "stacked", "interleaved".
  std::optional<std::string> fc1_order;   // "gate-first", "up-first".
  std::optional<std::string> partition;   // "fl2va", "ref2va".
  bool reset = false;                     // First forgets what is kept.
};

// Tables on a terminal and in a pipe alike; one JSON object with --json.
absl::Status RunAdaptersList(Context& context);
absl::Status RunAdaptersLoad(const std::string& name, Context& context);
absl::Status RunAdaptersUnload(const std::string& name, Context& context);

// A report on a file of this machine, which is sent and not kept, or else on what the server has under the name. Where it would
// not load, the report is printed and the refusal that a request would get is the result.
absl::Status RunAdaptersCheck(const std::string& name_or_file, Context& context);

// Progress on a terminal. What would not load is kept too: settings may make it load.
absl::Status RunAdaptersUpload(const AdapterUploadFlags& flags, Context& context);

// USAGE: nothing to set.
absl::Status RunAdaptersSet(const AdapterSetFlags& flags, Context& context);

}  // namespace h3::ctl
