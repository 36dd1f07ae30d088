// A local h3-worker: started, watched and started again, by one thread of its own.
#pragma once

#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/time.h"

namespace h3 {

struct WorkerProcessOptions {
  std::string binary;
  std::vector<std::string> arguments;  // Without the program's name.
  // On the supervising thread. `ready`: the text after "ready " of the line that it prints when it serves.
  std::function<void(const std::string& ready)> on_ready;
  // It ended: what with, how often it has ended before, and when it is started again.
  std::function<void(const std::string& how, int restarts, absl::Duration delay)> on_lost;
};

// Starts at construction; restarts with RestartBackoff until destroyed. The child leaves when this process does (its stdin is a
// pipe of ours), and when this object does (SIGTERM, then SIGKILL after the grace time).
class WorkerProcess {
 public:
  explicit WorkerProcess(WorkerProcessOptions options);
  ~WorkerProcess();
  WorkerProcess(const WorkerProcess&) = delete;
  WorkerProcess& operator=(const WorkerProcess&) = delete;

 private:
  // One life of the child. How it ended.
  std::string RunOnce();
  void Supervise();

  const WorkerProcessOptions options_;
  int stop_pipe_[2] = {-1, -1};  // Written to once, to stop the thread.
  std::thread thread_;
};

}  // namespace h3
