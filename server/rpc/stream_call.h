// A bidirectional stream on the server side, tamed: one read at a time, one write at a time, one Finish, whoever calls from
// which thread. Both services' streams are made of it.
#pragma once

#include <grpcpp/grpcpp.h>

#include <chrono>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "proto/support/status.h"
#include "server/base/error.h"

namespace h3 {

// Owns itself between Start and the end of the call; others hold shared pointers, and what they send after the end is dropped.
template <typename Request, typename Response>
class StreamCall : public grpc::ServerBidiReactor<Request, Response>,
                   public std::enable_shared_from_this<StreamCall<Request, Response>> {
 public:
  // What is still to be written: fills in the next message, or returns false when there is none left. Called when the stream
  // has room, so that a slow reader costs memory for one message only.
  using Source = std::function<bool(Response&)>;

  explicit StreamCall(grpc::CallbackServerContext* context) : context_(context) {}

  void Start() {
    self_ = this->shared_from_this();
    this->StartRead(&request_);
  }

  // Thread-safe. In the order of the calls. `taken`: called under the stream's lock when the message's turn has come; what drains
  // after that has written it.
  void Send(Response message, std::function<void()> taken = nullptr) {
    auto once = std::make_shared<std::optional<Response>>(std::move(message));
    SendAll([once, taken = std::move(taken)](Response& out) {
      if (!once->has_value()) return false;
      out = std::move(**once);
      once->reset();
      if (taken) taken();
      return true;
    });
  }
  void SendAll(Source source) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      if (close_.has_value()) return;
      sources_.push_back(std::move(source));
    }
    Pump();
  }
  // Thread-safe. Ends the call with `status` after what was sent before; the first one counts. An error drops what is unsent.
  void Close(absl::Status status) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      if (close_.has_value()) return;
      if (!status.ok()) sources_.clear();
      close_ = std::move(status);
    }
    Pump();
  }
  // Asks for the next message. After each OnMessage that wants more.
  void ReadMore() ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      if (close_.has_value() || read_ended_) return;
      ++starting_reads_;
    }
    this->StartRead(&request_);
    {
      absl::MutexLock lock(&mu_);
      --starting_reads_;
    }
    Pump();
  }

  grpc::CallbackServerContext* context() const { return context_; }

 protected:
  // One message. Call ReadMore for the next, then or later. Must not block.
  virtual void OnMessage(Request& request) = 0;
  // The client has said everything.
  virtual void OnHalfClose() = 0;
  // The client is gone, or its deadline has passed: stop. The call is closed already.
  virtual void OnGone(const absl::Status& why) = 0;
  // Everything that was sent has been written.
  virtual void OnDrained() {}
  // The call is over, whatever its end. Last of all.
  virtual void OnEnd() {}

 private:
  void OnReadDone(bool ok) final {
    if (ok) {
      OnMessage(request_);
      return;
    }
    {
      absl::MutexLock lock(&mu_);
      read_ended_ = true;
      if (close_.has_value()) return;
    }
    OnHalfClose();
  }
  void OnWriteDone(bool ok) final {
    {
      absl::MutexLock lock(&mu_);
      writing_ = false;
      if (!ok) sources_.clear();
    }
    Pump();
  }
  void OnCancel() final {
    const bool late = context_->deadline() <= std::chrono::system_clock::now();
    const absl::Status why =
        late ? Refuse(absl::StatusCode::kDeadlineExceeded, reason::kCancelled, "the deadline of the call has passed")
             : Refuse(absl::StatusCode::kCancelled, reason::kCancelled, "cancelled by the client");
    Close(why);
    OnGone(why);
  }
  void OnDone() final {
    OnEnd();
    self_.reset();
  }

  // Writes the next message or finishes, if nothing is being written. Decides under the lock, acts without it: gRPC may run
  // reactions on this very thread.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_) {
    std::optional<absl::Status> finish;
    bool drained = false;
    {
      absl::MutexLock lock(&mu_);
      if (writing_ || finished_) return;
      while (!sources_.empty()) {
        response_.Clear();
        if (sources_.front()(response_)) {
          writing_ = true;
          break;
        }
        sources_.pop_front();
      }
      if (!writing_) {
        if (starting_reads_ > 0) return;  // No operation may begin after Finish.
        drained = !close_.has_value();
        if (!drained) {
          finished_ = true;
          finish = *close_;
        }
      }
    }
    if (drained) {
      OnDrained();
    } else if (finish.has_value()) {
      this->Finish(ToGrpc(*finish));
    } else {
      this->StartWrite(&response_);
    }
  }

  grpc::CallbackServerContext* const context_;
  std::shared_ptr<StreamCall> self_;
  Request request_;    // Of the one outstanding read.
  Response response_;  // Of the one outstanding write; guarded by writing_.
  absl::Mutex mu_;
  std::deque<Source> sources_ ABSL_GUARDED_BY(mu_);
  std::optional<absl::Status> close_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  bool read_ended_ ABSL_GUARDED_BY(mu_) = false;
  // Threads inside StartRead. Its reaction may run, and read on, before it returns.
  int starting_reads_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace h3
