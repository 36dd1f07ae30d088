// Protocol messages <-> domain types. Values that the protocol allows and the domain does not are refused, never bent.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "h3/v1/generation.pb.h"
#include "h3/v1/operations.pb.h"
#include "h3/v1/types.pb.h"
#include "server/format/adapter.h"
#include "server/format/checkpoint.h"
#include "server/format/geometry.h"
#include "server/format/layout.h"
#include "server/format/plan.h"
#include "server/format/request.h"
#include "server/format/schedule.h"
#include "server/vram/memory_report.h"

namespace h3 {

// BAD_LAYOUT: unspecified keyframes or kinds.
absl::StatusOr<Layout> FromProto(const v1::Layout& layout);
// BAD_STRENGTH: an entry without a strength. BAD_REQUEST: an unknown `apply`.
absl::StatusOr<std::vector<StackEntry>> FromProto(const google::protobuf::RepeatedPtrField<v1::StackEntry>& stack);
// BAD_REQUEST: neither a seed nor noise_from_request, or what MakeSchedule refuses.
absl::StatusOr<Schedule> ScheduleFromProto(const v1::Sampling& sampling);
// (t_video, t_audio) of an evaluation. BAD_REQUEST: no point, or one outside [0, 1].
absl::StatusOr<std::pair<float, float>> TimestepsFromProto(const v1::Evaluation& evaluation);

// Tensors whose bytes have come, in announced order.
std::vector<HostTensor> ToHostTensors(absl::Span<const v1::TensorSpec> specs, std::vector<std::string> data);
v1::TensorSpec SpecOf(const HostTensor& tensor);

v1::Task ToProto(Task task);
v1::Partition ToProto(Partition partition);
Partition FromProto(v1::Partition partition);
v1::Geometry ToProto(const Geometry& geometry);
Geometry FromProto(const v1::Geometry& geometry);
// What the planner needs of a base beside its geometry, and back: `model` is a worker's.
v1::PlanFacts ToProto(const PlanBase& base, const PlanOptions& options);
PlanBase PlanBaseFromProto(const v1::Model& model);
PlanOptions PlanOptionsFromProto(const v1::Model& model);
// A worker's memory for its heartbeat, and back. Not carried: what was ever allocated by owner, hits and misses of adapters.
v1::DeviceMemory ToProto(const MemoryReport& report);
MemoryReport FromProto(const v1::DeviceMemory& memory);
v1::EffectiveScale ToProto(const EffectiveScale& scale);
v1::ResolvedAdapter ToProto(const ResolvedAdapter& adapter);
v1::AdapterSettings ToProto(const AdapterSettings& settings);
// BAD_SCALE: an alpha that is not a finite number >= 0. BAD_REQUEST: an unknown enumerator.
absl::StatusOr<AdapterSettings> FromProto(const v1::AdapterSettings& settings);

}  // namespace h3
