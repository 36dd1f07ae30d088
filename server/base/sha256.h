// SHA-256, the identity of adapters and weights.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/strings/string_view.h"

namespace h3 {

// Incremental. Thread-compatible.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;

  void Update(absl::string_view bytes);
  // 32 bytes. Once.
  std::string Finish();
  // 64 lower-case hex digits. Once.
  std::string FinishHex();

 private:
  void* const context_;  // EVP_MD_CTX
};

// 64 lower-case hex digits.
std::string Sha256Hex(absl::string_view bytes);

}  // namespace h3
