// Command lines of h3ctl against a server in this process, as main runs them.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_split.h"
#include "client/cli/app.h"
#include "tests/unit/client/fake_server.h"

namespace h3::testing {

class CommandTest : public ::testing::Test {
 protected:
  CommandTest() : client_(server_.Connect()) {
    std::string pattern = (std::filesystem::temp_directory_path() / "h3ctl-test-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
  }
  ~CommandTest() override { std::filesystem::remove_all(folder_); }

  std::string Output() const { return (folder_ / "out.safetensors").string(); }

  // Parses and runs a command line as main does.
  absl::Status Run(std::vector<const char*> args) {
    args.insert(args.begin(), "h3ctl");
    const auto invocation = ctl::ParseCommandLine(static_cast<int>(args.size()), args.data());
    if (!invocation.ok()) return invocation.status();
    ctl::Context context = {.client = *client_,
                            .interrupt = interrupt_,
                            .out = out_,
                            .err = err_,
                            .json = invocation->json,
                            .terminal = terminal_};
    return invocation->run(context);
  }

  std::vector<nlohmann::json> Lines() const {
    std::vector<nlohmann::json> lines;
    for (const auto line : absl::StrSplit(out_.str(), '\n', absl::SkipEmpty())) lines.push_back(nlohmann::json::parse(line));
    return lines;
  }

  FakeServer server_;
  const std::unique_ptr<client::Client> client_;
  client::Canceller interrupt_;
  std::ostringstream out_, err_;
  bool terminal_ = false;
  std::filesystem::path folder_;
};

}  // namespace h3::testing
