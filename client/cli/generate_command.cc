#include "client/cli/generate_command.h"

#include <memory>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/exit_code.h"
#include "client/cli/generate_view.h"
#include "client/cli/lora_spec.h"
#include "client/cli/output_file.h"
#include "server/base/status_macros.h"

namespace h3::ctl {

absl::StatusOr<v1::GenerateHeader> MakeGenerateHeader(const GenerateFlags& flags, const RequestFile& request) {
  if (!flags.evaluations.has_value() && flags.sigmas.empty())
    return UsageError("generate needs --evaluations N or --sigmas LIST");
  if (flags.evaluations.has_value() && !flags.sigmas.empty() && *flags.evaluations + 1 != flags.sigmas.size()) {
    return UsageError(absl::StrCat(flags.sigmas.size(), " --sigmas make ", flags.sigmas.size() - 1, " evaluations, not ",
                                   *flags.evaluations));
  }
  if (flags.sigmas.empty() && !flags.audio_sigmas.empty()) return UsageError("--audio-sigmas needs --sigmas");
  v1::GenerateHeader header;
  *header.mutable_layout() = request.layout();
  for (const std::string& spec : flags.lora) {
    H3_ASSIGN_OR_RETURN(*header.add_stack(), ParseLoraSpec(spec));
  }
  header.set_preset(flags.preset);
  v1::Sampling& sampling = *header.mutable_sampling();
  if (flags.noise_from_request) {
    sampling.set_noise_from_request(true);
  } else {
    sampling.set_seed(flags.seed.value());
  }
  if (flags.evaluations.has_value()) sampling.set_evaluations(*flags.evaluations);
  if (flags.schedule == "official") sampling.set_schedule(v1::SCHEDULE_OFFICIAL);
  if (flags.schedule == "normal") sampling.set_schedule(v1::SCHEDULE_NORMAL);
  const auto video_shift = flags.video_shift.has_value() ? flags.video_shift : request.video_shift();
  const auto audio_shift = flags.audio_shift.has_value() ? flags.audio_shift : request.audio_shift();
  if (video_shift.has_value()) sampling.set_video_shift(*video_shift);
  if (audio_shift.has_value()) sampling.set_audio_shift(*audio_shift);
  sampling.mutable_video_sigmas()->Assign(flags.sigmas.begin(), flags.sigmas.end());
  sampling.mutable_audio_sigmas()->Assign(flags.audio_sigmas.begin(), flags.audio_sigmas.end());
  if (flags.priority == "low") header.set_priority(v1::PRIORITY_LOW);
  if (flags.priority == "normal") header.set_priority(v1::PRIORITY_NORMAL);
  if (flags.priority == "high") header.set_priority(v1::PRIORITY_HIGH);
  header.set_request_id(flags.request_id);
  return header;
}

absl::Status RunGenerate(GenerateFlags flags, Context& context) {
  H3_RETURN_IF_ERROR(CheckOutputPath(flags.output));
  H3_ASSIGN_OR_RETURN(const RequestFile request, RequestFile::Open(flags.request));
  const bool draw_seed = !flags.noise_from_request && !flags.seed.has_value();
  if (draw_seed) flags.seed = std::random_device()();
  H3_ASSIGN_OR_RETURN(v1::GenerateHeader header, MakeGenerateHeader(flags, request));

  std::vector<client::TensorView> tensors = request.conditions();
  if (flags.noise_from_request) tensors.insert(tensors.end(), request.targets().begin(), request.targets().end());

  const Context shown = context.Beside(flags.output);
  const std::unique_ptr<GenerateView> view =
      shown.terminal && !shown.json ? MakeTerminalView(shown.out) : MakeJsonView(shown.out);
  if (draw_seed) view->OnSeed(*flags.seed);
  client::CallOptions options = {.cancel = &context.interrupt};
  if (flags.deadline_seconds.has_value()) options.timeout = absl::Seconds(*flags.deadline_seconds);
  const absl::StatusOr<client::GenerateResult> result =
      context.client.Generate(std::move(header), tensors,
                              {.accepted = [&](const v1::Accepted& accepted) { view->OnAccepted(accepted); },
                               .progress = [&](const v1::Progress& progress) { view->OnProgress(progress); },
                               .result = [&](const v1::ResultHeader& tensors) { view->OnResult(tensors); }},
                              options);
  absl::Status status = result.status();
  if (status.ok()) status = WriteSafetensors(flags.output, result->tensors);
  if (!status.ok()) {
    view->OnFailed();
    return status;
  }
  view->OnCompleted(result->completed, flags.output);
  return absl::OkStatus();
}

}  // namespace h3::ctl
