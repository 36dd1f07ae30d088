#include "client/cli/evaluate_command.h"

#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/exit_code.h"
#include "client/cli/generate_view.h"
#include "client/cli/lora_spec.h"
#include "client/cli/output_file.h"
#include "client/cli/proto_json.h"
#include "server/base/status_macros.h"

namespace h3::ctl {

absl::StatusOr<v1::Evaluation> MakeEvaluation(const EvaluateFlags& flags, const RequestFile& request) {
  if (flags.video_t.has_value() != flags.audio_t.has_value()) return UsageError("--video-t and --audio-t go together");
  if (flags.video_t.has_value() && flags.sigma.has_value())
    return UsageError("give --sigma, or --video-t and --audio-t, not both");
  v1::Evaluation evaluation;
  if (flags.video_t.has_value()) {
    evaluation.mutable_timesteps()->set_video(*flags.video_t);
    evaluation.mutable_timesteps()->set_audio(*flags.audio_t);
  } else if (flags.sigma.has_value()) {
    evaluation.set_sigma(*flags.sigma);
  } else if (request.base_sigma().has_value()) {
    evaluation.set_base_sigma(*request.base_sigma());
  } else {
    return UsageError("the request file's layout has no base_sigma; give --sigma S, or --video-t T and --audio-t T");
  }
  const auto video_shift = flags.video_shift.has_value() ? flags.video_shift : request.video_shift();
  const auto audio_shift = flags.audio_shift.has_value() ? flags.audio_shift : request.audio_shift();
  if (video_shift.has_value()) evaluation.set_video_shift(*video_shift);
  if (audio_shift.has_value()) evaluation.set_audio_shift(*audio_shift);
  return evaluation;
}

absl::Status RunEvaluate(const EvaluateFlags& flags, Context& context) {
  H3_RETURN_IF_ERROR(CheckOutputPath(flags.output));
  H3_ASSIGN_OR_RETURN(const RequestFile request, RequestFile::Open(flags.request));
  H3_ASSIGN_OR_RETURN(v1::Evaluation evaluation, MakeEvaluation(flags, request));
  v1::EvaluateHeader header;
  *header.mutable_layout() = request.layout();
  for (const std::string& spec : flags.lora) {
    H3_ASSIGN_OR_RETURN(*header.add_stack(), ParseLoraSpec(spec));
  }
  header.set_preset(flags.preset);
  header.set_include_condition_rows(true);

  H3_ASSIGN_OR_RETURN(const std::unique_ptr<client::Session> session,
                      context.client.OpenSession(std::move(header), request.conditions(), {.cancel = &context.interrupt}));
  H3_ASSIGN_OR_RETURN(const client::EvaluationOutput output, session->Evaluate(std::move(evaluation), request.targets()));
  H3_RETURN_IF_ERROR(session->Close());
  H3_RETURN_IF_ERROR(WriteSafetensors(flags.output, output.tensors));

  const Context shown = context.Beside(flags.output);
  if (shown.json || !shown.terminal) {
    shown.out << EventJson("accepted", session->accepted()) << "\n"
                << EventJson("ready", session->ready()) << "\n"
                << EventJson("completed", output.result, "output", flags.output) << std::endl;
  } else {
    shown.out << StackText(session->accepted()) << RatiosText(session->ready().stack())
                << absl::StrFormat("evaluated at t = %g (video), %g (audio) in %.3f s\nwritten: %s\n",
                                   output.result.timesteps().video(), output.result.timesteps().audio(),
                                   output.result.seconds(), flags.output)
                << std::flush;
  }
  return absl::OkStatus();
}

}  // namespace h3::ctl
