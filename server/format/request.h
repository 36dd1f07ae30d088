// What a request says about its stack and its tensors, and what the server answers about them. Plain types, shared by the
// scheduler, which checks them from headers, and the worker, which computes with them.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "server/base/bytes.h"
#include "server/format/adapter_settings.h"
#include "server/format/dtype.h"
#include "server/format/geometry.h"
#include "server/format/layout.h"

namespace h3 {

struct AdapterShape;

// A tensor in host memory, row-major, little-endian. Without its data: an announcement.
struct HostTensor {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  std::string data;
};

enum class Apply { kBypass, kMaterialized };

struct AutoStrength {
  double floor = 0.3;
  double ceiling = 1.5;
};

// One adapter of a stack, as a request names it.
struct StackEntry {
  std::string adapter;  // Name below the adapters directory, or "sha256:HEX".
  std::string digest;   // Hex SHA-256 that it must have; empty: whatever the name means now.
  double strength = 1;
  double video = 1, text = 1, audio = 1;  // Factors by modality.
  std::vector<double> per_evaluation;
  std::optional<AutoStrength> auto_strength;
  std::optional<double> alpha;
  std::vector<std::string> leave_out;
  Apply apply = Apply::kBypass;
  AdapterSettings settings;  // What is kept of the adapter; filled in by the scheduler.
};

struct EffectiveScale {
  std::string module_kind;
  int64_t modules = 0;
  int64_t rank = 0;
  double alpha = 0;
  double scale = 1;
  std::string source;
};

// What auto-strength made of one module.
struct StrengthRatio {
  std::string module;
  double ratio = 1;
};

struct ResolvedAdapter {
  std::string adapter;
  std::string digest;
  double strength = 0;
  std::vector<EffectiveScale> scales;
  ByteCount bytes;
  int64_t modules = 0;
  std::vector<std::string> left_out;
  std::vector<std::string> warnings;
  double video = 1, text = 1, audio = 1;
  std::vector<double> per_evaluation;
  Apply apply = Apply::kBypass;
  std::vector<StrengthRatio> auto_strength_ratios;  // Only where a worker computed them.
  AdapterSettings settings;  // Only where the registry resolved it.
  std::shared_ptr<const AdapterShape> shape;  // Likewise: for the planner.
};

// The largest strength that is not taken for a mistake.
inline constexpr double kMaxStrength = 100;

// INVALID_ARGUMENT / BAD_STRENGTH: a strength, factor or bound that is not finite or beyond kMaxStrength, factors for another
// number of evaluations than `evaluations` (0: any). BAD_SCALE: an alpha that is not finite or negative.
absl::Status CheckStack(absl::Span<const StackEntry> stack, int64_t evaluations);

// A tensor that a request of some layout must send.
struct RequestTensor {
  std::string name;
  std::vector<int64_t> shape;
  bool integer = false;  // int64; else F32, BF16, F16 or F64.
};

// text, text_token_tags and the conditions in packed order; with `targets` also target_video and target_audio_rows.
std::vector<RequestTensor> RequestTensorsOf(const Layout& layout, const Geometry& geometry, bool targets);

// INVALID_ARGUMENT / BAD_TENSOR: a tensor of `expected` that is missing or has another shape or type, or one that is not expected.
absl::Status CheckRequestTensors(absl::Span<const HostTensor> announced, absl::Span<const RequestTensor> expected);

}  // namespace h3
