#include "server/scheduler/worker_process.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {  // Debian 12's header lacks it.
#include <sys/pidfd.h>
}

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "absl/time/clock.h"
#include "server/base/check.h"
#include "server/scheduler/backoff.h"

extern char** environ;

namespace h3 {
namespace {

constexpr int kGraceMs = 10'000;
constexpr size_t kMaxLine = 4096;

struct Child {
  pid_t pid = -1;
  int pidfd = -1;
  int lifeline = -1;  // The write end of its stdin: it leaves when this closes.
  int output = -1;    // The read end of its stdout.

  ~Child() {
    for (const int fd : {pidfd, lifeline, output}) {
      if (fd >= 0) close(fd);
    }
  }
};

// Everything but stdin, stdout and stderr is closed in the child, signals are as new, and it has a process group of its own, so
// that a terminal's Ctrl-C reaches only us.
bool Spawn(const std::string& binary, const std::vector<std::string>& arguments, Child& child) {
  int input[2], output[2];
  if (pipe2(input, O_CLOEXEC) != 0) return false;
  if (pipe2(output, O_CLOEXEC) != 0) {
    close(input[0]);
    close(input[1]);
    return false;
  }
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_adddup2(&actions, input[0], STDIN_FILENO);
  posix_spawn_file_actions_adddup2(&actions, output[1], STDOUT_FILENO);
  posix_spawn_file_actions_addclosefrom_np(&actions, STDERR_FILENO + 1);
  posix_spawnattr_t attributes;
  posix_spawnattr_init(&attributes);
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setsigmask(&attributes, &none);
  posix_spawnattr_setsigdefault(&attributes, &all);
  posix_spawnattr_setpgroup(&attributes, 0);
  posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF | POSIX_SPAWN_SETPGROUP);
  std::vector<char*> argv = {const_cast<char*>(binary.c_str())};
  for (const std::string& argument : arguments) argv.push_back(const_cast<char*>(argument.c_str()));
  argv.push_back(nullptr);
  const int error = posix_spawn(&child.pid, binary.c_str(), &actions, &attributes, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  posix_spawnattr_destroy(&attributes);
  close(input[0]);
  close(output[1]);
  child.lifeline = input[1];
  child.output = output[0];
  if (error != 0) {
    errno = error;
    child.pid = -1;
    return false;
  }
  child.pidfd = pidfd_open(child.pid, 0);
  return true;
}

std::string Describe(int status) {
  if (WIFSIGNALED(status)) return absl::StrCat("ended by signal ", WTERMSIG(status), " (", strsignal(WTERMSIG(status)), ")");
  return absl::StrCat("ended with exit code ", WEXITSTATUS(status));
}

}  // namespace

WorkerProcess::WorkerProcess(WorkerProcessOptions options) : options_(std::move(options)) {
  H3_CHECK(pipe2(stop_pipe_, O_CLOEXEC) == 0);
  thread_ = std::thread([this] { Supervise(); });
}

WorkerProcess::~WorkerProcess() {
  [[maybe_unused]] const ssize_t written = write(stop_pipe_[1], "x", 1);
  thread_.join();
  close(stop_pipe_[0]);
  close(stop_pipe_[1]);
}

void WorkerProcess::Supervise() {
  RestartBackoff backoff;
  for (int restarts = 0;; ++restarts) {
    const absl::Time start = absl::Now();
    const std::string how = RunOnce();
    pollfd stop = {stop_pipe_[0], POLLIN, 0};
    if (poll(&stop, 1, 0) > 0) return;
    const absl::Duration delay = backoff.NextDelay(absl::Now() - start);
    options_.on_lost(how, restarts, delay);
    if (poll(&stop, 1, static_cast<int>(absl::ToInt64Milliseconds(delay))) > 0) return;
  }
}

std::string WorkerProcess::RunOnce() {
  Child child;
  if (!Spawn(options_.binary, options_.arguments, child)) return absl::StrCat("cannot be started: ", strerror(errno));
  std::string line;
  bool stopping = false;
  absl::Time kill_at = absl::InfiniteFuture();
  for (;;) {
    pollfd fds[3] = {{child.pidfd, POLLIN, 0}, {child.output, POLLIN, 0}, {stopping ? -1 : stop_pipe_[0], POLLIN, 0}};
    poll(fds, 3, stopping ? 200 : -1);
    if (fds[1].revents & (POLLIN | POLLHUP)) {
      char buffer[4096];
      const ssize_t got = read(child.output, buffer, sizeof(buffer));
      if (got <= 0) {
        close(child.output);
        child.output = -1;
      }
      for (ssize_t i = 0; i < got; ++i) {
        if (buffer[i] != '\n') {
          if (line.size() < kMaxLine) line.push_back(buffer[i]);
          continue;
        }
        absl::string_view text = line;
        if (absl::ConsumePrefix(&text, "ready ")) options_.on_ready(std::string(text));
        line.clear();
      }
    }
    if (fds[0].revents & POLLIN) {
      int status = 0;
      waitpid(child.pid, &status, 0);
      return Describe(status);
    }
    if (!stopping && (fds[2].revents & POLLIN)) {
      stopping = true;
      kill(child.pid, SIGTERM);
      kill_at = absl::Now() + absl::Milliseconds(kGraceMs);
    }
    if (absl::Now() >= kill_at) kill(child.pid, SIGKILL);
  }
}

}  // namespace h3
