#include "server/app/process.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <cstdio>
#include <thread>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace h3 {
namespace {

constexpr int kMaxMessageBytes = 8 << 20;
constexpr int kMaxStreamsPerConnection = 1024;

sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

}  // namespace

void SetUpLogging(const std::string& program) {
  auto logger = spdlog::stderr_logger_mt(program);
  logger->set_pattern("%Y-%m-%dT%H:%M:%S.%eZ %l %n: %v", spdlog::pattern_time_type::utc);
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

void BlockStopSignals() {
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
  signal(SIGXFSZ, SIG_IGN);  // A file size limit is a full disk, and told as one.
}

void OnStopSignal(std::function<void()> drain) {
  std::thread([drain = std::move(drain)] {
    const sigset_t signals = StopSignals();
    int signal = 0;
    sigwait(&signals, &signal);
    spdlog::info("draining: no new work, what runs is finished (a second signal ends at once)");
    std::thread(drain).detach();
    sigwait(&signals, &signal);
    spdlog::warn("ended by a second signal");
    _exit(1);
  }).detach();
}

absl::StatusOr<ListeningServer> Listen(const std::string& listen, const std::vector<grpc::Service*>& services) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(listen, grpc::InsecureServerCredentials(), &port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  builder.SetMaxReceiveMessageSize(kMaxMessageBytes);
  builder.SetMaxSendMessageSize(kMaxMessageBytes);
  // A silent minute must not cut a call: pings are welcome every 500 ms (a scheduler's), with or without calls, and dead peers
  // are found.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 500);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 20000);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kMaxStreamsPerConnection);
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  ListeningServer listening;
  listening.server = builder.BuildAndStart();
  const bool unix_socket = absl::StartsWith(listen, "unix:");
  if (listening.server == nullptr || (port == 0 && !unix_socket)) {
    return absl::UnavailableError(absl::StrCat("cannot listen on ", listen, "; is the port taken?"));
  }
  listening.address = unix_socket ? listen : absl::StrCat(listen.substr(0, listen.rfind(':')), ":", port);
  return listening;
}

void SetReady(grpc::Server& server, const std::vector<std::string>& service_names, bool ready) {
  grpc::HealthCheckServiceInterface& health = *server.GetHealthCheckService();
  health.SetServingStatus("", true);
  health.SetServingStatus("liveness", true);
  health.SetServingStatus("readiness", ready);
  for (const std::string& name : service_names) health.SetServingStatus(name, ready);
}

void LeaveNow(int code) {
  spdlog::default_logger()->flush();
  std::fflush(stdout);
  _exit(code);
}

void PrintReady(const std::string& grpc, const std::string& metrics) {
  std::printf("ready grpc=%s metrics=%s\n", grpc.c_str(), metrics.c_str());
  std::fflush(stdout);
}

}  // namespace h3
