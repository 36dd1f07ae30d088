// What the Generate and the Evaluate relays share.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status.h"
#include "proto/support/tensor_stream.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/convert.h"
#include "server/scheduler_rpc/scheduler_core.h"

namespace h3 {

inline constexpr int64_t kMaxPackedRows = 1'000'000;

// How a call to a worker ended, as the client shall see it. A refusal keeps its reason; a broken connection becomes UNAVAILABLE
// / WORKER_LOST.
inline absl::Status FromWorker(const grpc::Status& status, const std::string& worker) {
  absl::Status result = FromGrpc(status);
  if (result.ok() || !ReasonOf(result).empty() || result.code() == absl::StatusCode::kInternal) return result;
  if (absl::IsDeadlineExceeded(result))
    return Refuse(result.code(), reason::kCancelled, "the deadline of the call has passed", {{"worker", worker}});
  return Refuse(absl::StatusCode::kUnavailable, reason::kWorkerLost,
                absl::StrCat("worker ", worker, " was lost (", result.message(), "); the request can be sent again"),
                {{"worker", worker}, {"retry_seconds", "1"}});
}

// Bytes of announced tensors. They have passed CheckTensorSpecs.
inline int64_t BytesOf(const TensorSpecs& specs) {
  int64_t bytes = 0;
  for (const v1::TensorSpec& spec : specs) bytes += static_cast<int64_t>(spec.bytes());
  return bytes;
}

// Header and layout against each other and against the base, before any chunk is read.
struct CheckedRequest {
  Layout layout;
  Task task = Task::kT2va;
  ChosenBase base;
};

template <typename Header>
absl::StatusOr<CheckedRequest> CheckRequest(const SchedulerCore& core, const Header& header, bool targets,
                                            int64_t evaluations) {
  CheckedRequest request;
  H3_RETURN_IF_ERROR(core.CheckServing());
  if (!header.preset().empty() && header.stack_size() > 0)
    return RefuseArgument(reason::kBadRequest, "give either a preset or a stack", {{"field", "preset"}});
  H3_RETURN_IF_ERROR(CheckTensorSpecs(header.tensors(), core.options().max_request_bytes));
  H3_ASSIGN_OR_RETURN(request.layout, FromProto(header.layout()));
  H3_RETURN_IF_ERROR(CheckLayout(request.layout, kMaxPackedRows));
  request.task = TaskOf(request.layout);
  if (header.task() != v1::TASK_UNSPECIFIED && header.task() != ToProto(request.task)) {
    return RefuseArgument(reason::kBadLayout,
                          absl::StrCat("the layout is one of ", TaskName(request.task), ", the header says another task"),
                          {{"field", "task"}});
  }
  H3_ASSIGN_OR_RETURN(const std::vector<StackEntry> stack, FromProto(header.stack()));
  H3_RETURN_IF_ERROR(CheckStack(stack, evaluations));
  H3_ASSIGN_OR_RETURN(request.base, core.ChooseBase(request.task, header.model()));
  const std::vector<v1::TensorSpec> specs(header.tensors().begin(), header.tensors().end());
  H3_RETURN_IF_ERROR(CheckRequestTensors(ToHostTensors(specs, std::vector<std::string>(specs.size())),
                                         RequestTensorsOf(request.layout, request.base.facts.geometry(), targets)));
  return request;
}

inline void DescribeBase(const CheckedRequest& request, const std::vector<ResolvedAdapter>& resolved, v1::Accepted& accepted) {
  accepted.set_task(ToProto(request.task));
  accepted.set_partition(ToProto(request.base.facts.partition));
  accepted.set_base_fingerprint(request.base.fingerprint);
  if (request.base.facts.partition == Partition::kUnknown) {
    accepted.add_warnings(
        "the base's partition is unknown: every task is served, and the result is meaningless where the weights are the other "
        "partition's");
  }
  for (const ResolvedAdapter& adapter : resolved) *accepted.add_stack() = ToProto(adapter);
}

}  // namespace h3
