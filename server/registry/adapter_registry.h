// The adapters directory of a scheduler. An adapter is its content (SHA-256); a name is an alias of the file below the
// directory.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "server/format/adapter.h"
#include "server/format/checkpoint.h"
#include "server/format/geometry.h"
#include "server/format/request.h"
#include "server/format/safetensors.h"

namespace h3 {

// What of a base decides whether an adapter fits it.
struct BaseFacts {
  Geometry geometry;
  Partition partition = Partition::kUnknown;
  int64_t grid_width = 0;  // 0: no silu grid.
};

struct RegisteredAdapter {
  std::string name;
  std::string digest;  // Empty until the file has been read once.
  int64_t file_bytes = 0;
};

// Thread-safe. Every method reads files and may take as long as hashing a large one: never call it in a gRPC reaction.
class AdapterRegistry {
 public:
  explicit AdapterRegistry(std::string directory) : directory_(std::move(directory)) {}

  // The content that a name stands for. NOT_FOUND / UNKNOWN_ADAPTER, or what is wrong with the name or the file.
  absl::StatusOr<RegisteredAdapter> Find(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);

  // What a stack entry is on that base: digest pinned, scales and their sources from the header. Refusals as ReadAdapter's, and
  // NOT_FOUND / UNKNOWN_ADAPTER; FAILED_PRECONDITION / BASE_MISMATCH when the entry pins another digest. The message names the
  // entry.
  absl::StatusOr<ResolvedAdapter> Resolve(const StackEntry& entry, size_t index, const BaseFacts& base)
      ABSL_LOCKS_EXCLUDED(mu_);

  // Every safetensors file below the directory, by name.
  absl::StatusOr<std::vector<RegisteredAdapter>> List() ABSL_LOCKS_EXCLUDED(mu_);

  // The digest of a name's content now; HEX of `sha256:HEX`, whether there is such content or not.
  absl::StatusOr<std::string> Digest(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);

  // A name under which content of that digest was read; empty when there is none. Reads no file.
  std::string NameOf(const std::string& digest) ABSL_LOCKS_EXCLUDED(mu_);

 private:
  // What stat says of a file; the same again means the same content.
  struct Signature {
    uint64_t device = 0, inode = 0;
    int64_t bytes = 0, modified_ns = 0, changed_ns = 0;
    bool operator==(const Signature&) const = default;
  };
  struct Content {
    Signature signature;
    std::string digest;
    SafetensorsHeader header;
    std::map<std::string, std::string> scalars;  // Bytes of tensors of one element: alphas.
  };

  absl::StatusOr<std::shared_ptr<const Content>> Read(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);
  absl::StatusOr<std::shared_ptr<const Content>> ReadByDigest(const std::string& name) ABSL_LOCKS_EXCLUDED(mu_);

  const std::string directory_;
  absl::Mutex mu_;
  std::map<std::string, std::shared_ptr<const Content>> contents_ ABSL_GUARDED_BY(mu_);
};

}  // namespace h3
