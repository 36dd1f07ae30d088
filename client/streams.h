// The streams behind Client, but for those that only the server writes. Internal to client/.
#pragma once

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/client.h"
#include "h3/v1/adapters.grpc.pb.h"
#include "h3/v1/generation.grpc.pb.h"

namespace h3::client {

// generate_stream.cc
absl::StatusOr<GenerateResult> RunGenerateStream(v1::Generation::StubInterface& stub, v1::GenerateHeader header,
                                                 absl::Span<const TensorView> tensors, const GenerateEvents& events,
                                                 const CallOptions& options, const std::string& server);

// session.cc
absl::StatusOr<std::unique_ptr<Session>> OpenSessionStream(v1::Generation::StubInterface& stub, v1::EvaluateHeader header,
                                                           absl::Span<const TensorView> tensors, const CallOptions& options,
                                                           const std::string& server);

// upload_stream.cc
absl::StatusOr<v1::UploadAdapterResponse> RunUploadStream(v1::Adapters::StubInterface& stub, const std::string& name,
                                                          const std::string& path, const UploadOptions& upload,
                                                          const CallOptions& options, const std::string& server);

}  // namespace h3::client
