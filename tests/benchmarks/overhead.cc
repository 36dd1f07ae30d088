// Sends one request over and over from some clients at once, each with a connection of its own, and prints what each took as JSON lines:
// {"seconds", "accepted", "engine"}: from the call to its last tensor, to `accepted`, and of that in the engine (prepare and denoise).
// Last a line {"wall", "clients"}. For overhead.py.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "client/cli/request_file.h"
#include "client/client.h"

int main(int argc, char** argv) {
  CLI::App app("Times requests of a server; see overhead.py");
  std::string server, file;
  int clients = 1, requests = 100, warm = 20;
  app.add_option("--server", server)->required();
  app.add_option("--request", file)->required();
  app.add_option("--clients", clients);
  app.add_option("--requests", requests, "Of each client");
  app.add_option("--warm", warm, "Of each client, before");
  CLI11_PARSE(app, argc, argv);
  const auto request = h3::ctl::RequestFile::Open(file);
  if (!request.ok()) {
    std::fprintf(stderr, "%s\n", std::string(request.status().message()).c_str());
    return 1;
  }

  struct Sample {
    double seconds, accepted, engine;
  };
  std::vector<std::vector<Sample>> samples(clients);
  std::vector<absl::Time> begins(clients);
  std::vector<std::thread> threads;
  std::mutex failing;
  for (int i = 0; i < clients; ++i) {
    threads.emplace_back([&, i] {
      h3::client::Client client(server);
      for (int j = -warm; j < requests; ++j) {
        if (j == 0) begins[i] = absl::Now();
        h3::v1::GenerateHeader header;
        *header.mutable_layout() = request->layout();
        header.mutable_sampling()->set_seed(7);
        header.mutable_sampling()->set_evaluations(1);
        const absl::Time begin = absl::Now();
        absl::Time accepted;
        const auto result = client.Generate(std::move(header), request->conditions(),
                                            {.accepted = [&](const h3::v1::Accepted&) { accepted = absl::Now(); }});
        const absl::Time end = absl::Now();
        if (!result.ok()) {
          const std::lock_guard<std::mutex> lock(failing);
          std::fprintf(stderr, "%s\n", result.status().ToString().c_str());
          std::exit(1);
        }
        if (j < 0) continue;
        samples[i].push_back({absl::ToDoubleSeconds(end - begin), absl::ToDoubleSeconds(accepted - begin),
                              result->completed.prepare_seconds() + result->completed.denoise_seconds()});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const absl::Time end = absl::Now();
  absl::Time begin = begins[0];
  for (const absl::Time time : begins) begin = std::min(begin, time);
  for (const auto& of_client : samples) {
    for (const Sample& sample : of_client)
      std::printf("{\"seconds\": %.7f, \"accepted\": %.7f, \"engine\": %.7f}\n", sample.seconds, sample.accepted, sample.engine);
  }
  std::printf("{\"wall\": %.6f, \"clients\": %d}\n", absl::ToDoubleSeconds(end - begin), clients);
  return 0;
}
