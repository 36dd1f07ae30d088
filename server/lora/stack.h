// The stack of one request: its adapters, pinned, and the programs that the forward runs.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/format/request.h"
#include "server/lora/adapter_store.h"
#include "server/model/resident_model.h"
#include "server/model/stack_program.h"

namespace h3 {

// On the device thread. Borrows the model; holds (pins) the adapters as long as it lives.
class Stack {
 public:
  // Refuses as CheckStack and AdapterStore::Acquire do; the message names the entry.
  static absl::StatusOr<std::unique_ptr<Stack>> Build(const ResidentModel& model, AdapterStore& store,
                                                      absl::Span<const StackEntry> entries);

  // In request order.
  const std::vector<ResolvedAdapter>& resolved() const { return resolved_; }

  // The program of one evaluation. `factors`: one an entry, in place of its per-evaluation factors; or empty. The same factors
  // give the same program (by address), and programs live as long as the stack.
  const StackProgram& Program(int64_t evaluation, absl::Span<const double> factors = {});

  // Equal for programs that do the same to the text stream, so that it is computed once for all of them.
  using TextKey = std::vector<double>;
  TextKey TextKeyOf(int64_t evaluation, absl::Span<const double> factors = {}) const;

  // Bytes of the weights that a merging runtime would hold a second time: each target once, in the base's type.
  ByteCount MergedBytes() const;

 private:
  struct Member {
    StackEntry entry;
    std::shared_ptr<const ResidentAdapter> adapter;
    std::vector<double> scales;      // Of each term: alpha / rank as overridden, times the auto-strength ratio.
    bool touches_text = false;       // condition_proj or the refiner.
  };

  explicit Stack(const ResidentModel& model) : model_(model) {}
  std::vector<double> EvaluationFactors(int64_t evaluation, absl::Span<const double> factors) const;
  std::unique_ptr<StackProgram> MakeProgram(const std::vector<double>& factors) const;

  const ResidentModel& model_;
  std::vector<Member> members_;
  std::vector<ResolvedAdapter> resolved_;
  std::map<std::vector<double>, std::unique_ptr<StackProgram>> programs_;
};

}  // namespace h3
