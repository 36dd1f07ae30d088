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
#include "server/format/checkpoint.h"
#include "server/tensor/counting_allocator.h"
#include "server/tensor/mapped_file.h"
#include "server/vram/ledger.h"

namespace h3 {

struct StoredWeightsOptions {
  c10::Device device = c10::Device(c10::DeviceType::CPU);
  bool copy = false;  // Ignored on an accelerator, where weights are always copied.
  // Element type of the tensor of that name; nullopt keeps the stored one. Another type than the stored one is always a copy.
  std::function<std::optional<c10::ScalarType>(const std::string& name)> dtype;
};

// Owns the mappings and the tensors; immutable after Load. Thread-safe.
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
  std::string Fingerprint() const;

  // DATA_LOSS when a mapped file was changed in place, or when a tensor was written to (version counters). Cheap.
  absl::Status CheckUnchanged() const;

  ByteCount bytes() const { return bytes_; }  // On the device.
  int64_t parameters() const { return parameters_; }

 private:
  StoredWeights() = default;

  Checkpoint checkpoint_;
  std::vector<std::unique_ptr<MappedFile>> files_;
  std::map<std::string, std::vector<at::Tensor>> tensors_;
  std::map<std::string, std::vector<uint32_t>> versions_;
  std::optional<ExternalBytes> mapped_;
  ByteCount bytes_;
  int64_t parameters_ = 0;
};

}  // namespace h3
