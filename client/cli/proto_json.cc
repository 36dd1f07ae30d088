#include "client/cli/proto_json.h"

#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "client/cli/words.h"
#include "google/protobuf/descriptor.h"

namespace h3::ctl {
namespace {

using Json = nlohmann::ordered_json;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::Reflection;

Json ToJson(const Message& message);

Json Single(const Message& message, const FieldDescriptor& field) {
  const Reflection& r = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return r.GetInt32(message, &field);
    case FieldDescriptor::CPPTYPE_INT64:
      return r.GetInt64(message, &field);
    case FieldDescriptor::CPPTYPE_UINT32:
      return r.GetUInt32(message, &field);
    case FieldDescriptor::CPPTYPE_UINT64:
      return r.GetUInt64(message, &field);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r.GetDouble(message, &field);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r.GetFloat(message, &field);
    case FieldDescriptor::CPPTYPE_BOOL:
      return r.GetBool(message, &field);
    case FieldDescriptor::CPPTYPE_ENUM:
      return Word(*field.enum_type(), r.GetEnumValue(message, &field));
    case FieldDescriptor::CPPTYPE_STRING:
      return r.GetString(message, &field);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(r.GetMessage(message, &field));
  }
  return nullptr;
}

Json Element(const Message& message, const FieldDescriptor& field, int i) {
  const Reflection& r = *message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32:
      return r.GetRepeatedInt32(message, &field, i);
    case FieldDescriptor::CPPTYPE_INT64:
      return r.GetRepeatedInt64(message, &field, i);
    case FieldDescriptor::CPPTYPE_UINT32:
      return r.GetRepeatedUInt32(message, &field, i);
    case FieldDescriptor::CPPTYPE_UINT64:
      return r.GetRepeatedUInt64(message, &field, i);
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return r.GetRepeatedDouble(message, &field, i);
    case FieldDescriptor::CPPTYPE_FLOAT:
      return r.GetRepeatedFloat(message, &field, i);
    case FieldDescriptor::CPPTYPE_BOOL:
      return r.GetRepeatedBool(message, &field, i);
    case FieldDescriptor::CPPTYPE_ENUM:
      return Word(*field.enum_type(), r.GetRepeatedEnumValue(message, &field, i));
    case FieldDescriptor::CPPTYPE_STRING:
      return r.GetRepeatedString(message, &field, i);
    case FieldDescriptor::CPPTYPE_MESSAGE:
      return ToJson(r.GetRepeatedMessage(message, &field, i));
  }
  return nullptr;
}

// Keys in order: reflection gives them in any.
Json Map(const Message& message, const FieldDescriptor& field) {
  const FieldDescriptor& key = *field.message_type()->map_key();
  const FieldDescriptor& value = *field.message_type()->map_value();
  std::map<std::string, Json> entries;
  for (int i = 0; i < message.GetReflection()->FieldSize(message, &field); ++i) {
    const Message& entry = message.GetReflection()->GetRepeatedMessage(message, &field, i);
    entries[entry.GetReflection()->GetString(entry, &key)] = Single(entry, value);
  }
  Json json = Json::object();
  for (auto& [name, entry] : entries) json[name] = std::move(entry);
  return json;
}

Json ToJson(const Message& message) {
  Json json = Json::object();
  const google::protobuf::Descriptor& type = *message.GetDescriptor();
  const Reflection& r = *message.GetReflection();
  for (int f = 0; f < type.field_count(); ++f) {
    const FieldDescriptor& field = *type.field(f);
    const std::string& name = field.name();
    if (field.is_map()) {
      json[name] = Map(message, field);
    } else if (field.is_repeated()) {
      json[name] = Json::array();
      for (int i = 0; i < r.FieldSize(message, &field); ++i) json[name].push_back(Element(message, field, i));
    } else if (field.containing_oneof() == nullptr || r.HasField(message, &field)) {
      json[name] = Single(message, field);
    }
  }
  return json;
}

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

}  // namespace

std::string ProtoJson(const Message& message) { return Dump(ToJson(message)); }

std::string EventJson(absl::string_view event, const Message& message, absl::string_view extra_key,
                      absl::string_view extra_value) {
  Json json = {{"event", std::string(event)}};
  json.update(ToJson(message));
  if (!extra_key.empty()) json[std::string(extra_key)] = std::string(extra_value);
  return Dump(json);
}

}  // namespace h3::ctl
