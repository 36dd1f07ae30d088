// Writes results as a safetensors file.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "client/tensor.h"

namespace h3::ctl {

// "-" (and /dev/stdout): the bytes of the result go there, and all text to standard error.
bool IsStandardOutput(const std::string& path);

// Whether `path` can be written, asked before minutes of work: its folder exists and is writable, and the path itself is free
// or a writable regular file; or it is a pipe or a device such as /dev/null, or standard output that is no terminal. USAGE.
// Creates nothing.
absl::Status CheckOutputPath(const std::string& path);

// Replaces `path` at once (temporary file, rename): a reader sees the old file or the whole new one. Pipes and devices are
// written into. Tensors stand in the given order. Blocks on the disk. After an error the old file is as it was and nothing is
// left behind.
absl::Status WriteSafetensors(const std::string& path, absl::Span<const client::Tensor> tensors);

}  // namespace h3::ctl
