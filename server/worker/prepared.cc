#include "server/worker/prepared.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "server/vram/ledger.h"
#include "server/worker/request_tensors.h"

namespace h3 {
namespace {

// Longer than the longest released clip (about 109,000 rows) by enough that nobody's longer one is refused; index arithmetic on
// [rows, 2 ffn] stays far inside int64.
constexpr int64_t kMaxRows = 1'000'000;

}  // namespace

at::Tensor PatchifyLatent(const at::Tensor& latent, c10::Device device) {
  const at::Tensor host = latent.to(at::kCPU).contiguous();
  const int64_t c = host.size(1), t = host.size(2), h = host.size(3), w = host.size(4);
  at::Tensor rows = at::empty({t * (h / 2) * (w / 2), 4 * c}, at::kFloat);
  PatchifyVideo(host.const_data_ptr<float>(), c, t, h, w, rows.data_ptr<float>());
  return rows.to(device);
}

absl::StatusOr<std::unique_ptr<Prepared>> Prepared::Make(H3Engine& engine, Conditions conditions, int64_t evaluations) {
  const OwnerScope owner(Owner::kActivations);
  const ResidentModel& model = engine.resident();
  auto prepared = absl::WrapUnique(new Prepared(engine, std::move(conditions)));
  const Conditions& given = prepared->conditions_;
  const Geometry& g = model.geometry();
  H3_RETURN_IF_ERROR(CheckLayout(given.layout, kMaxRows));
  H3_RETURN_IF_ERROR(CheckPartition(TaskOf(given.layout), model.checkpoint().partition));

  RequestTensors tensors(given.tensors, model.device());
  H3_ASSIGN_OR_RETURN(const std::vector<int64_t> tags, tensors.Integers("text_token_tags", given.layout.text_tokens));
  H3_ASSIGN_OR_RETURN(Packing packing, Pack(given.layout, tags));
  const absl::Time start = absl::Now();
  auto stack = Stack::Build(model, engine.store(), given.stack, [&](const Stack& pinned) -> absl::Status {
    H3_ASSIGN_OR_RETURN(prepared->admitted_, engine.Admit(pinned, given.layout, evaluations));
    return absl::OkStatus();
  });
  engine.OnStack(given.stack, stack.ok() ? stack->get() : nullptr, absl::Now() - start);
  if (!stack.ok()) return stack.status();
  prepared->stack_ = *std::move(stack);
  H3_ASSIGN_OR_RETURN(prepared->text_, tensors.Float("text", {given.layout.text_tokens, g.text_width}, at::kFloat));
  prepared->condition_video_ = at::empty({packing.condition_video_rows, 4 * g.video_channels}, prepared->text_.options());
  prepared->condition_audio_ = at::empty({packing.condition_audio_rows, g.audio_channels}, prepared->text_.options());
  int64_t row = 0;
  for (size_t i = 0; i < packing.visual_conditions.size(); ++i) {
    const ConditionShape& c = packing.visual_conditions[i];
    H3_ASSIGN_OR_RETURN(const at::Tensor latent, tensors.Float(absl::StrCat("condition_video.", i),
                                                               {1, g.video_channels, c.frames, c.height, c.width}, at::kFloat));
    const at::Tensor rows = PatchifyLatent(latent, model.device());
    prepared->condition_video_.narrow(0, row, rows.size(0)).copy_(rows);
    row += rows.size(0);
  }
  row = 0;
  for (size_t i = 0; i < packing.audio_conditions.size(); ++i) {
    const int64_t rows = 2 * packing.audio_conditions[i].audio_latents;
    H3_ASSIGN_OR_RETURN(const at::Tensor latent,
                        tensors.Float(absl::StrCat("condition_audio.", i), {rows, g.audio_channels}, at::kFloat));
    prepared->condition_audio_.narrow(0, row, rows).copy_(latent);
    row += rows;
  }
  H3_RETURN_IF_ERROR(tensors.CheckAllUsed());
  prepared->context_ = MakePackedContext(model, std::move(packing));
  prepared->conditions_.tensors.clear();
  return prepared;
}

absl::Status Prepared::PrepareText(const EvaluationPlan& plan, const CancellationToken& cancel) {
  H3_RETURN_IF_ERROR(stack_->Prepare(cancel));
  at::Tensor& stream = text_streams_[stack_->TextKeyOf(plan.index, plan.factors)];
  if (stream.defined()) return absl::OkStatus();
  const OwnerScope owner(Owner::kActivations);
  H3_ASSIGN_OR_RETURN(stream, TextStream(model_, stack_->Program(plan.index, plan.factors), text_, cancel));
  // Merged copies and norms are in place now, and counted as what they are.
  if (text_streams_.size() == 1) admitted_.reservation.Settle(admitted_.in_place);
  return absl::OkStatus();
}

absl::Status Prepared::PrepareModulation(absl::Span<const EvaluationPlan> plans, const CancellationToken& cancel) {
  H3_RETURN_IF_ERROR(stack_->Prepare(cancel));
  modulation_.reset();
  entries_.clear();
  const int64_t most = std::max<int64_t>(1, kModulationGroupBytes / ModulationLineBytes(model_.geometry().blocks, model_.geometry().hidden));
  for (const EvaluationPlan& plan : plans) {
    const StackProgram& program = stack_->Program(plan.index, plan.factors);
    std::vector<ModulationEntry> fresh;
    for (const ModulationPoint& point : AssignPoints(context_.packing, plan.t_video, plan.t_audio).points) {
      const ModulationEntry entry{point, &program};
      if (std::find(entries_.begin(), entries_.end(), entry) == entries_.end()) fresh.push_back(entry);
    }
    if (!entries_.empty() && static_cast<int64_t>(entries_.size() + fresh.size()) > most) break;
    entries_.insert(entries_.end(), fresh.begin(), fresh.end());
  }
  H3_ASSIGN_OR_RETURN(modulation_, ComputeModulation(model_, entries_, &engine_.modulations(), cancel));
  return absl::OkStatus();
}

std::optional<std::vector<int64_t>> Prepared::RowLines(const EvaluationPlan& plan) {
  if (!modulation_.has_value()) return std::nullopt;
  const StackProgram& program = stack_->Program(plan.index, plan.factors);
  const EvaluationPoints points = AssignPoints(context_.packing, plan.t_video, plan.t_audio);
  std::vector<int64_t> lines;
  for (const ModulationPoint& point : points.points) {
    const auto found = std::find(entries_.begin(), entries_.end(), ModulationEntry{point, &program});
    if (found == entries_.end()) return std::nullopt;
    lines.push_back(found - entries_.begin());
  }
  std::vector<int64_t> row_lines;
  row_lines.reserve(points.row_point.size());
  for (const int64_t point : points.row_point) row_lines.push_back(lines[static_cast<size_t>(point)]);
  return row_lines;
}

absl::StatusOr<Velocity> Prepared::Evaluate(absl::Span<const EvaluationPlan> plans, const at::Tensor& video,
                                            const at::Tensor& audio, bool condition_rows, const CancellationToken& cancel) {
  const OwnerScope owner(Owner::kActivations);
  const EvaluationPlan& plan = plans.front();
  H3_RETURN_IF_ERROR(PrepareText(plan, cancel));
  std::optional<std::vector<int64_t>> row_lines = RowLines(plan);
  if (!row_lines.has_value()) {
    H3_RETURN_IF_ERROR(PrepareModulation(plans, cancel));
    row_lines = RowLines(plan);
    H3_CHECK(row_lines.has_value());
  }
  return Forward(model_, context_,
                 {.program = &stack_->Program(plan.index, plan.factors),
                  .text = &text_streams_.at(stack_->TextKeyOf(plan.index, plan.factors)),
                  .video = &video,
                  .audio = &audio,
                  .modulation = &*modulation_,
                  .row_line = at::tensor(*row_lines, at::kLong).to(model_.device()),
                  .condition_rows = condition_rows},
                 cancel);
}

}  // namespace h3
