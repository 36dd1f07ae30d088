#include "server/tensor/stored_weights.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <algorithm>
#include <limits>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/match.h"
#include "server/base/check.h"
#include "server/base/error.h"
#include "server/base/sha256.h"
#include "server/base/status_macros.h"
#include "server/tensor/catch_torch.h"
#include "server/tensor/device.h"

namespace h3 {
namespace {

// Hashed at a time, and at most compared: a millisecond or two.
constexpr int64_t kAuditBytes = int64_t{1} << 20;

bool IsInterleavedQkv(const Checkpoint& checkpoint, absl::string_view name) {
  return checkpoint.qkv_layout == QkvLayout::kInterleaved && absl::EndsWith(name, "attn.qkv_proj.weight");
}

}  // namespace

absl::StatusOr<std::unique_ptr<StoredWeights>> StoredWeights::Load(const Checkpoint& checkpoint, VramLedger& ledger,
                                                                   const StoredWeightsOptions& options) {
  auto weights = std::unique_ptr<StoredWeights>(new StoredWeights());
  weights->checkpoint_ = checkpoint;
  for (const std::string& path : checkpoint.files) {
    H3_ASSIGN_OR_RETURN(auto file, MappedFile::Open(path));
    weights->files_.push_back(std::move(file));
  }
  const OwnerScope owner(Owner::kBaseWeights);
  int64_t mapped_bytes = 0;
  H3_RETURN_IF_ERROR(CatchTorch("load weights", [&]() -> absl::Status {
    for (const auto& [name, tensor] : checkpoint.tensors) {
      const bool on_host = options.on_host && options.on_host(name);
      const DType wanted = options.dtype && !on_host ? options.dtype(name, tensor) : tensor.dtype;
      for (const StoredRows& piece : tensor.pieces) {
        MappedFile& file = *weights->files_[static_cast<size_t>(piece.file)];
        const auto stored = ToScalarType(piece.tensor.dtype);
        H3_CHECK(stored.has_value());
        if (piece.tensor.offset + piece.tensor.bytes > file.size()) {
          return RefuseArgument(reason::kMalformedFile, "the checkpoint changed while it was read; start again");
        }
        std::vector<int64_t> shape = piece.tensor.shape;
        const int64_t row_bytes = piece.tensor.bytes / std::max<int64_t>(1, shape.front());
        shape.front() = piece.rows;
        char* data = const_cast<char*>(file.data()) + piece.tensor.offset + piece.row_begin * row_bytes;
        at::Tensor mapped = at::from_blob(data, shape, at::TensorOptions().dtype(*stored));
        const c10::ScalarType dtype = *ToScalarType(wanted);
        const bool stays_mapped = on_host || (options.device.is_cpu() && !options.copy && dtype == *stored);
        at::Tensor resident = mapped;
        if (!stays_mapped) {
          resident = at::empty(shape, at::TensorOptions().device(options.device).dtype(dtype));
          resident.copy_(mapped);
        }
        const ByteCount bytes(static_cast<int64_t>(resident.nbytes()));
        if (stays_mapped && !on_host) mapped_bytes += bytes.value();
        (on_host ? weights->host_bytes_ : weights->bytes_) += bytes;
        weights->parameters_ += resident.numel();
        weights->versions_[name].push_back(resident._version());
        weights->tensors_[name].push_back(std::move(resident));
      }
    }
    return absl::OkStatus();
  }));
  weights->mapped_.emplace(ledger, Owner::kBaseWeights, ByteCount(mapped_bytes));
  return weights;
}

const std::vector<at::Tensor>& StoredWeights::Pieces(const std::string& name) const {
  const auto found = tensors_.find(name);
  H3_CHECK(found != tensors_.end());
  return found->second;
}

const at::Tensor& StoredWeights::Single(const std::string& name) const {
  const std::vector<at::Tensor>& pieces = Pieces(name);
  H3_CHECK(pieces.size() == 1);
  return pieces.front();
}

std::vector<absl::string_view> StoredWeights::Segments(const std::string& name, const CheckpointTensor& tensor, int64_t most) const {
  std::vector<absl::string_view> segments;
  const auto add = [&](const char* data, int64_t bytes) {
    for (int64_t begin = 0; begin < bytes; begin += most) segments.emplace_back(data + begin, static_cast<size_t>(std::min(most, bytes - begin)));
  };
  for (const StoredRows& piece : tensor.pieces) {
    const int64_t row_bytes = piece.tensor.bytes / std::max<int64_t>(1, piece.tensor.shape.front());
    const char* data = files_[static_cast<size_t>(piece.file)]->data() + piece.tensor.offset + piece.row_begin * row_bytes;
    if (!IsInterleavedQkv(checkpoint_, name)) {
      add(data, piece.rows * row_bytes);
      continue;
    }
    const Geometry& geometry = checkpoint_.geometry;
    const int64_t head_bytes = geometry.head_dim * row_bytes;
    for (int64_t part = 0; part < 3; ++part) {
      for (int64_t head = 0; head < geometry.heads; ++head) add(data + (head * 3 + part) * head_bytes, head_bytes);
    }
  }
  return segments;
}

void StoredWeights::BeginDigest(const std::string& name, const CheckpointTensor& tensor, Sha256& sha) const {
  sha.Update(absl::StrCat(name, "|", DTypeName(tensor.dtype), "|", absl::StrJoin(tensor.shape, ","), "|"));
}

std::string StoredWeights::DigestOf(const std::string& name, const CheckpointTensor& tensor) const {
  Sha256 sha;
  BeginDigest(name, tensor, sha);
  for (const absl::string_view segment : Segments(name, tensor, std::numeric_limits<int64_t>::max())) sha.Update(segment);
  return sha.Finish();
}

std::string StoredWeights::Fingerprint() {
  std::vector<const std::pair<const std::string, CheckpointTensor>*> entries;
  for (const auto& entry : checkpoint_.tensors) entries.push_back(&entry);
  std::vector<std::string> digests(entries.size());
  at::parallel_for(0, static_cast<int64_t>(entries.size()), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto& [name, tensor] = *entries[static_cast<size_t>(i)];
      digests[static_cast<size_t>(i)] = DigestOf(name, tensor);
    }
  });
  Sha256 all;
  for (size_t i = 0; i < entries.size(); ++i) {
    all.Update(digests[i]);
    digests_[entries[i]->first] = digests[i];
  }
  return all.FinishHex();
}

std::unique_ptr<StoredWeights::Audit> StoredWeights::BeginAudit(const std::string& name) const {
  auto entry = checkpoint_.tensors.upper_bound(name);
  if (entry == checkpoint_.tensors.end()) entry = checkpoint_.tensors.begin();
  const CheckpointTensor& tensor = entry->second;
  auto audit = std::make_unique<Audit>();
  audit->name = entry->first;
  BeginDigest(entry->first, tensor, audit->sha);
  audit->segments = Segments(entry->first, tensor, kAuditBytes);
  const std::vector<at::Tensor>& held = tensors_.at(entry->first);
  for (size_t i = 0; i < tensor.pieces.size(); ++i) {
    const StoredRows& piece = tensor.pieces[i];
    const int64_t row_bytes = piece.tensor.bytes / std::max<int64_t>(1, piece.tensor.shape.front());
    char* data = const_cast<char*>(files_[static_cast<size_t>(piece.file)]->data()) + piece.tensor.offset + piece.row_begin * row_bytes;
    if (held[i].device().is_cpu() && held[i].const_data_ptr() == data) continue;  // Its only bytes are the hashed ones.
    const at::Tensor mapped = at::from_blob(data, held[i].sizes(), at::TensorOptions().dtype(*ToScalarType(piece.tensor.dtype)));
    const int64_t rows = std::max<int64_t>(1, kAuditBytes / std::max<int64_t>(1, row_bytes));
    for (int64_t row = 0; row < piece.rows; row += rows) {
      const int64_t count = std::min(rows, piece.rows - row);
      audit->copies.push_back({mapped.narrow(0, row, count), held[i].narrow(0, row, count)});
    }
  }
  return audit;
}

absl::StatusOr<bool> StoredWeights::AuditPiece() {
  if (digests_.empty()) return false;
  if (audit_ == nullptr) audit_ = BeginAudit("");
  Audit& audit = *audit_;
  const auto lost = [&](absl::string_view what) { return absl::DataLossError(absl::StrCat("base weight ", audit.name, " ", what)); };
  if (audit.hashed < audit.segments.size()) {
    // Heads of an interleaved weight are small: as many as make a piece.
    for (int64_t bytes = 0; audit.hashed < audit.segments.size() && bytes < kAuditBytes; ++audit.hashed) {
      audit.sha.Update(audit.segments[audit.hashed]);
      bytes += static_cast<int64_t>(audit.segments[audit.hashed].size());
    }
    if (audit.hashed == audit.segments.size() && audit.sha.Finish() != digests_.at(audit.name)) return lost("is not what was loaded");
  } else if (audit.compared < audit.copies.size()) {
    const OwnerScope owner(Owner::kWorkspace);
    const auto& [mapped, held] = audit.copies[audit.compared++];
    if (!held.to(at::kCPU).equal(mapped.to(held.scalar_type()))) return lost("differs on the device from what was loaded");
  }
  if (audit.hashed < audit.segments.size() || audit.compared < audit.copies.size()) return false;
  audit_ = BeginAudit(audit.name);
  return true;
}

absl::Status StoredWeights::CheckUnchanged() const {
  for (const auto& file : files_) H3_RETURN_IF_ERROR(file->CheckUnchanged());
  for (const auto& [name, pieces] : tensors_) {
    const std::vector<uint32_t>& versions = versions_.at(name);
    for (size_t i = 0; i < pieces.size(); ++i) {
      if (pieces[i]._version() != versions[i]) {
        return absl::DataLossError(absl::StrCat("base weight ", name, " was written to"));
      }
    }
  }
  return absl::OkStatus();
}

}  // namespace h3
