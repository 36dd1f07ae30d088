// A bidirectional stream on the client side, tamed like StreamCall: one read at a time, one write at a time. What a scheduler
// relays to a worker goes through it.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/client_callback.h>

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace h3 {

// Owns itself from Begin until OnEnd has been called.
template <typename Request, typename Response>
class ClientStream : public grpc::ClientBidiReactor<Request, Response>,
                     public std::enable_shared_from_this<ClientStream<Request, Response>> {
 public:
  using Source = std::function<bool(Request&)>;

  // After the stub's async method was called with this reactor: starts the call and the first read.
  void Begin() {
    self_ = this->shared_from_this();
    this->AddHold();  // Operations start outside of reactions; given back when the reads have ended.
    this->StartRead(&response_);
    this->StartCall();
  }
  grpc::ClientContext* context() { return &context_; }

  // Thread-safe, in order.
  void SendAll(Source source) ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      sources_.push_back(std::move(source));
    }
    Pump();
  }
  void Send(Request message) {
    auto once = std::make_shared<std::optional<Request>>(std::move(message));
    SendAll([once](Request& out) {
      if (!once->has_value()) return false;
      out = std::move(**once);
      once->reset();
      return true;
    });
  }
  // Nothing more will be sent.
  void HalfClose() ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      half_close_ = true;
    }
    Pump();
  }
  // Asks for the next message, if it is not being waited for already: then or later after each OnMessage. Thread-safe.
  void ReadMore() ABSL_LOCKS_EXCLUDED(mu_) {
    {
      absl::MutexLock lock(&mu_);
      if (reading_) return;
      reading_ = true;
    }
    this->StartRead(&response_);
  }
  // Thread-safe. What still comes is read and dropped; OnEnd follows.
  void Cancel() ABSL_LOCKS_EXCLUDED(mu_) {
    context_.TryCancel();
    {
      absl::MutexLock lock(&mu_);
      cancelled_ = true;
    }
    ReadMore();
  }

 protected:
  // Must not block. Call ReadMore then or later, or the call never ends.
  virtual void OnMessage(Response response) = 0;
  // Everything that was to be sent has been sent.
  virtual void OnDrained() {}
  virtual void OnEnd(const grpc::Status& status) = 0;

 private:
  void OnReadDone(bool ok) final {
    if (ok) {
      Response response = std::move(response_);  // The next read may fill it as soon as more is wanted.
      bool dropped = false;
      {
        absl::MutexLock lock(&mu_);
        reading_ = false;
        dropped = cancelled_;
      }
      return dropped ? ReadMore() : OnMessage(std::move(response));
    }
    {
      absl::MutexLock lock(&mu_);
      ended_ = true;  // And reading_ stays: nothing is read after the end.
      if (starting_) return;  // Pump gives the hold back.
    }
    this->RemoveHold();
  }
  void OnWriteDone(bool ok) final {
    {
      absl::MutexLock lock(&mu_);
      writing_ = false;
      if (!ok) sources_.clear();
    }
    Pump();
  }
  void OnDone(const grpc::Status& status) final {
    OnEnd(status);
    self_.reset();
  }

  // Writes what is next. Decides under the lock, acts without it.
  void Pump() ABSL_LOCKS_EXCLUDED(mu_) {
    enum { kWrite, kHalfClose, kDrained } action = kDrained;
    {
      absl::MutexLock lock(&mu_);
      if (writing_ || starting_ || ended_ || half_closed_) return;
      while (!sources_.empty()) {
        request_.Clear();
        if (sources_.front()(request_)) {
          action = kWrite;
          break;
        }
        sources_.pop_front();
      }
      if (action == kWrite) {
        writing_ = starting_ = true;
      } else if (half_close_) {
        action = kHalfClose;
        half_closed_ = starting_ = true;
      }
    }
    if (action == kDrained) return OnDrained();
    if (action == kWrite) {
      this->StartWrite(&request_);
    } else {
      this->StartWritesDone();
    }
    bool release = false, again = false;
    {
      absl::MutexLock lock(&mu_);
      starting_ = false;
      release = ended_;
      again = !writing_;
    }
    if (release) {
      this->RemoveHold();
    } else if (again) {
      Pump();
    }
  }

  grpc::ClientContext context_;
  std::shared_ptr<ClientStream> self_;
  Request request_;
  Response response_;
  absl::Mutex mu_;
  std::deque<Source> sources_ ABSL_GUARDED_BY(mu_);
  bool writing_ ABSL_GUARDED_BY(mu_) = false;
  bool starting_ ABSL_GUARDED_BY(mu_) = false;  // An operation is being started: the hold must stay.
  bool reading_ ABSL_GUARDED_BY(mu_) = true;    // Begin starts the first read.
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;     // The reads have ended.
  bool half_close_ ABSL_GUARDED_BY(mu_) = false;
  bool half_closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace h3
