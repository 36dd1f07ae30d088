#include "client/cli/generate_view.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "client/cli/proto_json.h"
#include "client/cli/status_line.h"
#include "client/cli/words.h"
#include "server/base/bytes.h"

namespace h3::ctl {
namespace {

class JsonView final : public GenerateView {
 public:
  explicit JsonView(std::ostream& out) : out_(out) {}

  void OnSeed(uint64_t seed) override { Line(absl::StrCat(R"({"event":"seed","seed":)", seed, "}")); }
  void OnAccepted(const v1::Accepted& accepted) override { Line(EventJson("accepted", accepted)); }
  void OnProgress(const v1::Progress& progress) override { Line(EventJson("progress", progress)); }
  void OnResult(const v1::ResultHeader& result) override { Line(EventJson("result", result)); }
  void OnCompleted(const v1::Completed& completed, const std::string& output) override {
    Line(EventJson("completed", completed, "output", output));
  }
  void OnFailed() override {}  // The error goes to stderr.

 private:
  void Line(const std::string& json) { out_ << json << std::endl; }

  std::ostream& out_;
};

class TerminalView final : public GenerateView {
 public:
  explicit TerminalView(std::ostream& out) : out_(out), line_(out) {}

  void OnSeed(uint64_t seed) override { out_ << "seed " << seed << " (drawn; --seed " << seed << " repeats this run)\n"; }
  void OnAccepted(const v1::Accepted& accepted) override {
    out_ << StackText(accepted);
    v1::Progress queued;
    queued.set_phase(v1::PHASE_QUEUED);
    queued.set_queue_position(accepted.queue_position());
    queued.set_eta_seconds(accepted.eta_seconds());
    line_.Draw(ProgressLine(queued));
  }
  void OnProgress(const v1::Progress& progress) override { line_.Draw(ProgressLine(progress)); }
  void OnResult(const v1::ResultHeader&) override { line_.Draw("receiving the result"); }
  void OnCompleted(const v1::Completed& completed, const std::string& output) override {
    line_.Erase();
    const int steps = completed.step_seconds_size();
    const double in_steps = std::accumulate(completed.step_seconds().begin(), completed.step_seconds().end(), 0.0);
    out_ << absl::StrFormat("done: %d evaluations of %.3f s, after %.2f s in the queue and %.2f s of preparation\n", steps,
                            steps == 0 ? 0.0 : in_steps / steps, completed.queued_seconds(), completed.prepare_seconds())
         << absl::StrFormat("memory: peak %s; merged copies of this stack would have held %s more\n",
                            Human(ByteCount(static_cast<int64_t>(completed.peak_bytes()))),
                            Human(ByteCount(static_cast<int64_t>(completed.avoided_resident_bytes()))))
         << RatiosText(completed.stack()) << "written: " << output << std::endl;
  }
  void OnFailed() override { line_.Erase(); }

 private:
  std::ostream& out_;
  StatusLine line_;
};

std::string Left(double seconds) { return seconds > 0 ? absl::StrCat("  ", Duration(std::ceil(seconds)), " left") : ""; }

}  // namespace

std::unique_ptr<GenerateView> MakeJsonView(std::ostream& out) { return std::make_unique<JsonView>(out); }

std::unique_ptr<GenerateView> MakeTerminalView(std::ostream& out) { return std::make_unique<TerminalView>(out); }

std::string ProgressLine(const v1::Progress& progress) {
  switch (progress.phase()) {
    case v1::PHASE_QUEUED:
      if (progress.queue_position() == 0) return absl::StrCat("queued, next in line", Left(progress.eta_seconds()));
      return absl::StrCat("queued, ", progress.queue_position(), " before this one", Left(progress.eta_seconds()));
    case v1::PHASE_PREPARE:
      return absl::StrCat("preparing adapters, text and modulations", Left(progress.eta_seconds()));
    case v1::PHASE_STREAM:
      return "receiving the result";
    default:
      break;
  }
  const size_t steps = std::max<size_t>(progress.steps(), 1);
  const size_t step = std::min<size_t>(progress.step(), steps);
  return absl::StrFormat("%s  %d/%d  %d %%%s", Bar(step, steps), step, steps, 100 * step / steps, Left(progress.eta_seconds()));
}

std::string StackText(const v1::Accepted& accepted) {
  std::string text = absl::StrCat("request ", accepted.request_id(), "  task ", Word(accepted.task()), "  partition ",
                                  Word(accepted.partition()), "  base ", ShortDigest(accepted.base_fingerprint()), "\n");
  std::vector<std::vector<std::string>> rows;
  for (const v1::ResolvedAdapter& adapter : accepted.stack()) {
    std::map<std::pair<uint32_t, double>, uint32_t> modules;  // By rank and scale.
    for (const v1::EffectiveScale& scale : adapter.scales()) modules[{scale.rank(), scale.scale()}] += scale.modules();
    std::vector<std::string> scales;
    for (const auto& [rank_and_scale, count] : modules) {
      scales.push_back(absl::StrCat(count, " of rank ", rank_and_scale.first, " x ", rank_and_scale.second));
    }
    rows.push_back({absl::StrCat("  ", adapter.adapter()), absl::StrCat("strength ", adapter.strength()),
                    absl::StrCat(adapter.modules(), " modules"), Human(ByteCount(static_cast<int64_t>(adapter.bytes()))),
                    absl::StrJoin(scales, ", ")});
  }
  absl::StrAppend(&text, Table(rows, {2, 3}));
  const auto warn = [&text](const auto& warnings, absl::string_view prefix) {
    for (const std::string& warning : warnings) absl::StrAppend(&text, "warning: ", prefix, warning, "\n");
  };
  for (const v1::ResolvedAdapter& adapter : accepted.stack()) {
    if (!adapter.left_out().empty()) {
      absl::StrAppend(&text, "left out of ", adapter.adapter(), ": ", absl::StrJoin(adapter.left_out(), ", "), "\n");
    }
    warn(adapter.warnings(), absl::StrCat(adapter.adapter(), ": "));
  }
  warn(accepted.warnings(), "");
  return text;
}

std::string RatiosText(const google::protobuf::RepeatedPtrField<v1::ResolvedAdapter>& stack) {
  std::string text;
  for (const v1::ResolvedAdapter& adapter : stack) {
    std::vector<double> ratios;
    for (const v1::StrengthRatio& ratio : adapter.auto_strength_ratios()) ratios.push_back(ratio.ratio());
    if (ratios.empty()) continue;
    std::sort(ratios.begin(), ratios.end());
    absl::StrAppendFormat(&text, "auto-strength of %s: x %.3g / %.3g / %.3g (least, median, most of %d modules)\n",
                          adapter.adapter(), ratios.front(), ratios[ratios.size() / 2], ratios.back(), ratios.size());
  }
  return text;
}

}  // namespace h3::ctl
