// One adapter on the device: its tensors, copied from the file and immutable, in the base's own row order. Strength, factors and
// overrides are not here; they belong to requests.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "server/base/bytes.h"
#include "server/format/adapter.h"
#include "server/format/adapter_shape.h"
#include "server/model/resident_model.h"
#include "server/nn/site.h"

namespace h3 {

struct ResidentLowRank {
  at::Tensor a;  // [rank, in]
  at::Tensor b;  // [range.count, rank]
  MagnitudeAxis magnitude_axis = MagnitudeAxis::kNone;
  at::Tensor magnitude;  // float32 [range.count] (rows) or [in] (columns).
  at::Tensor covered;    // float32 [range.count], 1 where the adapter has the row; undefined: everywhere.
};

struct ResidentKronecker {
  at::Tensor w1, w2;
  at::Tensor row_order;  // As KroneckerOp's.
};

struct ResidentOffset {
  at::Tensor offset;  // [range.count]
};

struct ResidentDifference {
  at::Tensor difference;  // [range.count, in]
};

struct ResidentTerm {
  int site = 0;
  OutRange range;  // In the base's stored row order.
  std::variant<ResidentLowRank, ResidentKronecker, ResidentOffset, ResidentDifference> what;
  int64_t rank = 0;
  double alpha = 0;
  double scale = 1;  // As the file says.
  bool root_rank = false;  // rsLoRA: an overriding alpha is divided by sqrt(rank).
  std::string scale_source;
  AdalnFeatures features = AdalnFeatures::kBase;
};

struct ResidentNormOffset {
  std::string tensor;
  at::Tensor offset;  // float32 [n]
};

struct ResidentCurve {
  at::Tensor table;  // float32 [rows, width]
  std::vector<at::Tensor> weights;
  std::vector<at::Tensor> biases;
};

struct ResidentAdapter {
  std::string name;    // As it was first loaded under; an alias.
  std::string digest;  // Hex SHA-256 of the file.
  std::vector<ResidentTerm> terms;  // In site order; the manifest's.
  std::vector<ResidentNormOffset> norm_offsets;
  std::vector<ResidentCurve> curves;  // At most one.
  at::Tensor own_table;               // float32 [rows, width], where a term's features are kOwnTable.
  std::vector<std::string> left_out;
  std::vector<std::string> warnings;
  std::string format;
  bool own_scale = true;  // False: the scales of its terms mean nothing until a stack gives alpha.
  ByteCount bytes;     // On the device, all tensors above.
  AdapterShape shape;  // For the planner.
};

// Copies the terms of `manifest` out of `file` (the whole file, from its first byte) to the model's device: to the compute type
// at block linears, as stored elsewhere (float64 as float32). Every factor is checked to be finite.
// INVALID_ARGUMENT / NOT_FINITE with the tensor. RESOURCE_EXHAUSTED / VRAM_EXCEEDED. A failure leaves nothing behind.
absl::StatusOr<std::shared_ptr<ResidentAdapter>> MakeResident(const ResidentModel& model, const AdapterManifest& manifest,
                                                                    absl::string_view file, std::string name, std::string digest);

// A term of [out, in] size, which only apply=materialized may use; null: there is none.
const ResidentTerm* WholeDifference(const ResidentAdapter& adapter);

// What a merging runtime would hold a second time: the weight of each distinct target, in the base's type.
ByteCount MergedBytes(const ResidentModel& model, const std::vector<const ResidentAdapter*>& adapters);

}  // namespace h3
