// The golden set (tests/golden/README.md): a small H3 with known answers, computed in float64 by other people's code.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "server/format/layout.h"
#include "server/format/request.h"

namespace h3::testing {

// "tests/golden/" + path; tests run in the repository's root.
std::string GoldenPath(const std::string& path);

// Every tensor of a safetensors file, by name. Aborts the test program when the file cannot be read: the golden set is a part of
// the checkout.
std::map<std::string, HostTensor> ReadTensors(const std::string& path);
std::map<std::string, std::string> ReadMetadata(const std::string& path);

// Values of a float or integer tensor as float64.
std::vector<double> Values(const HostTensor& tensor);

// |got - want| / |want|.
double RelativeL2(const std::vector<double>& got, const std::vector<double>& want);

struct GoldenCase {
  std::string name;
  std::string model;  // "full", "pruned".
  std::vector<StackEntry> stack;
  std::string input;
  int64_t evaluations = 0;  // 0: one model evaluation.
  std::optional<uint64_t> seed;
};
std::vector<GoldenCase> GoldenCases();

// A request file of golden/inputs: its layout, and the tensors that a request sends.
struct GoldenInput {
  RequestLayout request;
  std::map<std::string, HostTensor> tensors;
};
GoldenInput ReadGoldenInput(const std::string& name);

}  // namespace h3::testing
