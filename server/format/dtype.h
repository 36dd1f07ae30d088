// Element types of the safetensors format.
#pragma once

#include <cstdint>
#include <optional>

#include "absl/strings/string_view.h"

namespace h3 {

enum class DType { kF64, kF32, kF16, kBF16, kF8E4M3, kF8E5M2, kI64, kI32, kI16, kI8, kU64, kU32, kU16, kU8, kBool };

// "F32", "BF16", ...: the spelling of the safetensors header. nullopt for anything else.
std::optional<DType> ParseDType(absl::string_view name);
absl::string_view DTypeName(DType dtype);
int64_t DTypeBytes(DType dtype);

// float64, float32, float16, bfloat16: what adapter factors may be stored as.
bool IsFloat(DType dtype);

}  // namespace h3
