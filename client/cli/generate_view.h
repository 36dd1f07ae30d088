// What `h3ctl generate` shows while it runs.
#pragma once

#include <memory>
#include <ostream>
#include <string>

#include "google/protobuf/repeated_field.h"
#include "h3/v1/generation.pb.h"

namespace h3::ctl {

// Called in the order of the stream: OnAccepted, OnProgress*, then OnResult and OnCompleted, or OnFailed at any point.
class GenerateView {
 public:
  virtual ~GenerateView() = default;
  // The client drew the seed itself. Before all others.
  virtual void OnSeed(uint64_t seed) = 0;
  virtual void OnAccepted(const v1::Accepted& accepted) = 0;
  virtual void OnProgress(const v1::Progress& progress) = 0;
  virtual void OnResult(const v1::ResultHeader& result) = 0;
  virtual void OnCompleted(const v1::Completed& completed, const std::string& output) = 0;
  virtual void OnFailed() = 0;
};

// One JSON object a line, flushed at once: {"event": "accepted", ...}, "progress", "result", "completed" (with "output").
std::unique_ptr<GenerateView> MakeJsonView(std::ostream& out);

// The stack, then one line that is drawn over and over: queue position, bar, step, time left. Then a summary.
std::unique_ptr<GenerateView> MakeTerminalView(std::ostream& out);

// The drawn line: "[=========>          ]  3/8  37 %  0:12 left".
std::string ProgressLine(const v1::Progress& progress);

// What was accepted: a line an adapter ("style  strength 0.8  208 modules  592.0 MiB  208 of rank 64 x 0.5": alpha / rank), and
// the server's warnings. Also for evaluate.
std::string StackText(const v1::Accepted& accepted);

// A line for each adapter that auto-strength levelled, as it was applied (Completed.stack, Ready.stack); else empty. Also for
// evaluate.
std::string RatiosText(const google::protobuf::RepeatedPtrField<v1::ResolvedAdapter>& stack);

}  // namespace h3::ctl
