#include "server/format/dtype.h"

#include <array>
#include <utility>

#include "server/base/check.h"

namespace h3 {
namespace {

struct DTypeLine {
  DType dtype;
  absl::string_view name;
  int64_t bytes;
};

constexpr std::array<DTypeLine, 15> kDTypes = {{{DType::kF64, "F64", 8},
                                                {DType::kF32, "F32", 4},
                                                {DType::kF16, "F16", 2},
                                                {DType::kBF16, "BF16", 2},
                                                {DType::kF8E4M3, "F8_E4M3", 1},
                                                {DType::kF8E5M2, "F8_E5M2", 1},
                                                {DType::kI64, "I64", 8},
                                                {DType::kI32, "I32", 4},
                                                {DType::kI16, "I16", 2},
                                                {DType::kI8, "I8", 1},
                                                {DType::kU64, "U64", 8},
                                                {DType::kU32, "U32", 4},
                                                {DType::kU16, "U16", 2},
                                                {DType::kU8, "U8", 1},
                                                {DType::kBool, "BOOL", 1}}};

const DTypeLine& LineOf(DType dtype) {
  for (const DTypeLine& line : kDTypes) {
    if (line.dtype == dtype) return line;
  }
  H3_CHECK(false);
  return kDTypes.front();
}

}  // namespace

std::optional<DType> ParseDType(absl::string_view name) {
  for (const DTypeLine& line : kDTypes) {
    if (line.name == name) return line.dtype;
  }
  return std::nullopt;
}

absl::string_view DTypeName(DType dtype) { return LineOf(dtype).name; }

int64_t DTypeBytes(DType dtype) { return LineOf(dtype).bytes; }

bool IsFloat(DType dtype) {
  return dtype == DType::kF64 || dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

}  // namespace h3
