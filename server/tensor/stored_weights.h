// The weights of a checkpoint as tensors: mapped (the CPU's default: zero copies) or copied to the device.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/base/sha256.h"
#include "server/format/checkpoint.h"
#include "server/tensor/counting_allocator.h"
#include "server/tensor/mapped_file.h"
#include "server/vram/ledger.h"

namespace h3 {

struct StoredWeightsOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  bool copy = false;  // Ignored on an accelerator, where weights are always copied.
  // Element type of a tensor; null keeps the stored ones. Another type than the stored one is always a copy.
  std::function<DType(const std::string& name, const CheckpointTensor& tensor)> dtype;
  // Tensors that stay mapped in host memory in their stored type, whatever the device: no bytes of it. Null: none.
  std::function<bool(const std::string& name)> on_host;
};

// Owns the mappings and the tensors, which are immutable after Load. Thread-safe, but for AuditPiece.
class StoredWeights {
 public:
  // Blocks on the disk. Everything is counted under Owner::kBaseWeights: mapped tensors with their bytes, copies by the
  // allocator. MALFORMED_FILE when a file is no longer what `checkpoint` was read from.
  static absl::StatusOr<std::unique_ptr<StoredWeights>> Load(const Checkpoint& checkpoint, VramLedger& ledger,
                                                             const StoredWeightsOptions& options);

  // The pieces of a canonical tensor, stacked on the row axis; one as a rule. H3_CHECKs that the name exists.
  const std::vector<at::Tensor>& Pieces(const std::string& name) const;
  // A tensor of one piece.
  const at::Tensor& Single(const std::string& name) const;

  // Hex SHA-256 over every canonical tensor's name, shape, dtype and bytes in canonical row order, as stored: the same for the
  // same weights in any container, and other after any change of a byte. Reads everything; uses all cores.
  std::string Fingerprint();

  // Reads the next piece, in turn, of all tensors again: a few MiB, on the device thread. True when a tensor is through with it: its
  // mapped bytes hash to what Fingerprint read, and the copy on the device, where there is one, equals them; DATA_LOSS when not. False
  // for ever before the first Fingerprint.
  absl::StatusOr<bool> AuditPiece();

  // DATA_LOSS when a mapped file was changed in place, or when a tensor was written to (version counters). Cheap.
  absl::Status CheckUnchanged() const;

  ByteCount bytes() const { return bytes_; }            // On the device.
  ByteCount host_bytes() const { return host_bytes_; }  // That stay in host memory.
  int64_t parameters() const { return parameters_; }

 private:
  StoredWeights() = default;
  // One tensor that is being read again: what is left to hash, then what is left to compare.
  struct Audit {
    struct Rows {
      at::Tensor mapped, held;
    };
    std::string name;
    Sha256 sha;
    std::vector<absl::string_view> segments;
    std::vector<Rows> copies;
    size_t hashed = 0, compared = 0;
  };

  void BeginDigest(const std::string& name, const CheckpointTensor& tensor, Sha256& sha) const;
  // The stored bytes of a tensor in canonical row order, in pieces of at most `most` bytes.
  std::vector<absl::string_view> Segments(const std::string& name, const CheckpointTensor& tensor, int64_t most) const;
  std::string DigestOf(const std::string& name, const CheckpointTensor& tensor) const;
  // The tensor after `name`, or the first one.
  std::unique_ptr<Audit> BeginAudit(const std::string& name) const;

  Checkpoint checkpoint_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::map<std::string, std::vector<at::Tensor>> tensors_;
  std::map<std::string, std::vector<uint32_t>> versions_;
  std::map<std::string, std::string> digests_;  // Of each tensor, from Fingerprint.
  std::unique_ptr<Audit> audit_;                // Null before the first piece.
  std::optional<ExternalBytes> mapped_;
  ByteCount bytes_, host_bytes_;
  int64_t parameters_ = 0;
};

}  // namespace h3
