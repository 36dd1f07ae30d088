// The adapters that a scheduler knows: files below its adapters directory, and uploads in its content store. An adapter is its
// content; a name is an alias. What is kept of an adapter beside its file (settings) is kept by digest.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "server/format/adapter.h"
#include "server/format/adapter_settings.h"
#include "server/format/checkpoint.h"
#include "server/format/geometry.h"
#include "server/format/plan.h"
#include "server/format/request.h"
#include "server/format/safetensors.h"
#include "server/registry/content_store.h"
#include "server/registry/state_store.h"

namespace h3 {

// What of a base decides whether an adapter fits it, and what a request takes on it.
struct BaseFacts {
  PlanBase plan;  // Geometry and types.
  PlanOptions plan_options;
  Partition partition = Partition::kUnknown;
  int64_t grid_width = 0;  // 0: no silu grid.

  const Geometry& geometry() const { return plan.form.geometry; }
};

struct RegisteredAdapter {
  std::string name;
  std::string digest;  // Empty until the file has been read once.
  int64_t file_bytes = 0;
  bool uploaded = false;
  AdapterSettings settings;  // Where the digest is known.
};

// An adapter judged by its header.
struct HeaderReport {
  RegisteredAdapter adapter;
  std::string producer;
  std::map<std::string, std::string> schedule_hints;
  absl::StatusOr<AdapterManifest> manifest = AdapterManifest();  // Or why it would not load.
  ByteCount bytes;  // On a device.
  double arithmetic_percent = 0;
};

// On one thread: methods read files and may take as long as hashing a large one. Never call them in a gRPC reaction.
class AdapterRegistry {
 public:
  // Borrows both stores.
  AdapterRegistry(std::string directory, ContentStore& content, StateStore& state)
      : directory_(std::move(directory)), content_(content), state_(state) {}

  // The content that a name stands for. NOT_FOUND / UNKNOWN_ADAPTER, or what is wrong with the name or the file.
  absl::StatusOr<RegisteredAdapter> Find(const std::string& name);

  // What a stack entry is on that base: digest pinned, settings, scales and their sources from the header. Refusals as
  // ReadAdapter's, and NOT_FOUND / UNKNOWN_ADAPTER; FAILED_PRECONDITION / ADAPTER_CHANGED when the entry pins another digest. The
  // message names the entry.
  absl::StatusOr<ResolvedAdapter> Resolve(const StackEntry& entry, size_t index, const BaseFacts& base);

  // Errors only where there is no such file, or it is no safetensors file.
  absl::StatusOr<HeaderReport> Report(const std::string& name, const BaseFacts& base);

  // Every adapter, by name.
  absl::StatusOr<std::vector<RegisteredAdapter>> List();

  // The digest of a name's content now; HEX of `sha256:HEX`, whether there is such content or not.
  absl::StatusOr<std::string> Digest(const std::string& name);

  // A name that leads to content of that digest now, or "sha256:HEX".
  std::string NameOf(const std::string& digest);

  // Replaces what is kept for that content. peft_config is not kept: it lies beside the file.
  absl::Status SetSettings(const std::string& digest, const AdapterSettings& settings);

  // `name` stands for that uploaded content from now on. FAILED_PRECONDITION / NAME_TAKEN where a file of the adapters directory
  // has the name. Returns the digest that it led to before, or "".
  absl::StatusOr<std::string> NameUpload(const std::string& name, const std::string& digest);
  // INVALID_ARGUMENT as CheckConfinedName, or FAILED_PRECONDITION / NAME_TAKEN.
  absl::Status CheckUploadName(const std::string& name) const;
  // Removes uploaded content that no name leads to: that of one digest, or all but these (nothing may be waiting for any).
  absl::Status ForgetUnnamed(const std::string& digest);
  absl::Status ForgetAllUnnamed(const std::set<std::string>& but);

  ContentStore& content() { return content_; }
  StateStore& state() { return state_; }

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
    std::string peft_config;                     // Of an adapter_config.json beside it.
    bool uploaded = false;
  };
  using ContentPtr = std::shared_ptr<const Content>;

  absl::StatusOr<ContentPtr> Read(const std::string& name);
  // `uploaded`: the digest under which the content store has it, which is that of its bytes; empty: hash it.
  absl::StatusOr<ContentPtr> ReadFile(const std::string& name, const FileDescriptor& file, std::string peft_config,
                                      const std::string& uploaded);
  absl::StatusOr<ContentPtr> ReadByDigest(const std::string& name);
  absl::StatusOr<AdapterSettings> SettingsOf(const Content& content);
  absl::StatusOr<AdapterManifest> Manifest(const Content& content, const StackEntry& entry, const AdapterSettings& settings,
                                           const BaseFacts& base) const;

  const std::string directory_;
  ContentStore& content_;
  StateStore& state_;
  std::map<std::string, ContentPtr> contents_;  // By name.
};

}  // namespace h3
