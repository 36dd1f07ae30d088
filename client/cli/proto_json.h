// Messages as the JSON that scripts read: proto field names, 64-bit numbers as numbers, enums as lower-case words, maps
// (their keys are text) as objects.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "google/protobuf/message.h"

namespace h3::ctl {

// One line. Every field is there, in the order of the .proto, also when it is zero; except an unset `optional`
// field or oneof member.
// An enum value loses the prefix of its type: PARTITION_REF2VA is "ref2va", and ..._UNSPECIFIED is "unknown".
std::string ProtoJson(const google::protobuf::Message& message);

// The same with {"event": NAME, ...} in front; where `extra_key` is not empty, with that text field at the end.
std::string EventJson(absl::string_view event, const google::protobuf::Message& message, absl::string_view extra_key = "",
                      absl::string_view extra_value = "");

}  // namespace h3::ctl
