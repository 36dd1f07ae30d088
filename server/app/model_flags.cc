#include "server/app/model_flags.h"

#include "absl/strings/str_cat.h"

namespace h3 {

std::function<std::string(const std::string&)> IsBytes(const std::string& example) {
  return [example](const std::string& text) {
    return ParseBytes(text).ok() ? "" : absl::StrCat("not a number of bytes such as ", example, ": ", text);
  };
}

std::function<std::string(const std::string&)> IsBytesOrNone(const std::string& example) {
  return [check = IsBytes(example)](const std::string& text) { return text == "0" ? "" : check(text); };
}

void ModelFlags::AddTo(CLI::App& app, bool model_required) {
  CLI::Option* path = app.add_option("--model", model, "Checkpoint: one safetensors file, or a directory (reference or diffusers), with or without an index")
                          ->group("Model");
  if (model_required) path->required();
  app.add_option("--device", device, "auto: an accelerator where there is one, else the CPU; cpu; cuda; cuda:N")->capture_default_str()->group("Model");
  app.add_option("--dtype", dtype, "Type of the block stack; auto keeps each tensor's own. Patch projections, time embedder and heads stay float32")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16"}))->capture_default_str()->group("Model");
  app.add_option("--partition", partition, "Which of H3's two weight sets it is; auto: as the files declare. A known one refuses the other's tasks")
      ->check(CLI::IsMember({"auto", "fl2va", "ref2va"}))->capture_default_str()->group("Model");
  app.add_option("--qkv-layout", qkv_layout, "Row order of the fused q/k/v; auto: interleaved in a reference directory, else stacked")
      ->check(CLI::IsMember({"auto", "stacked", "interleaved"}))->capture_default_str()->group("Model");
  app.add_option("--silu-grid", silu_grid, "For a pruned model: silu_t_emb_grid file, or a full H3 file (exact), through which ordinary AdaLN pairs are applied")
      ->group("Model");
  app.add_option("--weights", weights, "On the CPU: map reads weights from the page cache, copy takes memory of its own")
      ->check(CLI::IsMember({"map", "copy"}))->capture_default_str()->group("Model");
  app.add_option("--device-memory", device_memory, "Bytes of the device to count on, e.g. 80GiB; default: all that the machine allows")
      ->check(IsBytes("80GiB"))->group("Model");
  app.add_option("--adapter-memory", adapter_memory, "Bytes that adapters may take on the device; what no request holds goes, least recently used first. Default: no limit")
      ->check(IsBytes("8GiB"))->group("Model");
  app.add_option("--materialized-idle", materialized_idle, "Bytes of merged copies (apply=materialized) that are kept though no request uses them; least recently used go first")
      ->check(IsBytes("4GiB"))->capture_default_str()->group("Model");
  app.add_option("--adaln-residency", adaln_residency, "device: every weight on the device; host: the AdaLN projections (26 of a full H3's 66 GB) stay in mapped host memory and are streamed for timesteps that are not cached. The same bits")
      ->check(CLI::IsMember({"device", "host"}))->capture_default_str()->group("Model");
  app.add_option("--modulation-cache", modulation_cache, "Bytes of modulations that are kept on the device across requests, in memory that nothing else needs; 0: none")
      ->check(IsBytesOrNone("512MiB"))->capture_default_str()->group("Model");
  app.add_option("--adapter-host-memory", adapter_host_memory, "Bytes of adapters that are kept in host memory, read and hashed, for when they come back to the device; 0: none")
      ->check(IsBytesOrNone("4GiB"))->capture_default_str()->group("Model");
  app.add_option("--workspace", workspace, "Bytes that the temporaries of a tile of rows may take: less memory in smaller pieces. Answers agree to rounding, not to the bit")
      ->check(IsBytes("256MiB"))->capture_default_str()->group("Model");
}

std::vector<std::string> ModelFlags::Arguments(const std::string& device_name) const {
  std::vector<std::string> arguments = {"--model", model, "--device", device_name, "--dtype", dtype, "--partition", partition,
                                        "--qkv-layout", qkv_layout, "--weights", weights, "--materialized-idle", materialized_idle,
                                        "--adaln-residency", adaln_residency, "--modulation-cache", modulation_cache,
                                        "--adapter-host-memory", adapter_host_memory, "--workspace", workspace};
  if (!silu_grid.empty()) arguments.insert(arguments.end(), {"--silu-grid", silu_grid});
  if (!adapter_memory.empty()) arguments.insert(arguments.end(), {"--adapter-memory", adapter_memory});
  if (!device_memory.empty()) arguments.insert(arguments.end(), {"--device-memory", device_memory});
  return arguments;
}

}  // namespace h3
