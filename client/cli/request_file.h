// A request FILE: a safetensors file with the logical inputs of a request and its layout as JSON in the metadata, as in
// tests/golden/inputs. Packed fields in it (video_rows, position_ids, ...) are ignored: the server computes them.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/tensor.h"
#include "h3/v1/types.pb.h"

namespace h3::ctl {

// Keeps the file mapped; tensors borrow from it. Movable.
class RequestFile {
 public:
  // Blocks on the disk; reads the header only, tensors are paged in as they are sent.
  // NOT_FOUND / NO_SUCH_FILE. INVALID_ARGUMENT: MALFORMED_FILE, BAD_LAYOUT (no or a bad layout), BAD_TENSOR (a type that
  // requests cannot carry). Whether the tensors suit the layout is for the server to say.
  static absl::StatusOr<RequestFile> Open(const std::string& path);

  const v1::Layout& layout() const { return layout_; }
  // Where an evaluation is asked for, before the shift; and the shifts.
  std::optional<double> base_sigma() const { return base_sigma_; }
  std::optional<double> video_shift() const { return video_shift_; }
  std::optional<double> audio_shift() const { return audio_shift_; }

  // text, text_token_tags, condition_video.N, condition_audio.N: by name, numbers ascending.
  const std::vector<client::TensorView>& conditions() const { return conditions_; }
  // target_video, target_audio_rows.
  const std::vector<client::TensorView>& targets() const { return targets_; }

 private:
  class Mapping;
  explicit RequestFile(std::shared_ptr<const Mapping> mapping);
  absl::Status Read(absl::string_view bytes);

  std::shared_ptr<const Mapping> mapping_;
  v1::Layout layout_;
  std::optional<double> base_sigma_, video_shift_, audio_shift_;
  std::vector<client::TensorView> conditions_, targets_;
};

}  // namespace h3::ctl
