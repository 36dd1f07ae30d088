#include "tests/testing/golden.h"

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>

#include "server/base/check.h"
#include "server/format/safetensors.h"

namespace h3::testing {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  H3_CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

template <typename T>
std::vector<double> As(const HostTensor& tensor) {
  std::vector<T> values(tensor.data.size() / sizeof(T));
  std::memcpy(values.data(), tensor.data.data(), tensor.data.size());
  return {values.begin(), values.end()};
}

}  // namespace

std::string GoldenPath(const std::string& path) { return "tests/golden/" + path; }

std::map<std::string, HostTensor> ReadTensors(const std::string& path) {
  const std::string content = ReadFile(path);
  const auto header = ParseSafetensorsHeader(content, static_cast<int64_t>(content.size()));
  H3_CHECK(header.ok());
  std::map<std::string, HostTensor> tensors;
  for (const TensorInfo& info : header->tensors) {
    tensors[info.name] = {info.name, info.dtype, info.shape,
                          content.substr(static_cast<size_t>(info.offset), static_cast<size_t>(info.bytes))};
  }
  return tensors;
}

std::map<std::string, std::string> ReadMetadata(const std::string& path) {
  const auto header = ReadSafetensorsHeader(path);
  H3_CHECK(header.ok());
  return header->metadata;
}

std::vector<double> Values(const HostTensor& tensor) {
  switch (tensor.dtype) {
    case DType::kF64: return As<double>(tensor);
    case DType::kF32: return As<float>(tensor);
    case DType::kI64: return As<int64_t>(tensor);
    default: H3_CHECK(false); return {};
  }
}

double RelativeL2(const std::vector<double>& got, const std::vector<double>& want) {
  H3_CHECK(got.size() == want.size() && !want.empty());
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

std::vector<GoldenCase> GoldenCases() {
  const nlohmann::json json = nlohmann::json::parse(ReadFile(GoldenPath("cases.json")));
  std::vector<GoldenCase> cases;
  for (const nlohmann::json& c : json["cases"]) {
    GoldenCase golden{.name = c["name"], .model = c["model"], .input = c["input"], .evaluations = c.value("evaluations", 0)};
    if (c.contains("seed")) golden.seed = c["seed"].get<uint64_t>();
    for (const nlohmann::json& s : c["stack"]) {
      StackEntry entry{.adapter = s["file"], .strength = s["strength"]};
      entry.video = s.value("video", 1.0);
      entry.text = s.value("text", 1.0);
      entry.audio = s.value("audio", 1.0);
      if (s.contains("per_evaluation")) entry.per_evaluation = s["per_evaluation"].get<std::vector<double>>();
      if (s.contains("auto_strength")) entry.auto_strength = AutoStrength{s["auto_strength"]["floor"], s["auto_strength"]["ceiling"]};
      golden.stack.push_back(std::move(entry));
    }
    cases.push_back(std::move(golden));
  }
  return cases;
}

GoldenInput ReadGoldenInput(const std::string& name) {
  const std::string path = GoldenPath("inputs/" + name + ".safetensors");
  const auto request = ParseRequestLayout(ReadMetadata(path).at("layout"));
  H3_CHECK(request.ok());
  return {*request, ReadTensors(path)};
}

}  // namespace h3::testing
