#include "server/app/process.h"

#include <errno.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <netdb.h>
#include <signal.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstdio>
#include <memory>
#include <thread>

#include "absl/algorithm/container.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/confined_file.h"

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

// INVALID_ARGUMENT: no address to listen on. UNAVAILABLE: it is one, but not for us now.
absl::Status CheckAddress(absl::string_view address, bool unix_too) {
  if (unix_too && absl::ConsumePrefix(&address, "unix:")) {
    return address.empty() ? absl::InvalidArgumentError("unix: needs a path") : absl::OkStatus();
  }
  const size_t colon = address.rfind(':');
  if (colon == absl::string_view::npos || colon == 0) {
    return absl::InvalidArgumentError(unix_too ? "needs HOST:PORT or unix:PATH" : "needs HOST:PORT");
  }
  absl::string_view host = address.substr(0, colon);
  const absl::string_view port = address.substr(colon + 1);
  int number = 0;
  if (port.empty() || !absl::c_all_of(port, absl::ascii_isdigit) || !absl::SimpleAtoi(port, &number) || number > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("the port \"", port, "\" is not a number from 0 to 65535"));
  }
  const bool opened = absl::ConsumePrefix(&host, "["), closed = absl::ConsumeSuffix(&host, "]");
  if (opened != closed || (absl::StrContains(host, ':') && !opened)) {
    return absl::InvalidArgumentError("an IPv6 address goes in brackets: [::1]:50051");
  }
  const addrinfo hints = {.ai_flags = AI_PASSIVE, .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM};
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(std::string(host).c_str(), std::string(port).c_str(), &hints, &found); error != 0) {
    return absl::InvalidArgumentError(absl::StrCat("\"", host, "\" is no host that is known here (", gai_strerror(error), ")"));
  }
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> addresses(found, freeaddrinfo);
  int problem = 0;
  for (const addrinfo* it = found; it != nullptr; it = it->ai_next) {
    const FileDescriptor probe(socket(it->ai_family, it->ai_socktype | SOCK_CLOEXEC, it->ai_protocol));
    const int on = 1;
    setsockopt(probe.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));  // Connections that are closing do not count.
    if (bind(probe.get(), it->ai_addr, it->ai_addrlen) == 0) return absl::OkStatus();
    problem = errno;
  }
  switch (problem) {
    case EADDRNOTAVAIL:
      return absl::InvalidArgumentError(absl::StrCat("\"", host, "\" is no address of this machine"));
    case EADDRINUSE:
      return absl::UnavailableError(
          absl::StrCat("port ", port, " is in use by another program; stop it, or take another port (0: a free one)"));
    case EACCES:
      return absl::UnavailableError(absl::StrCat("no permission to listen on port ", port, "; take one above 1023"));
    default:
      return absl::OkStatus();  // The server itself will tell.
  }
}

}  // namespace

int CheckAddresses(const std::vector<AddressFlag>& flags) {
  for (const AddressFlag& flag : flags) {
    const absl::Status status = CheckAddress(flag.address, flag.unix_too);
    if (status.ok()) continue;
    std::fprintf(stderr, "%s %s: %s\n", flag.flag.c_str(), flag.address.c_str(), std::string(status.message()).c_str());
    return absl::IsInvalidArgument(status) ? 2 : 1;
  }
  return 0;
}

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
    return absl::UnavailableError(absl::StrCat("--listen ", listen, ": cannot listen there; ",
                                                unix_socket ? "does its folder exist?" : "is the port taken?"));
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
