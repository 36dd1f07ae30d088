// What both servers' mains share: logs, signals, addresses, the ready line, health.
#pragma once

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace h3 {

// Logs to stderr, one line each: "2026-01-02T03:04:05.678Z info h3-worker: text".
void SetUpLogging(const std::string& program);

// Blocks SIGTERM and SIGINT in this thread and in those it will start. Before any thread.
void BlockStopSignals();

// Waits for stop signals on a thread of its own: the first calls `drain`, the second ends the process at once (exit code 1).
// Lives until the process ends.
void OnStopSignal(std::function<void()> drain);

// An address as it was given on the command line, to listen on.
struct AddressFlag {
  std::string flag;     // "--listen"
  std::string address;  // HOST:PORT
  bool unix_too = false;  // unix:PATH as well.
};

// Whether one can listen on each, asked before anything is loaded. 0, or the exit code, with one plain line on stderr that
// names the flag: 2 where it is no address of this machine, 1 where it is taken or not allowed. Asks the resolver.
int CheckAddresses(const std::vector<AddressFlag>& flags);

// A listening gRPC server.
struct ListeningServer {
  std::unique_ptr<grpc::Server> server;
  std::string address;  // HOST:PORT or unix:PATH, as it listens.
};

// `listen`: HOST:PORT (port 0 picks a free one) or unix:PATH. `services`: served beside health and reflection; their full names
// get a health status of their own. Keepalive, message size and stream limits are set here, alike for both servers. UNAVAILABLE
// when it cannot listen.
absl::StatusOr<ListeningServer> Listen(const std::string& listen, const std::vector<grpc::Service*>& services);

// "" and "liveness" follow the process; "readiness" and each service follow `ready`.
void SetReady(grpc::Server& server, const std::vector<std::string>& service_names, bool ready);

// Ends the process now: after a drain there is nothing left to wait for, and the metrics server would take seconds to stop.
[[noreturn]] void LeaveNow(int code);

// The line that scripts wait for, on stdout: "ready grpc=HOST:PORT metrics=HOST:PORT".
void PrintReady(const std::string& grpc, const std::string& metrics);

}  // namespace h3
