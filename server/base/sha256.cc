#include "server/base/sha256.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "server/base/check.h"

namespace h3 {

Sha256::Sha256() : context_(EVP_MD_CTX_new()) {
  H3_CHECK(EVP_DigestInit_ex(static_cast<EVP_MD_CTX*>(context_), EVP_sha256(), nullptr) == 1);
}

Sha256::~Sha256() { EVP_MD_CTX_free(static_cast<EVP_MD_CTX*>(context_)); }

void Sha256::Update(absl::string_view bytes) {
  H3_CHECK(EVP_DigestUpdate(static_cast<EVP_MD_CTX*>(context_), bytes.data(), bytes.size()) == 1);
}

std::string Sha256::Finish() {
  std::string digest(32, '\0');
  H3_CHECK(EVP_DigestFinal_ex(static_cast<EVP_MD_CTX*>(context_), reinterpret_cast<unsigned char*>(digest.data()), nullptr) == 1);
  return digest;
}

std::string Sha256::FinishHex() { return absl::BytesToHexString(Finish()); }

std::string Sha256Hex(absl::string_view bytes) {
  Sha256 sha;
  sha.Update(bytes);
  return sha.FinishHex();
}

}  // namespace h3
