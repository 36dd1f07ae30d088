#include "server/format/layout.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"

namespace h3 {
namespace {

constexpr double kFrameUnit = 5.0 / 3.0;                   // Rotary time of one pixel frame at 24 fps, in audio latents.
constexpr std::array<int, 5> kFramesPerLatent = {1, 4, 4, 4, 4};
constexpr double kSpatialScale = 32.0;
constexpr float kVisualConditionT = 0.999f;
constexpr uint8_t kVideoTag = 0, kAudioTag = 2;

absl::Status BadLayout(absl::string_view what) { return RefuseArgument(reason::kBadLayout, absl::StrCat("layout: ", what)); }

double FrameSpan(int64_t frame) { return kFrameUnit * kFramesPerLatent[static_cast<size_t>(frame % 5)]; }

// One axis of a latent frame, patch 2: the order of operations of numpy.linspace without its end point, to the last bit.
std::vector<double> SpatialAxis(int64_t dim, double sqrt_area) {
  const double ratio = static_cast<double>(dim) / sqrt_area;
  const double left = (1.0 - ratio) / 2.0;
  const int64_t points = dim / 2;
  const double step = ((left + ratio) - left) / static_cast<double>(points);
  std::vector<double> axis;
  for (int64_t i = 0; i < points; ++i) axis.push_back((static_cast<double>(i) * step + left) * kSpatialScale);
  return axis;
}

// numpy's pairwise summation: how the released model computes the time of the last keyframe.
double PairwiseSum(const double* values, int64_t count) {
  if (count < 8) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += values[i];
    return sum;
  }
  if (count <= 128) {
    std::array<double, 8> lanes;
    std::copy_n(values, 8, lanes.begin());
    int64_t i = 8;
    for (; i < count - count % 8; i += 8) {
      for (size_t lane = 0; lane < 8; ++lane) lanes[lane] += values[i + static_cast<int64_t>(lane)];
    }
    double sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
    for (; i < count; ++i) sum += values[i];
    return sum;
  }
  const int64_t half = count / 2 - count / 2 % 8;
  return PairwiseSum(values, half) + PairwiseSum(values + half, count - half);
}

class Packer {
 public:
  explicit Packer(const Layout& layout) : layout_(layout) {}

  Packing Run(const std::vector<int64_t>& text_tags) {
    AddText(text_tags);
    const Frame target = MakeFrame(layout_.latent_height, layout_.latent_width);
    const double media_start = static_cast<double>(layout_.text_tokens);
    for (const Keyframe keyframe : layout_.keyframes) {
      const double time = keyframe == Keyframe::kFirst ? media_start : media_start + TotalSpan(layout_.latent_frames) - kFrameUnit;
      AddVisualCondition({1, layout_.latent_height, layout_.latent_width}, target, {time});
    }
    double clock = media_start;
    for (const Reference& reference : layout_.references) clock = AddReference(reference, target, clock);
    AddAudio(layout_.audio_latents, target, clock, false);
    AddVideo(layout_.latent_frames, target, FrameTimes(layout_.latent_frames, clock), false);
    FinishIndices();
    return std::move(packing_);
  }

 private:
  struct Frame {
    std::vector<double> height, width;
  };

  static Frame MakeFrame(int64_t height, int64_t width) {
    const double sqrt_area = std::sqrt(static_cast<double>(height * width));
    return {SpatialAxis(height, sqrt_area), SpatialAxis(width, sqrt_area)};
  }

  static std::vector<double> FrameTimes(int64_t frames, double origin) {
    std::vector<double> times;
    double offset = 0;
    for (int64_t i = 0; i < frames; ++i) {
      times.push_back(origin + offset);
      offset += FrameSpan(i);
    }
    return times;
  }

  static double TotalSpan(int64_t frames) {
    std::vector<double> spans;
    for (int64_t i = 0; i < frames; ++i) spans.push_back(FrameSpan(i));
    return PairwiseSum(spans.data(), frames);
  }

  void AddText(const std::vector<int64_t>& tags) {
    Open(Stream::kText, false, layout_.text_tokens);
    for (int64_t i = 0; i < layout_.text_tokens; ++i) {
      AddRow({static_cast<double>(i), 0, 0}, static_cast<uint8_t>(tags[static_cast<size_t>(i)]), TimestepRole::kVideo);
    }
  }

  void AddVisualCondition(const ConditionShape& shape, const Frame& frame, const std::vector<double>& times) {
    packing_.visual_conditions.push_back(shape);
    AddVideo(shape.frames, frame, times, true);
  }

  // Returns the clock after it.
  double AddReference(const Reference& reference, const Frame& target, double clock) {
    const int64_t frames = reference.latent_frames, audio = reference.audio_latents;
    if (reference.kind == ReferenceKind::kAudio) {
      packing_.audio_conditions.push_back({.audio_latents = audio});
      AddAudio(audio, target, clock, true);
      return clock + static_cast<double>(audio);
    }
    const Frame own = MakeFrame(reference.latent_height, reference.latent_width);
    const ConditionShape shape{frames, reference.latent_height, reference.latent_width, 0};
    if (reference.kind == ReferenceKind::kImage) {
      AddVisualCondition(shape, own, std::vector<double>(static_cast<size_t>(frames), clock));
      return clock + 1.0;
    }
    if (audio > 0) {
      packing_.audio_conditions.push_back({.audio_latents = audio});
      AddAudio(audio, own, clock, true);
    }
    AddVisualCondition(shape, own, FrameTimes(frames, clock));
    double span = 0;  // One after the other here, unlike TotalSpan: the released model does both.
    for (int64_t i = 0; i < frames; ++i) span += FrameSpan(i);
    return clock + std::max(static_cast<double>(audio), span);
  }

  // Channel-major stereo: the first channel at the first value of the width axis, the second at the last.
  void AddAudio(int64_t latents, const Frame& frame, double clock, bool condition) {
    Open(Stream::kAudio, condition, 2 * latents);
    for (const double width : {frame.width.front(), frame.width.back()}) {
      for (int64_t i = 0; i < latents; ++i) {
        AddRow({clock + static_cast<double>(i), 0, width}, kAudioTag,
               condition ? TimestepRole::kAudioCondition : TimestepRole::kAudio);
      }
    }
  }

  void AddVideo(int64_t frames, const Frame& frame, const std::vector<double>& times, bool condition) {
    Open(Stream::kVideo, condition, frames * static_cast<int64_t>(frame.height.size() * frame.width.size()));
    for (const double time : times) {
      for (const double height : frame.height) {
        for (const double width : frame.width) {
          AddRow({time, height, width}, kVideoTag, condition ? TimestepRole::kVisualCondition : TimestepRole::kVideo);
        }
      }
    }
  }

  void Open(Stream stream, bool condition, int64_t rows) {
    int64_t& total = stream == Stream::kText ? packing_.text_rows
                     : stream == Stream::kVideo ? packing_.video_rows
                                                : packing_.audio_rows;
    packing_.segments.push_back({stream, condition, packing_.rows, rows, total});
    total += rows;
    if (condition) (stream == Stream::kVideo ? packing_.condition_video_rows : packing_.condition_audio_rows) += rows;
    packing_.rows += rows;
  }

  void AddRow(std::array<double, 3> position, uint8_t tag, TimestepRole role) {
    packing_.positions.push_back(position);
    packing_.tags.push_back(tag);
    packing_.timestep_roles.push_back(role);
  }

  void FinishIndices() {
    for (const Segment& segment : packing_.segments) {
      std::vector<int64_t>& indices = segment.stream == Stream::kText ? packing_.text_indices
                                      : segment.stream == Stream::kVideo ? packing_.video_indices
                                                                         : packing_.audio_indices;
      for (int64_t i = 0; i < segment.rows; ++i) indices.push_back(segment.begin + i);
    }
  }

  const Layout& layout_;
  Packing packing_;
};

absl::Status CheckVideoSize(absl::string_view what, int64_t frames, int64_t height, int64_t width) {
  if (frames < 1) return BadLayout(absl::StrCat(what, " has ", frames, " latent frames; at least 1 is needed"));
  if (height < 2 || width < 2 || height % 2 != 0 || width % 2 != 0) {
    return BadLayout(absl::StrCat(what, " is ", height, " x ", width, " latents; both must be even and at least 2"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::string_view TaskName(Task task) {
  switch (task) {
    case Task::kT2va: return "t2va";
    case Task::kFl2va: return "fl2va";
    case Task::kRef2va: return "ref2va";
  }
  return "unknown";
}

Task TaskOf(const Layout& layout) {
  if (!layout.references.empty()) return Task::kRef2va;
  return layout.keyframes.empty() ? Task::kT2va : Task::kFl2va;
}

double PackedRows(const Layout& layout) {
  const auto video_rows = [](int64_t frames, int64_t height, int64_t width) {
    return static_cast<double>(frames) * static_cast<double>(height) * static_cast<double>(width) / 4;
  };
  double rows = static_cast<double>(layout.text_tokens) + 2.0 * static_cast<double>(layout.audio_latents) +
                video_rows(layout.latent_frames, layout.latent_height, layout.latent_width) +
                static_cast<double>(layout.keyframes.size()) * video_rows(1, layout.latent_height, layout.latent_width);
  for (const Reference& r : layout.references) {
    rows += video_rows(r.latent_frames, r.latent_height, r.latent_width) + 2.0 * static_cast<double>(r.audio_latents);
  }
  return rows;
}

absl::Status CheckLayout(const Layout& layout, int64_t max_rows) {
  if (!layout.keyframes.empty() && !layout.references.empty()) return BadLayout("keyframes and references exclude each other");
  if (layout.keyframes.size() > 2 || (layout.keyframes.size() == 2 && layout.keyframes[0] == layout.keyframes[1])) {
    return BadLayout("a keyframe is given twice");
  }
  if (layout.text_tokens < 1) return BadLayout(absl::StrCat(layout.text_tokens, " text tokens; at least 1 is needed"));
  if (layout.audio_latents < 1) return BadLayout(absl::StrCat(layout.audio_latents, " audio latents; at least 1 is needed"));
  H3_RETURN_IF_ERROR(CheckVideoSize("the target", layout.latent_frames, layout.latent_height, layout.latent_width));
  for (size_t i = 0; i < layout.references.size(); ++i) {
    const Reference& r = layout.references[i];
    const std::string what = absl::StrCat("references[", i, "]");
    if (r.audio_latents < 0 || (r.kind == ReferenceKind::kAudio && r.audio_latents < 1)) {
      return BadLayout(absl::StrCat(what, " has ", r.audio_latents, " audio latents"));
    }
    if (r.kind == ReferenceKind::kImage && (r.latent_frames != 1 || r.audio_latents != 0)) {
      return BadLayout(absl::StrCat(what, " is an image: one latent frame, no sound"));
    }
    if (r.kind == ReferenceKind::kAudio) {
      if (r.latent_frames != 0 || r.latent_height != 0 || r.latent_width != 0) return BadLayout(absl::StrCat(what, " is a sound: no frames"));
    } else {
      H3_RETURN_IF_ERROR(CheckVideoSize(what, r.latent_frames, r.latent_height, r.latent_width));
    }
  }
  const double rows = PackedRows(layout);
  if (rows > static_cast<double>(max_rows)) {
    return BadLayout(absl::StrCat("makes ", rows, " packed rows; at most ", max_rows, " are possible"));
  }
  return absl::OkStatus();
}

absl::Status CheckPartition(Task task, Partition partition) {
  const bool references = task == Task::kRef2va;
  if (partition == Partition::kUnknown || (partition == Partition::kRef2va) == references) return absl::OkStatus();
  return Refuse(absl::StatusCode::kFailedPrecondition, reason::kBaseMismatch,
                absl::StrCat("this base is the ", PartitionName(partition), " partition and does not serve ", TaskName(task),
                             "; send it to a ", references ? "ref2va" : "fl2va", " base"),
                {{"task", std::string(TaskName(task))}, {"partition", std::string(PartitionName(partition))}});
}

absl::StatusOr<Packing> Pack(const Layout& layout, const std::vector<int64_t>& text_tags) {
  if (static_cast<int64_t>(text_tags.size()) != layout.text_tokens) {
    return RefuseArgument(reason::kBadTensor, absl::StrCat("text_token_tags has ", text_tags.size(), " values for ", layout.text_tokens, " text tokens"),
                          {{"tensor", "text_token_tags"}});
  }
  for (const int64_t tag : text_tags) {
    if (tag != 0 && tag != 1) {
      return RefuseArgument(reason::kBadTensor, absl::StrCat("text_token_tags holds ", tag, "; only 0 (vision block) and 1 (text) are tags of text rows"),
                            {{"tensor", "text_token_tags"}});
    }
  }
  return Packer(layout).Run(text_tags);
}

TimestepRows AssignTimesteps(const Packing& packing, float t_video, float t_audio) {
  // By role: a timestep is one of four, however many rows there are.
  const std::array<float, kTimestepRoles> timestep = {t_video, t_audio, std::max(t_video, kVisualConditionT), 1.0f};
  std::array<bool, kTimestepRoles> used{};
  for (const TimestepRole role : packing.timestep_roles) used[static_cast<size_t>(role)] = true;
  TimestepRows result;
  for (size_t role = 0; role < kTimestepRoles; ++role) {
    if (used[role]) result.timesteps.push_back(timestep[role]);
  }
  std::sort(result.timesteps.begin(), result.timesteps.end());
  result.timesteps.erase(std::unique(result.timesteps.begin(), result.timesteps.end()), result.timesteps.end());
  std::array<int64_t, kTimestepRoles> index{};
  for (size_t role = 0; role < kTimestepRoles; ++role) {
    index[role] = std::lower_bound(result.timesteps.begin(), result.timesteps.end(), timestep[role]) - result.timesteps.begin();
  }
  result.row_index.reserve(packing.timestep_roles.size());
  for (const TimestepRole role : packing.timestep_roles) result.row_index.push_back(index[static_cast<size_t>(role)]);
  return result;
}

namespace {

// Calls copy(index in the latent [C, T, H, W], index in the rows) for every element. Row (t, h/2, w/2), column (c, h%2, w%2).
template <typename F>
void ForEachPatchElement(int64_t channels, int64_t frames, int64_t height, int64_t width, F&& copy) {
  int64_t row_element = 0;
  for (int64_t t = 0; t < frames; ++t) {
    for (int64_t h = 0; h < height; h += 2) {
      for (int64_t w = 0; w < width; w += 2) {
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t p = 0; p < 2; ++p) {
            for (int64_t q = 0; q < 2; ++q) copy(((c * frames + t) * height + h + p) * width + w + q, row_element++);
          }
        }
      }
    }
  }
}

}  // namespace

void PatchifyVideo(const float* latent, int64_t channels, int64_t frames, int64_t height, int64_t width, float* rows) {
  ForEachPatchElement(channels, frames, height, width, [&](int64_t l, int64_t r) { rows[r] = latent[l]; });
}

void UnpatchifyVideo(const float* rows, int64_t channels, int64_t frames, int64_t height, int64_t width, float* latent) {
  ForEachPatchElement(channels, frames, height, width, [&](int64_t l, int64_t r) { latent[l] = rows[r]; });
}

}  // namespace h3
