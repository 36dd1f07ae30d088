// A sampling run from C++: two adapters at different strengths, on made-up text conditioning. Usage: generate HOST:PORT
// [ADAPTER...] Against the small checkpoint of tests/golden: the sizes below are its own.

#include <iostream>
#include <string>
#include <vector>

#include "client/client.h"
#include "proto/support/status.h"

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: generate HOST:PORT [ADAPTER...]\n";
    return 2;
  }
  h3::client::Client client(argv[1]);

  // What is to be made: 3 x 4 x 6 latents of video (x 16 pixels), 5 latents of sound (1/8 s), from 7 text tokens.
  h3::v1::GenerateHeader header;
  header.mutable_layout()->set_text_tokens(7);
  header.mutable_layout()->set_latent_frames(3);
  header.mutable_layout()->set_latent_height(4);
  header.mutable_layout()->set_latent_width(6);
  header.mutable_layout()->set_audio_latents(5);
  header.mutable_sampling()->set_seed(7);
  header.mutable_sampling()->set_evaluations(8);
  // The stack is an argument of the request: nothing on the server changes for it.
  for (int i = 2; i < argc; ++i) {
    h3::v1::StackEntry& entry = *header.add_stack();
    entry.set_adapter(argv[i]);
    entry.set_strength(1.0 / (i - 1));
  }

  // Your text encoder's output goes here. The bytes are borrowed until Generate returns.
  constexpr int64_t kTokens = 7, kTextWidth = 40;
  const std::vector<float> text(kTokens * kTextWidth, 0.1f);
  const std::vector<int64_t> tags(kTokens, 1);  // 1: text; 0: a row of a vision block.
  const auto bytes = [](const auto& values) {
    return absl::string_view(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(values[0]));
  };
  const std::vector<h3::client::TensorView> tensors = {
      {.name = "text", .dtype = h3::v1::DTYPE_F32, .shape = {kTokens, kTextWidth}, .data = bytes(text)},
      {.name = "text_token_tags", .dtype = h3::v1::DTYPE_I64, .shape = {kTokens}, .data = bytes(tags)}};

  const auto result = client.Generate(header, tensors, {.progress = [](const h3::v1::Progress& p) {
                                        std::cout << "step " << p.step() << " of " << p.steps() << "\n";
                                      }});
  if (!result.ok()) {
    std::cerr << h3::ReasonOf(result.status()) << ": " << result.status().message() << "\n";
    return 1;
  }
  for (const h3::client::Tensor& tensor : result->tensors) {
    std::cout << tensor.name << " [";
    for (const int64_t size : tensor.shape) std::cout << " " << size;
    std::cout << " ], " << tensor.data.size() << " bytes\n";
  }
  return 0;
}
