#include "server/model/forward.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/tensor.h>

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "server/base/status_macros.h"
#include "server/model/block.h"
#include "server/nn/norm.h"
#include "server/vram/ledger.h"

namespace h3 {
namespace {

constexpr int kVideo = 0, kText = 1, kAudio = 2;  // Modalities as rows are tagged.

at::Tensor Indices(const std::vector<int64_t>& values, c10::Device device) { return at::tensor(values, at::kLong).to(device); }

BoundSite Bind(const ResidentModel& model, const StackProgram& program, const std::string& name, c10::ScalarType compute) {
  const int site = model.SiteIndex(name);
  return BoundSite(model.linear(site), program.sites[static_cast<size_t>(site)], compute);
}

// Projects the rows of one stream into their places of the packed sequence.
void Embed(const ResidentModel& model, const StackProgram& program, const Packing& packing, Stream stream, const std::string& site,
           int modality, const at::Tensor& rows, at::Tensor& x) {
  const BoundSite bound = Bind(model, program, site, at::kFloat);
  const OwnerScope owner(Owner::kWorkspace);
  const int64_t tile = model.RowTile(x.size(0));
  for (const Segment& segment : packing.segments) {
    if (segment.stream != stream) continue;
    for (int64_t row = 0; row < segment.rows; row += tile) {
      const int64_t count = std::min(tile, segment.rows - row);
      x.narrow(0, segment.begin + row, count)
          .copy_(bound.Apply(rows.narrow(0, segment.stream_begin + row, count), {.uniform = modality}));
    }
  }
}

// The head of one stream: final norm, modulation, projection, for the segments that are wanted.
at::Tensor Head(const ResidentModel& model, const PackedContext& context, const EvaluationInput& input, Stream stream,
                const std::string& site, int modality, const at::Tensor& x) {
  const Packing& packing = context.packing;
  const bool video = stream == Stream::kVideo;
  const int64_t conditions = video ? packing.condition_video_rows : packing.condition_audio_rows;
  const int64_t first = input.condition_rows ? 0 : conditions;
  const BoundSite bound = Bind(model, *input.program, site, at::kFloat);
  const at::Tensor& modulation = input.modulation->final;
  at::Tensor out =
      at::empty({(video ? packing.video_rows : packing.audio_rows) - first, bound.out()}, x.options().dtype(at::kFloat));
  const OwnerScope owner(Owner::kWorkspace);
  const int64_t tile = model.RowTile(x.size(0));
  for (const Segment& segment : packing.segments) {
    if (segment.stream != stream || (segment.condition && !input.condition_rows)) continue;
    for (int64_t row = 0; row < segment.rows; row += tile) {
      const int64_t count = std::min(tile, segment.rows - row);
      const int64_t begin = segment.begin + row;
      at::Tensor value = NormWithStack(model, *input.program, "final_layer.norm.weight",
                                       RowModality{.tags = context.tags.narrow(0, begin, count)}, x.narrow(0, begin, count));
      Modulate(value, modulation.select(1, 1), modulation.select(1, 0), input.row_line.narrow(0, begin, count));
      at::Tensor part = out.narrow(0, segment.stream_begin + row - first, count);
      bound.Apply(value, {.uniform = modality}, part);
    }
  }
  return out;
}

}  // namespace

absl::StatusOr<at::Tensor> TextStream(const ResidentModel& model, const StackProgram& program, const at::Tensor& text,
                                      const CancellationToken& cancel) {
  const OwnerScope owner(Owner::kActivations);
  const RowModality modality{.uniform = kText};
  const BoundSite condition = Bind(model, program, "condition_proj", model.linear(model.SiteIndex("condition_proj")).dtype());
  at::Tensor x;
  {
    const at::Tensor projected =
        condition.Apply(text.to(model.linear(model.SiteIndex("condition_proj")).dtype()), modality);
    x = at::empty(projected.sizes(), projected.options().dtype(model.compute()));
    x.copy_(projected);
  }
  for (int64_t block = 0; block < model.geometry().refiner_blocks; ++block) {
    H3_RETURN_IF_ERROR(cancel.Check(absl::StrCat("text stream, block ", block)));
    ApplyBlock(model, absl::StrCat("token_refiner.blocks.", block), program, {.modality = modality}, {}, x);
  }
  return NormWithStack(model, program, "token_refiner.final_norm.weight", modality, x).to(model.compute());
}

PackedContext MakePackedContext(const ResidentModel& model, Packing packing) {
  const OwnerScope owner(Owner::kActivations);
  PackedContext context;
  context.tags = Indices(std::vector<int64_t>(packing.tags.begin(), packing.tags.end()), model.device());
  context.rotary = MakeRotaryTable(packing.positions, model.checkpoint().rope_inv_freq, model.device());
  context.packing = std::move(packing);
  return context;
}

EvaluationPoints AssignPoints(const Packing& packing, float t_video, float t_audio) {
  const TimestepRows timesteps = AssignTimesteps(packing, t_video, t_audio);
  EvaluationPoints result;
  result.row_point.reserve(packing.tags.size());
  std::vector<std::array<int64_t, kModalities>> point_of(timesteps.timesteps.size(), {-1, -1, -1});
  for (size_t row = 0; row < packing.tags.size(); ++row) {
    const auto timestep = static_cast<size_t>(timesteps.row_index[row]);
    int64_t& point = point_of[timestep][packing.tags[row]];
    if (point < 0) {
      point = static_cast<int64_t>(result.points.size());
      result.points.push_back({timesteps.timesteps[timestep], packing.tags[row]});
    }
    result.row_point.push_back(point);
  }
  return result;
}

absl::StatusOr<Velocity> Forward(const ResidentModel& model, const PackedContext& context, const EvaluationInput& input,
                                 const CancellationToken& cancel) {
  const OwnerScope owner(Owner::kActivations);
  const Packing& packing = context.packing;
  const StackProgram& program = *input.program;
  at::Tensor x = at::empty({packing.rows, model.geometry().hidden},
                           at::TensorOptions().device(model.device()).dtype(model.compute()));
  for (const Segment& segment : packing.segments) {
    if (segment.stream != Stream::kText) continue;
    x.narrow(0, segment.begin, segment.rows).copy_(input.text->narrow(0, segment.stream_begin, segment.rows));
  }
  Embed(model, program, packing, Stream::kVideo, "video_patch_proj", kVideo, *input.video, x);
  Embed(model, program, packing, Stream::kAudio, "audio_patch_proj", kAudio, *input.audio, x);

  const RowContext rows{.modality = {.tags = context.tags}, .rotary = &context.rotary, .pair = input.row_line};
  for (int64_t block = 0; block < model.geometry().blocks; ++block) {
    H3_RETURN_IF_ERROR(cancel.Check(absl::StrCat("block ", block)));
    ApplyBlock(model, absl::StrCat("blocks.", block), program, rows, input.modulation->blocks[static_cast<size_t>(block)], x);
  }
  return Velocity{Head(model, context, input, Stream::kVideo, "final_layer.video_out", kVideo, x),
                  Head(model, context, input, Stream::kAudio, "final_layer.audio_out", kAudio, x)};
}

}  // namespace h3
