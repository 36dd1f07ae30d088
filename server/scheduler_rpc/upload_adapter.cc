#include <grpcpp/alarm.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/scheduler_rpc/adapter_check.h"
#include "server/scheduler_rpc/scheduler_services.h"

namespace h3 {
namespace {

constexpr size_t kMaxChunk = 1 << 20;
constexpr size_t kDigestChars = 64;
constexpr std::chrono::minutes kIdle{1};
// Each takes room on the disk by its announcement alone.
constexpr int kMaxUploads = 16;

std::atomic<int> uploads{0};

// One upload. Messages are read one at a time, each taken on the file thread before the next is asked for, so that a fast client
// waits for the disk.
// A client that announces and then says nothing for a minute loses its call, and the room that was taken for it.
class UploadCall final : public grpc::ServerReadReactor<v1::UploadAdapterRequest> {
 public:
  UploadCall(SchedulerCore& core, grpc::CallbackServerContext* context, v1::UploadAdapterResponse* response)
      : core_(core), context_(context), response_(response) {
    uploads.fetch_add(1);
    Read();
  }
  ~UploadCall() override { uploads.fetch_sub(1); }

  void OnReadDone(bool ok) override {
    core_.ContinueFileWork([this, ok] {
      if (cancelled_.load()) return End(absl::CancelledError("the client is gone, or said nothing for too long"));
      if (!ok) return Complete();
      if (const absl::Status status = Take(); !status.ok()) return End(status);
      Read();
    });
  }
  void OnCancel() override { cancelled_.store(true); }
  void OnDone() override { delete this; }

 private:
  void Read() {
    idle_ = std::make_unique<grpc::Alarm>();
    idle_->Set(std::chrono::system_clock::now() + kIdle, [context = context_](bool passed) {
      if (passed) context->TryCancel();
    });
    StartRead(&request_);
  }

  // From here on the file thread.
  absl::Status Take() {
    if (request_.has_header()) {
      if (header_.has_value()) return RefuseArgument(reason::kBadRequest, "a second header");
      H3_RETURN_IF_ERROR(core_.CheckServing());
      header_ = std::move(*request_.mutable_header());
      return Begin();
    }
    if (incoming_ == nullptr) return RefuseArgument(reason::kBadRequest, "an upload begins with its header");
    if (request_.chunk().size() > kMaxChunk) return RefuseArgument(reason::kBadRequest, "a chunk of more than 1 MiB");
    return incoming_->Append(request_.chunk());
  }

  absl::Status Begin() {
    const std::string& digest = header_->digest();
    const bool hex = digest.size() == kDigestChars && digest.find_first_not_of("0123456789abcdef") == std::string::npos;
    if (!hex) return RefuseArgument(reason::kBadRequest, "digest is not 64 lower-case hexadecimal digits", {{"field", "digest"}});
    const auto most = static_cast<uint64_t>(core_.options().max_upload_bytes);
    if (header_->bytes() == 0 || header_->bytes() > most) {
      return RefuseArgument(reason::kBadRequest,
                            absl::StrCat("an upload of ", header_->bytes(), " bytes; 1 to ", most, " are taken (--max-upload)"), {{"field", "bytes"}});
    }
    if (uploads.load() > kMaxUploads) {
      return Refuse(absl::StatusCode::kResourceExhausted, reason::kQueueFull,
                    absl::StrCat("more than ", kMaxUploads, " uploads at once; try again later"), {{"retry_seconds", "5"}});
    }
    if (!header_->check_only()) H3_RETURN_IF_ERROR(core_.registry().CheckUploadName(header_->name()));
    H3_ASSIGN_OR_RETURN(incoming_, core_.registry().content().Begin(digest, static_cast<int64_t>(header_->bytes())));
    return absl::OkStatus();
  }

  void Complete() {
    if (incoming_ == nullptr) return End(RefuseArgument(reason::kBadRequest, "the call ended before its header"));
    idle_.reset();
    const bool known = core_.registry().content().Has(header_->digest());
    if (const absl::Status status = incoming_->Commit(); !status.ok()) return End(status);
    const std::string content = absl::StrCat("sha256:", header_->digest());
    const bool check_only = header_->check_only();
    // What is no safetensors file never gets a name.
    const auto forget = [this, known] {
      // What was there before may be what an accepted request waits for.
      if (!known) core_.registry().ForgetUnnamed(header_->digest()).IgnoreError();
    };
    if (const auto found = core_.registry().Find(content); !found.ok() && !check_only) {
      forget();
      return End(found.status());
    }
    if (!check_only) {
      auto replaced = core_.registry().NameUpload(header_->name(), header_->digest());
      if (!replaced.ok()) {
        forget();
        return End(replaced.status());
      }
      // What it replaces stays until the next start: requests that were accepted with it may still wait.
      response_->set_replaced(*replaced);
    }
    CheckAdapter(core_, check_only ? content : header_->name(), [this, check_only, forget](absl::StatusOr<v1::AdapterReport> report) {
      core_.ContinueFileWork([this, check_only, forget, report = std::move(report)]() mutable {
        if (check_only) forget();
        if (report.ok()) {
          *response_->mutable_report() = *std::move(report);
          if (check_only) response_->mutable_report()->clear_name();
        } else if (check_only) {
          return End(report.status());
        } else {
          // It is kept; whether it would load is not known now.
          response_->mutable_report()->set_name(header_->name());
          response_->mutable_report()->set_digest(header_->digest());
          response_->mutable_report()->add_warnings(absl::StrCat("not checked: ", report.status().message()));
        }
        End(absl::OkStatus());
      });
    });
  }

  void End(const absl::Status& status) {
    idle_.reset();
    incoming_.reset();
    Finish(ToGrpc(status));
  }

  SchedulerCore& core_;
  grpc::CallbackServerContext* const context_;
  v1::UploadAdapterResponse* const response_;
  std::unique_ptr<grpc::Alarm> idle_;
  v1::UploadAdapterRequest request_;
  std::optional<v1::UploadHeader> header_;
  std::unique_ptr<IncomingContent> incoming_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace

grpc::ServerReadReactor<v1::UploadAdapterRequest>* AdaptersService::UploadAdapter(grpc::CallbackServerContext* context,
                                                                                  v1::UploadAdapterResponse* response) {
  return new UploadCall(core_, context, response);
}

}  // namespace h3
