// Early return of a Status. Abseil's own come with a newer release than Debian 12's; delete this header then.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#define H3_CONCAT_INNER(a, b) a##b
#define H3_CONCAT(a, b) H3_CONCAT_INNER(a, b)

#define H3_RETURN_IF_ERROR(expr)                                 \
  do {                                                           \
    if (absl::Status h3_status = (expr); !h3_status.ok()) {      \
      return h3_status;                                          \
    }                                                            \
  } while (false)

#define H3_ASSIGN_OR_RETURN(lhs, expr) H3_ASSIGN_OR_RETURN_IMPL(H3_CONCAT(h3_statusor_, __LINE__), lhs, expr)
#define H3_ASSIGN_OR_RETURN_IMPL(tmp, lhs, expr) \
  auto tmp = (expr);                             \
  if (!tmp.ok()) return tmp.status();            \
  lhs = std::move(tmp).value()
