// The options that say which model a process serves and how: the same for h3-worker and for a scheduler that starts one.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <string>
#include <vector>

#include "server/base/bytes.h"

namespace h3 {

// Checks of a flag that counts bytes, `example` for the message; with OrNone "0" is one too.
std::function<std::string(const std::string&)> IsBytes(const std::string& example);
std::function<std::string(const std::string&)> IsBytesOrNone(const std::string& example);

struct ModelFlags {
  std::string model;
  std::string device = "auto";
  std::string dtype = "auto";
  std::string partition = "auto";
  std::string qkv_layout = "auto";
  std::string silu_grid;
  std::string weights = "map";
  std::string device_memory;
  std::string adapter_memory;
  std::string materialized_idle = "4GiB";
  std::string adaln_residency = "device";
  std::string adapter_host_memory = "4GiB";
  std::string modulation_cache = "512MiB";
  std::string workspace = "256MiB";

  void AddTo(CLI::App& app, bool model_required);
  // The same flags again, for the worker that a scheduler starts on `device_name`.
  std::vector<std::string> Arguments(const std::string& device_name) const;
};

}  // namespace h3
