#include <atomic>
#include <memory>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/support/status.h"
#include "server/base/error.h"
#include "server/base/status_macros.h"
#include "server/rpc/adapter_check.h"
#include "server/rpc/scheduler_services.h"

namespace h3 {
namespace {

constexpr size_t kMaxChunk = 1 << 20;
constexpr size_t kDigestChars = 64;

// One upload. Messages are read one at a time, each taken on the file thread before the next is asked for, so that a fast client
// waits for the disk.
class UploadCall final : public grpc::ServerReadReactor<v1::UploadAdapterRequest> {
 public:
  UploadCall(SchedulerCore& core, v1::UploadAdapterResponse* response) : core_(core), response_(response) { StartRead(&request_); }

  void OnReadDone(bool ok) override {
    core_.ContinueFileWork([this, ok] {
      if (cancelled_.load()) return End(absl::CancelledError("the client is gone"));
      if (!ok) return Complete();
      if (const absl::Status status = Take(); !status.ok()) return End(status);
      StartRead(&request_);
    });
  }
  void OnCancel() override { cancelled_.store(true); }
  void OnDone() override { delete this; }

 private:
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
    if (!header_->check_only()) H3_RETURN_IF_ERROR(core_.registry().CheckUploadName(header_->name()));
    H3_ASSIGN_OR_RETURN(incoming_, core_.registry().content().Begin(digest, static_cast<int64_t>(header_->bytes())));
    return absl::OkStatus();
  }

  void Complete() {
    if (incoming_ == nullptr) return End(RefuseArgument(reason::kBadRequest, "the call ended before its header"));
    if (const absl::Status status = incoming_->Commit(); !status.ok()) return End(status);
    const std::string content = absl::StrCat("sha256:", header_->digest());
    const bool check_only = header_->check_only();
    // What is no safetensors file never gets a name.
    if (const auto found = core_.registry().Find(content); !found.ok() && !check_only) {
      core_.registry().ForgetUnnamed(header_->digest()).IgnoreError();
      return End(found.status());
    }
    if (!check_only) {
      auto replaced = core_.registry().NameUpload(header_->name(), header_->digest());
      if (!replaced.ok()) {
        core_.registry().ForgetUnnamed(header_->digest()).IgnoreError();
        return End(replaced.status());
      }
      // What it replaces stays until the next start: requests that were accepted with it may still wait.
      response_->set_replaced(*replaced);
    }
    CheckAdapter(core_, check_only ? content : header_->name(), [this, check_only](absl::StatusOr<v1::AdapterReport> report) {
      core_.ContinueFileWork([this, check_only, report = std::move(report)]() mutable {
        if (check_only) core_.registry().ForgetUnnamed(header_->digest()).IgnoreError();
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
    incoming_.reset();
    Finish(ToGrpc(status));
  }

  SchedulerCore& core_;
  v1::UploadAdapterResponse* const response_;
  v1::UploadAdapterRequest request_;
  std::optional<v1::UploadHeader> header_;
  std::unique_ptr<IncomingContent> incoming_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace

grpc::ServerReadReactor<v1::UploadAdapterRequest>* AdaptersService::UploadAdapter(grpc::CallbackServerContext*,
                                                                                  v1::UploadAdapterResponse* response) {
  return new UploadCall(core_, response);
}

}  // namespace h3
