// Check, upload, settings and presets over a scheduler with a fake worker.
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "server/base/error.h"
#include "server/base/sha256.h"
#include "tests/testing/safetensors_builder.h"
#include "tests/unit/rpc/scheduler_fixture.h"

namespace h3 {
namespace {

using testing::BuildSafetensors;
using testing::Zeros;

std::string AdapterOfRank(int64_t rank) {
  return BuildSafetensors(
      {Zeros("blocks.0.attn.out_proj.lora_A.weight", {rank, 96}), Zeros("blocks.0.attn.out_proj.lora_B.weight", {64, rank})});
}

class SchedulerAdapterTest : public SchedulerFixture {
 protected:
  absl::StatusOr<v1::AdapterReport> Check(const std::string& name) {
    const auto context = NewContext();
    v1::CheckAdapterRequest request;
    request.set_name(name);
    v1::CheckAdapterResponse response;
    const absl::Status status = FromGrpc(adapters->CheckAdapter(context.get(), request, &response));
    if (!status.ok()) return status;
    return response.report();
  }
  absl::StatusOr<v1::UploadAdapterResponse> Upload(const v1::UploadHeader& header, const std::vector<std::string>& chunks) {
    const auto context = NewContext();
    v1::UploadAdapterResponse response;
    const auto stream = adapters->UploadAdapter(context.get(), &response);
    v1::UploadAdapterRequest request;
    *request.mutable_header() = header;
    stream->Write(request);
    for (const std::string& chunk : chunks) {
      request.set_chunk(chunk);
      if (!stream->Write(request)) break;
    }
    stream->WritesDone();
    const absl::Status status = FromGrpc(stream->Finish());
    if (!status.ok()) return status;
    return response;
  }
  static v1::UploadHeader HeaderOf(const std::string& name, const std::string& content) {
    v1::UploadHeader header;
    header.set_name(name);
    header.set_bytes(content.size());
    header.set_digest(Sha256Hex(content));
    return header;
  }
  absl::StatusOr<v1::SetAdapterResponse> Set(const std::string& name, const v1::AdapterSettings& settings, bool reset = false) {
    const auto context = NewContext();
    v1::SetAdapterRequest request;
    request.set_name(name);
    *request.mutable_settings() = settings;
    request.set_reset(reset);
    v1::SetAdapterResponse response;
    const absl::Status status = FromGrpc(adapters->SetAdapter(context.get(), request, &response));
    if (!status.ok()) return status;
    return response;
  }
  absl::StatusOr<v1::Preset> SetPreset(const v1::SetPresetRequest& request) {
    const auto context = NewContext();
    v1::SetPresetResponse response;
    const absl::Status status = FromGrpc(presets->SetPreset(context.get(), request, &response));
    if (!status.ok()) return status;
    return response.preset();
  }
  absl::StatusOr<v1::Preset> GetPreset(const std::string& name) {
    const auto context = NewContext();
    v1::GetPresetRequest request;
    request.set_name(name);
    v1::GetPresetResponse response;
    const absl::Status status = FromGrpc(presets->GetPreset(context.get(), request, &response));
    if (!status.ok()) return status;
    return response.preset();
  }
  static v1::SetPresetRequest PresetOf(const std::string& name, const std::string& adapter, double strength) {
    v1::SetPresetRequest request;
    request.set_name(name);
    request.add_stack()->set_adapter(adapter);
    request.mutable_stack(0)->set_strength(strength);
    return request;
  }
};

TEST_F(SchedulerAdapterTest, ACheckAsksAWorkerOnceAndTellsAll) {
  Worker& worker = StartWorker();
  const auto report = Check("lora/turbo_bare");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->name(), "lora/turbo_bare");
  EXPECT_EQ(report->format(), "reference");
  EXPECT_GT(report->arithmetic_percent(), 0);
  EXPECT_EQ(report->modules(), 29u);
  EXPECT_EQ(report->relative_strength(), 0.25);
  EXPECT_TRUE(report->verdict().loads());
  EXPECT_EQ(report->checked_by(), "w");
  EXPECT_EQ(worker.engine.last_adapter()->digest, report->digest());
  worker.engine.RefuseNext(absl::InternalError("asked again"));
  EXPECT_TRUE(Check("lora/turbo_bare")->verdict().loads()) << "the verdict is kept by digest";
}

TEST_F(SchedulerAdapterTest, AVerdictSaysWhyAnAdapterWouldNotLoad) {
  Worker& worker = StartWorker();
  const auto report = Check("reject/wrong_in");
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_FALSE(report->verdict().loads());
  EXPECT_EQ(report->verdict().code(), "INVALID_ARGUMENT");
  EXPECT_EQ(report->verdict().reason(), "SHAPE_MISMATCH");
  EXPECT_TRUE(report->verdict().details().contains("tensor"));
  // What only the values show.
  worker.engine.RefuseNext(RefuseArgument(reason::kNotFinite, "NaN"));
  EXPECT_EQ(Check("reject/nan")->verdict().reason(), "NOT_FINITE");
  EXPECT_EQ(Check("reject/nan")->verdict().reason(), "NOT_FINITE") << "kept";
  EXPECT_EQ(ReasonOf(Check("lora/nobody").status()), "UNKNOWN_ADAPTER");
}

TEST_F(SchedulerAdapterTest, AnUploadIsThereOnlyWhenAllOfItHasCome) {
  StartWorker();
  const std::string content = AdapterOfRank(4);
  const size_t half = content.size() / 2;
  const auto broken = Upload(HeaderOf("mine", content), {content.substr(0, half)});
  EXPECT_EQ(ReasonOf(broken.status()), "MALFORMED_FILE");
  EXPECT_EQ(ReasonOf(Check("mine").status()), "UNKNOWN_ADAPTER");
  const auto first = Upload(HeaderOf("mine", content), {content.substr(0, half), content.substr(half)});
  ASSERT_TRUE(first.ok()) << first.status();
  EXPECT_EQ(first->replaced(), "");
  EXPECT_TRUE(first->report().verdict().loads());
  EXPECT_EQ(first->report().digest(), Sha256Hex(content));
  // A wrong checksum leaves what was there.
  v1::UploadHeader lying = HeaderOf("mine", AdapterOfRank(2));
  lying.set_digest(Sha256Hex("something else"));
  EXPECT_EQ(ReasonOf(Upload(lying, {AdapterOfRank(2)}).status()), "MALFORMED_FILE");
  EXPECT_EQ(Check("mine")->digest(), Sha256Hex(content));
  const auto second = Upload(HeaderOf("mine", AdapterOfRank(2)), {AdapterOfRank(2)});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ(second->replaced(), Sha256Hex(content));
  EXPECT_EQ(Check("mine")->digest(), Sha256Hex(AdapterOfRank(2)));
}

TEST_F(SchedulerAdapterTest, UploadsThatCannotBeAreRefused) {
  StartWorker();
  const std::string content = AdapterOfRank(4);
  EXPECT_EQ(ReasonOf(Upload(HeaderOf("lora/turbo_bare", content), {content}).status()), "NAME_TAKEN");
  EXPECT_EQ(ReasonOf(Upload(HeaderOf("../escape", content), {content}).status()), "UNKNOWN_ADAPTER");
  EXPECT_EQ(ReasonOf(Upload(HeaderOf("mine", "no safetensors"), {"no safetensors"}).status()), "MALFORMED_FILE");
  v1::UploadHeader huge = HeaderOf("mine", content);
  huge.set_bytes(uint64_t{1} << 50);
  EXPECT_EQ(ReasonOf(Upload(huge, {content}).status()), "BAD_REQUEST");
  v1::UploadHeader no_digest = HeaderOf("mine", content);
  no_digest.set_digest("../../etc");
  EXPECT_EQ(ReasonOf(Upload(no_digest, {content}).status()), "BAD_REQUEST");
  EXPECT_EQ(ReasonOf(Check("mine").status()), "UNKNOWN_ADAPTER");
}

TEST_F(SchedulerAdapterTest, ACheckOfAFileKeepsNothing) {
  StartWorker();
  v1::UploadHeader header = HeaderOf("", AdapterOfRank(4));
  header.set_check_only(true);
  const auto report = Upload(header, {AdapterOfRank(4)});
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_TRUE(report->report().verdict().loads());
  EXPECT_EQ(ReasonOf(Check("sha256:" + header.digest()).status()), "UNKNOWN_ADAPTER");
}

TEST_F(SchedulerAdapterTest, SettingsReachTheWorkerAndTheClientsOwnDoNot) {
  Worker& worker = StartWorker();
  v1::AdapterSettings settings;
  settings.set_alpha(2);
  ASSERT_TRUE(Set("lora/turbo_bare", settings).ok());
  v1::AdapterSettings more;
  more.set_fc1_order(v1::FC1_ORDER_UP_FIRST);
  const auto both = Set("lora/turbo_bare", more);
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_EQ(both->settings().alpha(), 2) << "what is not named stays";

  v1::GenerateRequest header = Header(1, "lora/turbo_bare");
  header.mutable_header()->mutable_stack(0)->mutable_settings()->set_alpha(99);
  const auto context = NewContext();
  const auto stream = Start(context.get(), header);
  v1::GenerateResponse event;
  ASSERT_TRUE(ReadUntil(*stream, v1::GenerateResponse::kAccepted, event));
  EXPECT_EQ(event.accepted().stack(0).scales(0).source(), "adapter settings");
  ASSERT_TRUE(Drain(*stream).ok());
  const AdapterSettings got = worker.engine.last_generation()->conditions.stack.at(0).settings;
  EXPECT_EQ(got.alpha, 2);
  EXPECT_EQ(got.fc1_gate_first, false);

  EXPECT_FALSE(Set("lora/turbo_bare", {}, /*reset=*/true)->settings().has_alpha());
  settings.set_alpha(-1);
  EXPECT_EQ(ReasonOf(Set("lora/turbo_bare", settings).status()), "BAD_SCALE");
  settings.set_alpha(1);
  settings.set_peft_config("{}");
  EXPECT_EQ(ReasonOf(Set("lora/turbo_bare", settings).status()), "BAD_REQUEST");
}

TEST_F(SchedulerAdapterTest, APresetIsAStackWithItsDigests) {
  Worker& worker = StartWorker();
  ASSERT_TRUE(Upload(HeaderOf("mine", AdapterOfRank(4)), {AdapterOfRank(4)}).ok());
  const auto preset = SetPreset(PresetOf("look", "mine", 0.5));
  ASSERT_TRUE(preset.ok()) << preset.status();
  EXPECT_EQ(preset->revision(), 1u);
  EXPECT_EQ(preset->stack(0).digest(), Sha256Hex(AdapterOfRank(4)));

  v1::GenerateRequest header = Header(1);
  header.mutable_header()->set_preset("look");
  {
    const auto context = NewContext();
    ASSERT_TRUE(Drain(*Start(context.get(), header)).ok());
  }
  const StackEntry used = worker.engine.last_generation()->conditions.stack.at(0);
  EXPECT_EQ(used.strength, 0.5);
  EXPECT_EQ(used.digest, Sha256Hex(AdapterOfRank(4)));

  // The name leads to another file: reported, and never silently used.
  ASSERT_TRUE(Upload(HeaderOf("mine", AdapterOfRank(2)), {AdapterOfRank(2)}).ok());
  EXPECT_EQ(GetPreset("look")->changed(0), "mine");
  const absl::Status changed = RefusalOf(header);
  EXPECT_EQ(ReasonOf(changed), "ADAPTER_CHANGED");
  EXPECT_EQ(DetailsOf(changed).at("preset"), "look");
  v1::SetPresetRequest again = PresetOf("look", "mine", 1);
  again.set_expected_revision(7);
  EXPECT_EQ(ReasonOf(SetPreset(again).status()), "PRESET_CHANGED");
  again.set_expected_revision(1);
  EXPECT_EQ(SetPreset(again)->revision(), 2u);
  EXPECT_EQ(GetPreset("look")->changed_size(), 0);
}

TEST_F(SchedulerAdapterTest, PresetsThatCannotBeAreRefused) {
  StartWorker();
  EXPECT_EQ(ReasonOf(SetPreset(PresetOf("a/b", "lora/turbo_bare", 1)).status()), "BAD_REQUEST");
  EXPECT_EQ(ReasonOf(SetPreset(PresetOf("look", "lora/nobody", 1)).status()), "UNKNOWN_ADAPTER");
  EXPECT_EQ(ReasonOf(SetPreset(PresetOf("look", "lora/turbo_bare", 1000)).status()), "BAD_STRENGTH");
  EXPECT_EQ(ReasonOf(GetPreset("look").status()), "UNKNOWN_PRESET");
  v1::GenerateRequest header = Header(1, "lora/turbo_bare");
  header.mutable_header()->set_preset("look");
  EXPECT_EQ(ReasonOf(RefusalOf(header)), "BAD_REQUEST") << "a preset and a stack";
  header.mutable_header()->clear_stack();
  EXPECT_EQ(ReasonOf(RefusalOf(header)), "UNKNOWN_PRESET");
}

}  // namespace
}  // namespace h3
