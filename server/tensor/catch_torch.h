// The one place where LibTorch's exceptions become a Status. Nothing above it sees an exception.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "server/base/error.h"

namespace h3 {

// The detail that tells an allocation that failed from a refusal beforehand.
inline constexpr char kFailedAllocation[] = "failed_allocation";

// `fn` returns an absl::Status or an absl::StatusOr<T>. Out of memory becomes RESOURCE_EXHAUSTED / VRAM_EXCEEDED, everything
// else INTERNAL.
template <typename F>
auto CatchTorch(absl::string_view what, F&& fn) -> decltype(fn()) {
  try {
    return fn();
  } catch (const c10::OutOfMemoryError& e) {
    return Refuse(absl::StatusCode::kResourceExhausted, reason::kVramExceeded,
                  absl::StrCat(what, ": ", e.what_without_backtrace()), {{kFailedAllocation, std::string(what)}});
  } catch (const c10::Error& e) {
    return absl::InternalError(absl::StrCat(what, ": ", e.what_without_backtrace()));
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat(what, ": ", e.what()));
  }
}

}  // namespace h3
