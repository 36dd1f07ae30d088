// h3ctl: parse, connect, run, report.

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <iostream>
#include <string>
#include <thread>

#include "absl/strings/match.h"
#include "absl/types/span.h"
#include "client/cli/app.h"
#include "client/cli/exit_code.h"

namespace h3::ctl {
namespace {

int Fail(const absl::Status& status, bool json) {
  if (json) {
    std::cerr << ErrorJson(status) << std::endl;
  } else {
    std::cerr << "h3ctl: " << ErrorLine(status) << std::endl;
  }
  return ExitCode(status);
}

// A command line that does not parse may still have asked for JSON.
bool AsksForJson(absl::Span<const char* const> args) {
  for (const char* const arg : args) {
    if (absl::string_view(arg) == "--json") return true;
  }
  return false;
}

// Waits for Ctrl-C (or SIGTERM) on a thread of its own: the first cancels, the second ends the process at once.
void StartInterruptThread(const sigset_t& signals, client::Canceller& interrupt) {
  std::thread([signals, &interrupt] {
    int signal = 0;
    sigwait(&signals, &signal);
    interrupt.Cancel();
    sigwait(&signals, &signal);
    _exit(ExitCode(absl::CancelledError()));
  }).detach();
}

int Main(int argc, const char* const* argv) {
  const absl::StatusOr<Invocation> invocation = ParseCommandLine(argc, argv);
  if (!invocation.ok()) return Fail(invocation.status(), AsksForJson(absl::MakeConstSpan(argv, static_cast<size_t>(argc))));
  if (!invocation->help.empty()) {
    std::cout << invocation->help << std::flush;
    return 0;
  }
  // Blocked before gRPC makes threads, which inherit it.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  client::Canceller& interrupt = *new client::Canceller;  // Never destroyed: its thread ends with the process.
  StartInterruptThread(signals, interrupt);

  client::Client client(invocation->server);
  Context context = {.client = client,
                     .interrupt = interrupt,
                     .out = std::cout,
                     .err = std::cerr,
                     .json = invocation->json,
                     .terminal = isatty(STDOUT_FILENO) == 1,
                     .err_terminal = isatty(STDERR_FILENO) == 1};
  const absl::Status status = invocation->run(context);
  return status.ok() ? 0 : Fail(status, invocation->json);
}

}  // namespace
}  // namespace h3::ctl

int main(int argc, char** argv) { return h3::ctl::Main(argc, argv); }
