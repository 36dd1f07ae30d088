#include "client/cli/app.h"

#include <CLI/CLI.hpp>
#include <memory>
#include <sstream>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "client/cli/adapters_command.h"
#include "client/cli/evaluate_command.h"
#include "client/cli/exit_code.h"
#include "client/cli/generate_command.h"
#include "client/cli/inspect_command.h"
#include "client/cli/lora_spec.h"
#include "client/cli/operations_command.h"
#include "client/cli/plan_command.h"
#include "client/cli/presets_command.h"

namespace h3::ctl {
namespace {

constexpr char kDefaultServer[] = "127.0.0.1:50051";

constexpr char kAdapterName[] = "Path below the adapters directory without .safetensors, an upload's name, or sha256:HEX";
constexpr char kPresetName[] = "1 to 128 letters, digits, and . _ -";

std::string LoraHelp() {
  return absl::StrCat(
      "An adapter of the stack, applied at run time; repeat it for more, in order. SPEC is\n", kLoraSpecGrammar,
      "\nwith NAME a path below the server's adapters directory without .safetensors, an upload's name, or sha256:HEX");
}

const char kAppFooter[] =
    "\nExamples:\n"
    "  h3ctl generate --request in.safetensors --lora turbo=1 --lora style=0.6,audio=0 --evaluations 8 --seed 7 --output "
    "out.safetensors\n"
    "  h3ctl adapters check style.safetensors\n"
    "  h3ctl memory --watch\n"
    "  h3ctl inspect style.safetensors\n"
    "  h3ctl plan --model h3-pruned.safetensors --lora style.safetensors=1 --device-memory 80GiB\n"
    "\nExit codes: 0 done; 2 wrong usage; 3 refused (the request is at fault); 4 not now (try again); 1 anything else.\n"
    "With --json an error is {\"code\", \"reason\", \"message\", \"details\"} on stderr.";

const char kRequestHelp[] =
    "Request file: safetensors with text, text_token_tags, target_video, target_audio_rows, condition_video.N, "
    "condition_audio.N, "
    "and the layout as JSON in its metadata";

// What both kinds of run share.
template <typename Flags>
void AddRunOptions(CLI::App& command, Flags& flags) {
  command.add_option("--request", flags.request, kRequestHelp)->required()->type_name("FILE");
  CLI::Option* const lora = command.add_option("--lora", flags.lora, LoraHelp())->allow_extra_args(false)->type_name("SPEC");
  command.add_option("--preset", flags.preset, "A stack that the server keeps under this name; see h3ctl presets --help")
      ->excludes(lora)
      ->type_name("NAME");
  command.add_option("--video-shift", flags.video_shift, "Sigma shift of the video [the request file's, else 12]");
  command.add_option("--audio-shift", flags.audio_shift, "Sigma shift of the audio [the request file's, else 3]");
}

void AddGenerate(CLI::App& app, Invocation& invocation) {
  CLI::App& command = *app.add_subcommand("generate", "Denoise a request from noise to latents");
  const auto flags = std::make_shared<GenerateFlags>();
  AddRunOptions(command, *flags);
  command
      .add_option("--output", flags->output,
                  "Safetensors file to write (-: standard output, text then on stderr): video, audio (rows), video_latents, "
                  "audio_latents")
      ->required()
      ->type_name("FILE");
  command.add_option("--evaluations", flags->evaluations, "Model evaluations (steps); needed unless there are --sigmas")
      ->type_name("N");
  CLI::Option* const seed =
      command.add_option("--seed", flags->seed, "Noise drawn as diffusers draws it [a random seed, shown]");
  command
      .add_flag("--noise-from-request", flags->noise_from_request,
                "target_video and target_audio_rows of the request are the noise")
      ->excludes(seed);
  CLI::Option* const schedule =
      command.add_option("--schedule", flags->schedule, "Sigma grid: official or normal (ComfyUI's) [official]")
          ->check(CLI::IsMember({"official", "normal"}))
          ->type_name("NAME");
  command
      .add_option("--sigmas", flags->sigmas,
                  "Video sigmas after the shift, strictly decreasing to 0: a,b,...,0; the audio's follow by re-shifting")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("LIST")
      ->excludes(schedule);
  command.add_option("--audio-sigmas", flags->audio_sigmas, "Audio sigmas, where they do not follow the video's")
      ->delimiter(',')
      ->allow_extra_args(false)
      ->type_name("LIST");
  command.add_option("--priority", flags->priority, "Place in the queue: low, normal or high [normal]")
      ->check(CLI::IsMember({"low", "normal", "high"}))
      ->type_name("P");
  command.add_option("--deadline", flags->deadline_seconds, "Give up after this time; refused at once where it cannot be met")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  command.add_option("--request-id", flags->request_id, "A name for the request in logs and messages")->type_name("ID");
  command.footer(
      "\nOn a terminal a progress bar, otherwise one JSON object per event. Ctrl-C cancels: the device stops within one "
      "evaluation.\n"
      "\nExamples:\n"
      "  h3ctl generate --request in.safetensors --evaluations 8 --seed 7 --output out.safetensors\n"
      "  h3ctl generate --request in.safetensors --lora turbo=1 --lora style=-0.5 --evaluations 4 --noise-from-request "
      "--output out.safetensors\n"
      "  h3ctl generate --request in.safetensors --preset anime --evaluations 8 --output out.safetensors\n"
      "  h3ctl generate --request in.safetensors --sigmas 1,0.9,0.6,0 --seed 7 --output out.safetensors | jq .event");
  command.callback(
      [flags, &invocation] { invocation.run = [flags](Context& context) { return RunGenerate(*flags, context); }; });
}

void AddEvaluate(CLI::App& app, Invocation& invocation) {
  CLI::App& command = *app.add_subcommand("evaluate", "Run the model once on a request's rows");
  const auto flags = std::make_shared<EvaluateFlags>();
  AddRunOptions(command, *flags);
  command
      .add_option("--output", flags->output,
                  "Safetensors file to write (-: standard output, text then on stderr): video, audio velocity rows, condition "
                  "rows first")
      ->required()
      ->type_name("FILE");
  command.add_option("--sigma", flags->sigma, "Video sigma after the shift; the audio's by re-shifting")->type_name("S");
  command.add_option("--video-t", flags->video_t, "Video timestep, 1 - sigma; with --audio-t")->type_name("T");
  command.add_option("--audio-t", flags->audio_t, "Audio timestep, 1 - sigma; with --video-t")->type_name("T");
  command.footer(
      "\nWithout --sigma or --video-t and --audio-t, the point is the request file's base_sigma (before the shift).\n"
      "\nExamples:\n"
      "  h3ctl evaluate --request in.safetensors --lora style=0.8 --output velocity.safetensors\n"
      "  h3ctl evaluate --request in.safetensors --preset anime --sigma 0.95 --output velocity.safetensors");
  command.callback(
      [flags, &invocation] { invocation.run = [flags](Context& context) { return RunEvaluate(*flags, context); }; });
}

// A subcommand that takes a name and nothing else.
CLI::App& AddNamed(CLI::App& command, Invocation& invocation, const char* verb, const char* what, const char* name_help,
                   absl::Status (*run)(const std::string&, Context&)) {
  CLI::App& sub = *command.add_subcommand(verb, what);
  const auto name = std::make_shared<std::string>();
  sub.add_option("name", *name, name_help)->required()->type_name("NAME");
  sub.callback([name, run, &invocation] { invocation.run = [name, run](Context& context) { return run(*name, context); }; });
  return sub;
}

void AddAdaptersUpload(CLI::App& adapters, Invocation& invocation) {
  CLI::App& command = *adapters.add_subcommand("upload", "Send an adapter file to the server and keep it there under a name");
  const auto flags = std::make_shared<AdapterUploadFlags>();
  command.add_option("name", flags->name, "What requests will call it; what had the name before is replaced")
      ->required()
      ->type_name("NAME");
  command.add_option("file", flags->file, "Safetensors file of this machine")->required()->type_name("FILE");
  command.footer(
      "\nThe name leads to the new file only when all of it has arrived; an upload that breaks off changes nothing. A file "
      "that "
      "would not load is kept too, and the answer says so. Nothing is put on the device: see h3ctl adapters load.\n"
      "\nExample:\n  h3ctl adapters upload style/v2 style-v2.safetensors");
  command.callback(
      [flags, &invocation] { invocation.run = [flags](Context& context) { return RunAdaptersUpload(*flags, context); }; });
}

void AddAdaptersSet(CLI::App& adapters, Invocation& invocation) {
  CLI::App& command = *adapters.add_subcommand("set", "Keep what is known about an adapter and its file does not say");
  const auto flags = std::make_shared<AdapterSetFlags>();
  command.add_option("name", flags->name, kAdapterName)->required()->type_name("NAME");
  command.add_option("--alpha", flags->alpha, "Alpha of every module, in place of the file's; a SPEC's alpha goes before it")
      ->type_name("A|auto");
  command.add_option("--qkv-layout", flags->qkv_layout, "Rows of a fused attn.qkv_proj: [q; k; v] or [q0 k0 v0 q1 k1 v1 ...]")
      ->check(CLI::IsMember({"stacked", "interleaved", "auto"}))
      ->type_name("LAYOUT");
  command.add_option("--fc1-order", flags->fc1_order, "Which half of mlp.fc1 comes first")
      ->check(CLI::IsMember({"gate-first", "up-first", "auto"}))
      ->type_name("ORDER");
  command.add_option("--partition", flags->partition, "The weight set that it was trained on")
      ->check(CLI::IsMember({"fl2va", "ref2va", "auto"}))
      ->type_name("PARTITION");
  command.add_flag("--reset", flags->reset, "First forget what is kept");
  command.footer(
      "\nKept for the content (by digest), not for the name: another file under the name starts anew. What no option names "
      "stays "
      "as it is; auto forgets one setting, and the file has the word again. Prints what is kept now.\n"
      "\nExample, for a file whose fused rows come out as noise:\n  h3ctl adapters set style --qkv-layout interleaved");
  command.callback(
      [flags, &invocation] { invocation.run = [flags](Context& context) { return RunAdaptersSet(*flags, context); }; });
}

void AddAdapters(CLI::App& app, Invocation& invocation) {
  CLI::App& command =
      *app.add_subcommand("adapters", "See what adapters there are; check, upload and set them; put them on the device");
  command.require_subcommand(1);
  CLI::App& list = *command.add_subcommand("list", "Names, digests, sizes, settings, and what the device holds");
  list.footer("\nExample:\n  h3ctl adapters list");
  list.callback([&invocation] { invocation.run = RunAdaptersList; });
  AddNamed(command, invocation, "load", "Read, check and copy an adapter to the device before it is needed", kAdapterName,
           RunAdaptersLoad)
      .footer("\nExample:\n  h3ctl adapters load style");
  AddNamed(command, invocation, "unload", "Free an adapter's device memory; refused while a request uses it", kAdapterName,
           RunAdaptersUnload)
      .footer("\nExample:\n  h3ctl adapters unload style");
  CLI::App& check =
      AddNamed(command, invocation, "check", "What an adapter is, and whether it would load; nothing stays loaded or kept",
               "A file of this machine, which is sent for the check, or else an adapter of the server", RunAdaptersCheck);
  check.get_option("name")->type_name("NAME-OR-FILE");
  check.footer(
      "\nThe first line is the verdict; exit code 0: it would load, 3: it would be refused, for the reason shown.\n"
      "\nExample:\n  h3ctl adapters check style.safetensors && h3ctl adapters upload style style.safetensors");
  AddAdaptersUpload(command, invocation);
  AddAdaptersSet(command, invocation);
  command.footer(
      "\nExamples:\n  h3ctl adapters list\n  h3ctl adapters check style.safetensors\n"
      "  h3ctl adapters upload style style.safetensors\n  h3ctl adapters set style --alpha 8\n  h3ctl adapters load style");
}

void AddPresets(CLI::App& app, Invocation& invocation) {
  CLI::App& command = *app.add_subcommand("presets", "Stacks that the server keeps under a name, for --preset");
  command.require_subcommand(1);
  CLI::App& list = *command.add_subcommand("list", "Names, revisions and stacks");
  list.footer("\nExample:\n  h3ctl presets list");
  list.callback([&invocation] { invocation.run = RunPresetsList; });

  CLI::App& set = *command.add_subcommand("set", "Create a preset, or replace it");
  const auto flags = std::make_shared<PresetSetFlags>();
  set.add_option("name", flags->name, kPresetName)->required()->type_name("NAME");
  set.add_option("--lora", flags->lora, LoraHelp())->required()->allow_extra_args(false)->type_name("SPEC");
  set.add_option("--expected-revision", flags->expected_revision,
                 "Replace this revision only (0: only create), so that nobody else's change is lost")
      ->check(CLI::NonNegativeNumber)
      ->type_name("N");
  set.footer(
      "\nThe preset keeps the digest of each adapter. When a name leads to another file later, requests with the preset are "
      "refused (ADAPTER_CHANGED) until it is set again; h3ctl presets get shows how.\n"
      "\nExample:\n  h3ctl presets set anime --lora turbo=1 --lora style=0.6,audio=0");
  set.callback([flags, &invocation] { invocation.run = [flags](Context& context) { return RunPresetsSet(*flags, context); }; });

  AddNamed(command, invocation, "get", "A preset's stack, as --lora options that can be pasted, with digests", kPresetName,
           RunPresetsGet)
      .footer("\nExample:\n  h3ctl presets get anime");
  AddNamed(command, invocation, "remove", "Forget a preset; its adapters stay", kPresetName, RunPresetsRemove)
      .footer("\nExample:\n  h3ctl presets remove anime");
  command.footer(
      "\nExamples:\n  h3ctl presets set anime --lora turbo=1 --lora style=0.6,audio=0\n"
      "  h3ctl generate --preset anime --request in.safetensors --evaluations 8 --output out.safetensors");
}

void AddOperations(CLI::App& app, Invocation& invocation) {
  app.add_subcommand("model", "What is served: geometry, partition, types, fingerprint")->callback([&invocation] {
    invocation.run = RunModel;
  });
  app.add_subcommand("status", "Queue and workers")->callback([&invocation] { invocation.run = RunStatus; });
  CLI::App& memory = *app.add_subcommand("memory", "Who owns every byte of the devices");
  const auto watch = std::make_shared<bool>(false);
  memory.add_flag("--watch", *watch, "Again every second until Ctrl-C: a live view on a terminal, else one JSON object a line");
  memory.callback([watch, &invocation] { invocation.run = [watch](Context& context) { return RunMemory(*watch, context); }; });
}

void AddInspect(CLI::App& app, Invocation& invocation) {
  CLI::App& command = *app.add_subcommand("inspect", "What a checkpoint or adapter file is, from its headers; needs no server");
  const auto flags = std::make_shared<InspectFlags>();
  command.add_option("path", flags->path, "Checkpoint (file or directory) or adapter (file or PEFT directory)")
      ->required()
      ->type_name("PATH");
  command.add_option("--model", flags->model, "Checkpoint to measure an adapter against [the released H3]")
      ->type_name("CHECKPOINT");
  command.footer("\nExamples:\n  h3ctl inspect transformer/\n  h3ctl inspect style.safetensors --model h3-pruned.safetensors");
  command.callback([flags, &invocation] {
    invocation.run = [flags](Context& context) { return RunInspect(*flags, context.json, context.out); };
  });
}

void AddPlan(CLI::App& app, Invocation& invocation) {
  CLI::App& command =
      *app.add_subcommand("plan", "What a request would take on a device, from the headers of files alone; needs no server");
  const auto flags = std::make_shared<PlanFlags>();
  command.add_option("--model", flags->model, "Checkpoint (file or directory)")->required()->type_name("PATH");
  command
      .add_option("--lora", flags->lora,
                  absl::StrCat("An adapter of the stack; repeat it for more, in order. SPEC is\n", kLoraSpecGrammar,
                               "\nwith NAME a file of this machine (or a PEFT directory)"))
      ->allow_extra_args(false)
      ->type_name("SPEC");
  command.add_option("--video", flags->video, "Pixels and frames: multiples of 32, frames 17k+5 at 24 a second")
      ->capture_default_str()
      ->type_name("WxHxFRAMES");
  command.add_option("--text-tokens", flags->text_tokens, "Tokens of the prompt's embedding")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str()
      ->type_name("N");
  command.add_option("--evaluations", flags->evaluations, "Model evaluations of the run")
      ->check(CLI::Range(1, 100000))
      ->capture_default_str()
      ->type_name("N");
  command.add_option("--dtype", flags->dtype, "Type of the block stack: auto (as stored), float32, bfloat16 or float16")
      ->check(CLI::IsMember({"auto", "float32", "bfloat16", "float16"}))
      ->capture_default_str()
      ->type_name("D");
  command.add_option("--adaln-residency", flags->adaln_residency, "Where a full model's AdaLN weights stay: device or host")
      ->check(CLI::IsMember({"device", "host"}))
      ->capture_default_str()
      ->type_name("WHERE");
  command.add_option("--workspace", flags->workspace, "What the temporaries of a tile of rows may take, as of the server")
      ->capture_default_str()
      ->type_name("BYTES");
  command.add_option("--device-memory", flags->device_memory, "Memory of the device, such as 80GiB; says whether it fits")
      ->type_name("BYTES");
  command
      .add_option("--resident", flags->resident,
                  "For the comparison: part of the weights that a merging runtime keeps on the device, the rest offloaded")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str()
      ->type_name("0..1");
  command.footer(
      "\nComputed from shapes, as the server's admission does. An accelerator's runtime context is not in it (a few hundred MiB); "
      "1/50 of the device's memory is kept free.\n"
      "\nExamples:\n"
      "  h3ctl plan --model h3-pruned.safetensors --lora turbo.safetensors=1 --lora style.safetensors=0.6 --video 1280x704x124\n"
      "  h3ctl plan --model transformer/ --adaln-residency host --device-memory 80GiB --json | jq .fits");
  command.callback([flags, &invocation] {
    invocation.run = [flags](Context& context) { return RunPlan(*flags, context.json, context.out); };
  });
}

}  // namespace

absl::StatusOr<Invocation> ParseCommandLine(int argc, const char* const* argv) {
  Invocation invocation;
  invocation.server = kDefaultServer;
  CLI::App app("h3ctl: the command-line client of H3 Serve, MiniMax-H3 with adapters that are stacked at run time", "h3ctl");
  app.set_version_flag("--version", "h3ctl " H3_VERSION);
  app.add_option("--server", invocation.server, "HOST:PORT or unix:PATH of h3-scheduler")
      ->envname("H3_SERVER")
      ->capture_default_str();
  app.add_flag("--json", invocation.json, "Answers as JSON on stdout, errors as JSON on stderr");
  app.require_subcommand(1);
  app.fallthrough();
  app.footer(kAppFooter);
  AddGenerate(app, invocation);
  AddEvaluate(app, invocation);
  AddAdapters(app, invocation);
  AddPresets(app, invocation);
  AddOperations(app, invocation);
  AddInspect(app, invocation);
  AddPlan(app, invocation);
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {  // --help and --version arrive here too.
    std::ostringstream out, err;
    if (app.exit(error, out, err) == 0) {
      invocation.help = absl::StrCat(absl::StripTrailingAsciiWhitespace(out.str()), "\n");
      return invocation;
    }
    const std::vector<std::string> extras = app.remaining();
    if (app.get_subcommands().empty() && !extras.empty()) {
      return UsageError(absl::StrCat("there is no command ", extras.front(), "; h3ctl --help shows them"));
    }
    return UsageError(absl::StrCat(error.what(), "; --help shows what there is"));
  }
  return invocation;
}

}  // namespace h3::ctl
