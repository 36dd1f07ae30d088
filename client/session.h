// A session of single model evaluations: text, conditions and stack are sent and prepared once, then the caller's own sampler
// asks for one evaluation after the other.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/canceller.h"
#include "client/tensor.h"
#include "h3/v1/generation.pb.h"

namespace h3::client {

struct CallOptions {
  std::optional<absl::Duration> timeout;  // Absent: no deadline.
  Canceller* cancel = nullptr;            // Not owned; must outlive the call.
};

struct EvaluationOutput {
  v1::EvaluationResult result;  // Timesteps, index, seconds.
  std::vector<Tensor> tensors;  // video, audio: data-ward velocity rows, float32.
};

// Made by Client::OpenSession. Thread-compatible: one call at a time. Destroying it ends the session and frees what the server
// holds for it. After an error the session is over, and every later call returns that error.
class Session {
 public:
  virtual ~Session() = default;

  virtual const v1::Accepted& accepted() const = 0;
  virtual const v1::Ready& ready() const = 0;

  // `evaluation`: the point; its tensors are filled in from `tensors` (target_video_rows or target_video; target_audio_rows).
  // Blocks until the result has come.
  virtual absl::StatusOr<EvaluationOutput> Evaluate(v1::Evaluation evaluation, absl::Span<const TensorView> tensors) = 0;

  // Says goodbye and waits for the server's last word. Once.
  virtual absl::Status Close() = 0;
};

}  // namespace h3::client
