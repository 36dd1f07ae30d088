// A GenerateHeader from a stranger, as protobuf text or wire format: every check that a scheduler makes before it reads a chunk
// (server/scheduler_rpc/relay.h, CheckRequest; generate_relay.cc, Take), in the same order, and what relies on them having passed.
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "h3/v1/generation.pb.h"
#include "proto/support/tensor_stream.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/format/layout.h"
#include "server/format/request.h"
#include "server/format/schedule.h"
#include "server/rpc/convert.h"
#include "tests/fuzz/golden_geometry.h"

namespace h3 {
namespace {

constexpr size_t kMaxInput = 64 << 10;
// As server/scheduler_rpc/relay.h and SchedulerOptions have them; their headers bring the whole scheduler along.
constexpr int64_t kMaxPackedRows = 1'000'000;
constexpr int64_t kMaxRequestBytes = int64_t{1} << 30;
// Packing and receiving take time by the row and byte: small ones show as much.
constexpr double kMaxRowsToPack = 1 << 14;
constexpr int64_t kMaxBytesToReceive = 1 << 20;

class Silence final : public google::protobuf::io::ErrorCollector {
 public:
  void AddError(int, google::protobuf::io::ColumnNumber, const std::string&) override {}
};

std::optional<v1::GenerateHeader> ParseHeader(const std::string& input) {
  v1::GenerateHeader header;
  Silence silence;
  google::protobuf::TextFormat::Parser text;
  text.RecordErrorsTo(&silence);
  if (text.ParseFromString(input, &header) || header.ParseFromString(input)) return header;
  return std::nullopt;
}

// The shift is computed in float32, as the published one is: close to a shift of 0 it loses digits, and may end above 1.
constexpr float kLargestSigma = 1.001f;

void CheckSchedule(const Schedule& schedule) {
  H3_CHECK(schedule.evaluations() >= 1 && schedule.evaluations() <= 1000);
  H3_CHECK(schedule.video.size() == schedule.audio.size());
  for (const auto* sigmas : {&schedule.video, &schedule.audio}) {
    for (size_t i = 0; i < sigmas->size(); ++i) {
      H3_CHECK((*sigmas)[i] >= 0 && (*sigmas)[i] <= kLargestSigma);
      H3_CHECK(i == 0 || (*sigmas)[i] < (*sigmas)[i - 1]);
    }
    H3_CHECK(sigmas->back() == 0);
  }
}

void CheckPacking(const Layout& layout) {
  std::vector<int64_t> tags(static_cast<size_t>(layout.text_tokens));
  for (size_t i = 0; i < tags.size(); ++i) tags[i] = static_cast<int64_t>(i % 2);
  const auto packing = Pack(layout, tags);
  H3_CHECK(packing.ok());
  H3_CHECK(static_cast<double>(packing->rows) == PackedRows(layout));
  H3_CHECK(packing->text_rows + packing->video_rows + packing->audio_rows == packing->rows);
  const auto rows = static_cast<size_t>(packing->rows);
  H3_CHECK(packing->positions.size() == rows && packing->tags.size() == rows && packing->timestep_roles.size() == rows);
  H3_CHECK(packing->text_indices.size() + packing->video_indices.size() + packing->audio_indices.size() == rows);
  for (const auto& position : packing->positions) {
    H3_CHECK(std::all_of(position.begin(), position.end(), [](double p) { return std::isfinite(p); }));
  }
  int64_t next = 0;
  for (const Segment& segment : packing->segments) {
    H3_CHECK(segment.begin == next && segment.rows > 0);
    next += segment.rows;
  }
  H3_CHECK(next == packing->rows);
  const TimestepRows timesteps = AssignTimesteps(*packing, 0.25f, 0.5f);
  H3_CHECK(timesteps.row_index.size() == rows && timesteps.timesteps.size() <= kTimestepRoles);
  for (const int64_t index : timesteps.row_index) {
    H3_CHECK(index >= 0 && static_cast<size_t>(index) < timesteps.timesteps.size());
  }
}

// What is kept of an adapter goes over the wire to the worker and must come out of it the same.
void CheckSettings(const StackEntry& entry) {
  const auto settings = FromProto(ToProto(entry.settings));
  H3_CHECK(settings.ok() && *settings == entry.settings);
}

// All announced bytes, as their chunks would come.
void Receive(const TensorSpecs& specs) {
  std::vector<std::string> sent;
  int64_t total = 0;
  for (const v1::TensorSpec& spec : specs) total += static_cast<int64_t>(spec.bytes());
  H3_CHECK(total <= kMaxRequestBytes);
  TensorAssembler assembler(specs);
  if (total > kMaxBytesToReceive) return;
  for (const v1::TensorSpec& spec : specs) sent.emplace_back(spec.bytes(), '\x55');
  ChunkReader chunks({sent.begin(), sent.end()});
  v1::TensorChunk chunk;
  while (chunks.Next(chunk)) H3_CHECK(assembler.Add(chunk).ok());
  H3_CHECK(assembler.complete() && assembler.CheckComplete().ok() && assembler.Take() == sent);
}

absl::Status Check(const v1::GenerateHeader& header) {
  H3_ASSIGN_OR_RETURN(const Schedule schedule, ScheduleFromProto(header.sampling()));
  CheckSchedule(schedule);
  if (!header.preset().empty()) return RefuseArgument(reason::kBadRequest, "preset");
  H3_RETURN_IF_ERROR(CheckTensorSpecs(header.tensors(), kMaxRequestBytes));
  H3_ASSIGN_OR_RETURN(const Layout layout, FromProto(header.layout()));
  H3_RETURN_IF_ERROR(CheckLayout(layout, kMaxPackedRows));
  H3_CHECK(PackedRows(layout) <= kMaxPackedRows);
  const Task task = TaskOf(layout);
  if (header.task() != v1::TASK_UNSPECIFIED && header.task() != ToProto(task))
    return RefuseArgument(reason::kBadLayout, "task");
  if (PackedRows(layout) <= kMaxRowsToPack) CheckPacking(layout);
  H3_ASSIGN_OR_RETURN(const std::vector<StackEntry> stack, FromProto(header.stack()));
  H3_RETURN_IF_ERROR(CheckStack(stack, schedule.evaluations()));
  for (const StackEntry& entry : stack) CheckSettings(entry);
  for (const Partition partition : {Partition::kUnknown, Partition::kFl2va, Partition::kRef2va}) {
    const bool served = CheckPartition(task, partition).ok();
    H3_CHECK(served || partition != Partition::kUnknown);
  }
  static const auto* const geometry = new Geometry(fuzz::GoldenGeometry(false));
  const std::vector<v1::TensorSpec> specs(header.tensors().begin(), header.tensors().end());
  const std::vector<HostTensor> announced = ToHostTensors(specs, std::vector<std::string>(specs.size()));
  const std::vector<RequestTensor> expected = RequestTensorsOf(layout, *geometry, header.sampling().has_noise_from_request());
  H3_RETURN_IF_ERROR(CheckRequestTensors(announced, expected));
  H3_CHECK(announced.size() == expected.size());
  Receive(header.tensors());
  return absl::OkStatus();
}

}  // namespace
}  // namespace h3

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  google::protobuf::SetLogHandler(nullptr);  // A complaint for every string that is not UTF-8.
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size > h3::kMaxInput) return 0;
  const auto header = h3::ParseHeader(std::string(reinterpret_cast<const char*>(data), size));
  // A refusal that carries no reason is none of ours: its client could not tell what to do about it.
  if (header.has_value()) {
    const absl::Status status = h3::Check(*header);
    if (!status.ok()) H3_CHECK(!h3::ReasonOf(status).empty());
  }
  return 0;
}
