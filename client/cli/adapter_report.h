// How `h3ctl adapters` words what the server found out about an adapter.
#pragma once

#include <string>

#include "absl/status/status.h"
#include "google/protobuf/repeated_field.h"
#include "h3/v1/adapters.pb.h"

namespace h3::ctl {

// "would load" or "would not load: UNSUPPORTED_DORA ...": one line without its end.
std::string VerdictText(const v1::Verdict& verdict);

// OK where it would load, else the refusal that a request would get, as if the server had refused the call with it.
absl::Status VerdictStatus(const v1::Verdict& verdict);

// "alpha=8 qkv=interleaved fc1=gate-first partition=ref2va"; empty where nothing is kept.
std::string SettingsText(const v1::AdapterSettings& settings);

// A line for each scale, with a head.
std::string ScalesText(const google::protobuf::RepeatedPtrField<v1::EffectiveScale>& scales);

// The verdict, then all that is known, by lines and tables. What the server does not know is left out.
std::string ReportText(const v1::AdapterReport& report);

}  // namespace h3::ctl
