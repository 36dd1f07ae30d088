// Packing: one sequence of text, condition and target rows, with positions, tags and timestep rows, all computed from the
// logical layout. [text | keyframes | target audio | target video], or [text | references in request order | target audio |
// target video] where a video's soundtrack stands just before its video rows. Source: h3-format.md section 2; golden/inputs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/format/checkpoint.h"
#include "server/format/geometry.h"

namespace h3 {

enum class Task { kT2va, kFl2va, kRef2va };
absl::string_view TaskName(Task task);  // "t2va", "fl2va", "ref2va"

enum class Keyframe { kFirst, kLast };
enum class ReferenceKind { kImage, kVideo, kAudio };

struct Reference {
  ReferenceKind kind = ReferenceKind::kImage;
  int64_t latent_frames = 0;
  int64_t latent_height = 0;
  int64_t latent_width = 0;
  int64_t audio_latents = 0;
};

struct Layout {
  std::vector<Keyframe> keyframes;
  std::vector<Reference> references;
  int64_t text_tokens = 0;
  int64_t latent_frames = 0;
  int64_t latent_height = 0;
  int64_t latent_width = 0;
  int64_t audio_latents = 0;
};

Task TaskOf(const Layout& layout);

// Rows of the packed sequence, computed in float64: no numbers of a stranger overflow it.
double PackedRows(const Layout& layout);

// INVALID_ARGUMENT / BAD_LAYOUT: keyframes with references, a keyframe twice, sizes that are not positive or odd in space, counts
// whose packed rows exceed `max_rows`.
absl::Status CheckLayout(const Layout& layout, int64_t max_rows);

// FAILED_PRECONDITION / BASE_MISMATCH: a task outside a known partition (fl2va serves t2va and fl2va; ref2va serves ref2va).
absl::Status CheckPartition(Task task, Partition partition);

// One visual or audio condition, in packed order.
struct ConditionShape {
  int64_t frames = 0, height = 0, width = 0;  // Visual: latents; rows = frames * height / 2 * width / 2.
  int64_t audio_latents = 0;                  // Audio: rows = 2 * audio_latents.
};

enum class Stream { kText, kVideo, kAudio };

// A maximal run of packed rows of one stream.
struct Segment {
  Stream stream = Stream::kText;
  bool condition = false;
  int64_t begin = 0;         // First packed row.
  int64_t rows = 0;
  int64_t stream_begin = 0;  // First row among all rows of the stream (condition rows first, in packed order).
};

// Which of the (at most four) timesteps of an evaluation a row runs at.
enum class TimestepRole { kVideo, kAudio, kVisualCondition, kAudioCondition };
inline constexpr size_t kTimestepRoles = 4;

struct Packing {
  int64_t rows = 0;
  int64_t text_rows = 0;
  int64_t video_rows = 0;  // Conditions and target.
  int64_t audio_rows = 0;
  int64_t condition_video_rows = 0;
  int64_t condition_audio_rows = 0;
  std::vector<Segment> segments;                   // In packed order, covering [0, rows).
  std::vector<ConditionShape> visual_conditions;   // In packed order; matches condition_video.N.
  std::vector<ConditionShape> audio_conditions;    // In packed order; matches condition_audio.N.
  std::vector<std::array<double, 3>> positions;    // (t, h, w) of each row, float64 grid.
  std::vector<uint8_t> tags;                       // 0 video, 1 text, 2 audio; text rows as text_token_tags say.
  std::vector<TimestepRole> timestep_roles;        // Of each row.
  std::vector<int64_t> text_indices, video_indices, audio_indices;  // Packed rows of each stream.

  int64_t target_video_rows() const { return video_rows - condition_video_rows; }
  int64_t target_audio_rows() const { return audio_rows - condition_audio_rows; }
};

// `text_tags`: layout.text_tokens values of 0 or 1 (else BAD_TENSOR). Requires CheckLayout to have passed.
absl::StatusOr<Packing> Pack(const Layout& layout, const std::vector<int64_t>& text_tags);

// The distinct timesteps of one evaluation, ascending (as float32), and for each row the index into them. Text and video rows
// run at t_video, audio rows at t_audio, visual conditions at max(t_video, 0.999), audio conditions at 1.
struct TimestepRows {
  std::vector<float> timesteps;
  std::vector<int64_t> row_index;
};
TimestepRows AssignTimesteps(const Packing& packing, float t_video, float t_audio);

// Packs a latent [C, T, H, W] (float32) into rows [T * H/2 * W/2, 4 * C] and back; column order as in golden/inputs.
void PatchifyVideo(const float* latent, int64_t channels, int64_t frames, int64_t height, int64_t width, float* rows);
void UnpatchifyVideo(const float* rows, int64_t channels, int64_t frames, int64_t height, int64_t width, float* latent);

// The `layout` JSON of a request file's metadata: {"keyframes": ["first"], "refs": [{"kind": "image", "latent_frames": ..}],
// "text_tokens": .., "latent_frames": .., ...}. `base_sigma`, `video_shift`, `audio_shift` where present.
struct RequestLayout {
  Layout layout;
  std::optional<double> base_sigma, video_shift, audio_shift;
};
absl::StatusOr<RequestLayout> ParseRequestLayout(absl::string_view json);

}  // namespace h3
